"""The whole space of layouts of a model on a cluster, and the best of it with proof. No torch."""

from hpsearch.space.best import Certificate, Found, answers, best
from hpsearch.space.exact import Choice
from hpsearch.space.rules import RULES, Rule
from hpsearch.space.space import Space

__all__ = ["RULES", "Certificate", "Choice", "Found", "Rule", "Space", "answers", "best"]
