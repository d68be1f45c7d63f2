"""From a module and a batch to a `CapturedGraph`, on fake tensors. The torch half begins here."""

from hpsearch.capture.captured import CapturedGraph, capture
from hpsearch.capture.rules import rules_for

__all__ = ["CapturedGraph", "capture", "rules_for"]
