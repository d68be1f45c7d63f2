"""The pool of ranks, one for each module of tests."""

from tests.end_to_end.conftest import ranks

__all__ = ["ranks"]
