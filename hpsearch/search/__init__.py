"""The outer search and the plan it makes. No torch."""

from hpsearch.search.search import search

__all__ = ["search"]
