"""An event timeline: who runs when, if every resource does its events one at a time in the order they are issued.

The judge over closed forms. A resource is the compute of a rank, or one communicator (its operations are serial). An
event starts when its resource is free and all it waits for has finished.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from hpsearch.errors import InternalError


@dataclass(frozen=True)
class Event:
    name: str
    resource: str
    seconds: float
    after: tuple[str, ...] = ()
    """Events that must have finished before this one starts."""


@dataclass(frozen=True)
class Span:
    event: Event
    start_s: float
    end_s: float


@dataclass(frozen=True)
class Timeline:
    """Spans in issue order."""

    spans: tuple[Span, ...]

    @property
    def end_s(self) -> float:
        return max((span.end_s for span in self.spans), default=0.0)

    def busy_s(self, resource: str) -> float:
        return sum(span.end_s - span.start_s for span in self.spans if span.event.resource == resource)

    def exposed_s(self, resource: str) -> float:
        """Seconds of the whole in which `resource` (the compute) stands still."""
        return self.end_s - self.busy_s(resource)

    def __str__(self) -> str:
        rows = [f"{s.start_s:12.6f} {s.end_s:12.6f}  {s.event.resource:<12} {s.event.name}" for s in self.spans]
        return "\n".join(rows)


def simulate(events: Iterable[Event]) -> Timeline:
    """The timeline of `events`, issued in this order on every resource.

    Raises InternalError when an event waits for one that was not issued before it: on real ranks that is a deadlock.
    """
    free: defaultdict[str, float] = defaultdict(float)
    ended: dict[str, float] = {}
    spans = []
    for event in events:
        for name in event.after:
            if name not in ended:
                raise InternalError(f"event {event.name}", f"waits for {name}, which was not issued before", "Reorder.")
        start = max([free[event.resource], *(ended[name] for name in event.after)])
        end = start + event.seconds
        free[event.resource] = ended[event.name] = end
        spans.append(Span(event, start, end))
    return Timeline(tuple(spans))
