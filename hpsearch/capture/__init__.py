"""From a module and a batch to a `CapturedGraph`, on fake tensors. The torch half begins here."""

from hpsearch.capture.captured import CapturedGraph, capture
from hpsearch.capture.config import capture_config
from hpsearch.capture.rules import rules_for

__all__ = ["CapturedGraph", "capture", "capture_config", "rules_for"]
