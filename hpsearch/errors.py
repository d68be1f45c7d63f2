"""Every failure hpsearch reports, as one tree.

    HpsearchError
    ├── ClusterError      a cluster file or measurement that cannot be believed
    ├── CaptureError      a model that is not one graph, or a config nobody knows
    ├── UnsupportedOpError   an op without a sharding rule or a price
    ├── LegalityError     a pinned degree or layout that the model cannot take
    ├── InfeasibleError   a well-posed problem that no plan satisfies
    ├── PlanError         a plan file that is damaged, stale or made for something else
    ├── LoweringError     a plan that cannot be turned into a program
    ├── LaunchError       ranks that disagree, or a program started without its launcher
    ├── BatchError        a batch that does not fit the plan
    ├── CheckpointError   a checkpoint that is damaged, incomplete, or of another model
    └── InternalError     a broken promise of our own; always a bug report

One grammar for every message: *subject*: what was expected, but what was found, with numbers. What to do.
"""

from __future__ import annotations


def counted(number: int, noun: str) -> str:
    """`1 device`, `2 micro-batches`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}{'es' if noun.endswith('ch') else 's'}"


class HpsearchError(Exception):
    """A failure with three parts, printed as one sentence a user can act on."""

    exit_code = 1

    def __init__(self, subject: str, problem: str, remedy: str = "") -> None:
        self.subject = subject
        self.problem = problem
        self.remedy = remedy
        super().__init__(subject, problem, remedy)

    def __str__(self) -> str:
        text = f"{self.subject}: {self.problem}"
        if not text.endswith((".", "?", "!")):
            text += "."
        return f"{text} {self.remedy}".strip()


class ClusterError(HpsearchError):
    """A cluster file or a measurement that cannot be believed."""


class CaptureError(HpsearchError):
    """A model that is not one graph, or a configuration that names no known model."""


class UnsupportedOpError(HpsearchError):
    """An op for which no sharding rule or no price exists."""


class LegalityError(HpsearchError):
    """A pinned degree or layout that the model cannot take; names field, value, degree and legal set."""


class InfeasibleError(HpsearchError):
    """No plan satisfies the limits; says the least memory found, what fills it, what would fit."""

    exit_code = 3


class PlanError(HpsearchError):
    """A plan file that is damaged, stale, or made for another model or cluster."""


class LoweringError(HpsearchError):
    """A plan that cannot be turned into a program."""


class LaunchError(HpsearchError):
    """Ranks that disagree about the plan, or a program that needs a launcher."""


class BatchError(HpsearchError):
    """A batch that does not fit the plan."""


class CheckpointError(HpsearchError):
    """A checkpoint that is damaged, incomplete, or of another model."""


class InternalError(HpsearchError):
    """A broken promise of our own."""
