"""When things happen: schedules as action text, and the event timeline that prices them. No torch."""

from hpsearch.schedule.alive import alive, alive_on
from hpsearch.schedule.bound import lower_bound_s, lower_bounds_s
from hpsearch.schedule.dry_run import DryRun, dry_run, peak_kept
from hpsearch.schedule.flow import Chain, longest_chain, rank_ends_s, schedule_s, schedules_s
from hpsearch.schedule.kinds import KINDS, make_schedule, placement, refusal
from hpsearch.schedule.schedule import Action, Overlapped, Schedule, Step, one_stage
from hpsearch.schedule.timeline import Event, Span, Timeline, simulate

__all__ = [
    "KINDS",
    "Action",
    "Chain",
    "DryRun",
    "Event",
    "Overlapped",
    "Schedule",
    "Span",
    "Step",
    "Timeline",
    "alive",
    "alive_on",
    "dry_run",
    "longest_chain",
    "lower_bound_s",
    "lower_bounds_s",
    "make_schedule",
    "one_stage",
    "peak_kept",
    "placement",
    "rank_ends_s",
    "refusal",
    "schedule_s",
    "schedules_s",
    "simulate",
]
