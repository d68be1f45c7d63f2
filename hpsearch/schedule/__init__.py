"""When things happen: schedules as action text, and the event timeline that prices them. No torch."""

from hpsearch.schedule.schedule import Action, Schedule, one_stage
from hpsearch.schedule.timeline import Event, Span, Timeline, simulate

__all__ = ["Action", "Event", "Schedule", "Span", "Timeline", "one_stage", "simulate"]
