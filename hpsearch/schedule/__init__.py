"""When things happen: schedules as action text, and the event timeline that prices them. No torch."""

from hpsearch.schedule.dry_run import DryRun, dry_run, peak_kept
from hpsearch.schedule.kinds import KINDS, make_schedule, placement, refusal
from hpsearch.schedule.schedule import Action, Overlapped, Schedule, Step, one_stage
from hpsearch.schedule.timeline import Event, Span, Timeline, simulate

__all__ = [
    "KINDS",
    "Action",
    "DryRun",
    "Event",
    "Overlapped",
    "Schedule",
    "Span",
    "Step",
    "Timeline",
    "dry_run",
    "make_schedule",
    "one_stage",
    "peak_kept",
    "placement",
    "refusal",
    "simulate",
]
