"""When the last backward of a pipeline ends: its schedule run on the times of its chunks.

Long runs of micro-batches are not simulated: two short ones give them, as if each further round took the same time.
Interleaved and with uneven chunks that comes true late (decision 29); a plan's own seconds come from `schedule_s`.
Schedules other than 1f1b and interleaved are simulated whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from hpsearch.errors import LegalityError, PlanError
from hpsearch.estimate.parallel import AS_RUN
from hpsearch.schedule import Schedule, longest_chain, make_schedule, schedule_s, schedules_s
from hpsearch.schedule.flow import Flow, flow_of
from hpsearch.schedule.kinds import make_rows
from hpsearch.schedule.orders import paired, turns
from hpsearch.schedule.schedule import Rows

Floats = NDArray[np.float64]


@lru_cache(maxsize=256)
def as_run(stages: int, chunks: int, micro_batches: int) -> Schedule:
    """1F1B, or interleaved 1F1B with `chunks` model chunks a rank, as training frameworks run it.

    They take numbers of micro-batches that `make_schedule` refuses: fewer than ranks, a last round that is not whole.
    And where micro-batches are as many as ranks, interleaved, all forwards come first (Narayanan et al. 2021's code).
    Raises LegalityError where a last round is so small that ranks would wait for each other.
    """
    _waits_as_run(stages, chunks, micro_batches)
    return Schedule.of(_rows_as_run(stages, chunks, micro_batches))


def _rows_as_run(stages: int, chunks: int, micro_batches: int) -> Rows:
    kind = "1f1b" if chunks == 1 else "gpipe" if micro_batches == stages else "interleaved"
    return paired(stages, chunks, micro_batches, turns(kind, stages, chunks, micro_batches)[0])


def waits(kind: str, stages: int, chunks: int, micro_batches: int) -> Flow:
    """Who waits for whom under `text`. Raises LegalityError as that does."""
    if kind in AS_RUN:
        return _waits_as_run(stages, chunks, micro_batches)
    return _waits_as_made(kind, stages, chunks, micro_batches)


@lru_cache(maxsize=64)
def _waits_as_made(kind: str, stages: int, chunks: int, micro_batches: int) -> Flow:
    return flow_of(make_rows(kind, stages, chunks, micro_batches))


@lru_cache(maxsize=64)
def _waits_as_run(stages: int, chunks: int, micro_batches: int) -> Flow:
    try:
        return flow_of(_rows_as_run(stages, chunks, micro_batches))
    except PlanError as hang:
        rest = micro_batches % stages
        wanted = f"expected whole rounds of pp = {stages} where vpp = {chunks}, but the last has {rest}"
        legal = f"Legal: {micro_batches - rest}, {micro_batches - rest + stages}, …"
        where = f"layout, micro_batches = {micro_batches}"
        raise LegalityError(where, f"{wanted}, and {hang.problem}", legal) from hang


@dataclass(frozen=True)
class Path:
    """The longest chain of actions: how often each chunk's forward and backward, and a hop, lie on it.

    The step's time is their sum, and stays it while the times change so little that the chain stays the longest.
    `weight`: of weight parts, where backwards are split; then `backward` is their input parts.
    """

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    hops: float
    weight: tuple[float, ...] = ()

    def seconds(
        self, forward: Sequence[float], backward: Sequence[float], hop_s: float, weight: Sequence[float] = ()
    ) -> float:
        counts, times = (*self.forward, *self.backward, self.hops, *self.weight), (*forward, *backward, hop_s, *weight)
        return sum(count * seconds for count, seconds in zip(counts, times, strict=True))

    def stretched(self, longer: Path, rounds: float) -> Path:
        """This path, and `rounds` times what `longer` has more."""

        def go_on(short: float, long: float) -> float:
            return short + rounds * (long - short)

        return Path(
            tuple(map(go_on, self.forward, longer.forward)),
            tuple(map(go_on, self.backward, longer.backward)),
            go_on(self.hops, longer.hops),
        )


def simulated_s(
    forward: Sequence[float], backward: Sequence[float], stages: int, micro_batches: int, hop_s: float
) -> float:
    """Seconds until every rank is done; `forward[i]`, `backward[i]` of chunk i, which stands on rank i mod stages."""
    schedule = _waits_as_run(stages, len(forward) // stages, micro_batches)
    return schedule_s(schedule, forward, backward, [0.0] * len(forward), hop_s)


def text(kind: str, stages: int, virtual: int, micro_batches: int) -> Schedule:
    """The schedule of this name: 1f1b and interleaved as run, all others as `make_schedule` has them."""
    if kind in AS_RUN:
        return as_run(stages, virtual, micro_batches)
    return make_schedule(kind, stages, virtual, micro_batches)


Parts = tuple[Sequence[float], Sequence[float], Sequence[float]]
"""Seconds of the chunks: forward, backward or its input part, weight part."""


def run_s(kind: str, parts: Parts, stages: int, micro_batches: int, hop_s: float) -> float:
    """Seconds until every rank is done with all micro-batches, under the schedule `kind`."""
    return schedule_s(waits(kind, stages, len(parts[0]) // stages, micro_batches), *parts, hop_s)


def run_path(kind: str, parts: Parts, stages: int, micro_batches: int, hop_s: float) -> Path:
    """The longest chain of `run_s`; of 1f1b and interleaved, long runs from two short ones, and whole backwards."""
    if kind in AS_RUN:
        return pipeline_path(parts[0], parts[1], stages, micro_batches, hop_s)
    found = longest_chain(waits(kind, stages, len(parts[0]) // stages, micro_batches), *parts, hop_s)
    forward, backward, weight = (
        tuple(map(float, one)) for one in (found.forward, found.backward_input, found.backward_weight)
    )
    return Path(forward, backward, float(sum(found.hops)), weight)


def _simulated_path(
    forward: Sequence[float], backward: Sequence[float], stages: int, micro_batches: int, hop_s: float
) -> Path:
    schedule = _waits_as_run(stages, len(forward) // stages, micro_batches)
    chain = longest_chain(schedule, forward, backward, [0.0] * len(forward), hop_s)
    return Path(tuple(map(float, chain.forward)), tuple(map(float, chain.backward_input)), float(sum(chain.hops)))


def pipeline_path(
    forward: Sequence[float], backward: Sequence[float], stages: int, micro_batches: int, hop_s: float
) -> Path:
    """The longest chain of all micro-batches through `stages` ranks; long runs from two short ones."""
    if stages == 1:
        times = (float(micro_batches),) * len(forward)
        return Path(times, times, 0.0)
    rounds = micro_batches // stages
    if rounds <= 3:
        return _simulated_path(forward, backward, stages, micro_batches, hop_s)
    rest = micro_batches % stages
    short = _simulated_path(forward, backward, stages, 2 * stages + rest, hop_s)
    longer = _simulated_path(forward, backward, stages, 3 * stages + rest, hop_s)
    return short.stretched(longer, rounds - 2)


def pipeline_s(
    forward: Sequence[float], backward: Sequence[float], stages: int, micro_batches: int, hop_s: float
) -> float:
    """Seconds of all micro-batches through `stages` ranks."""
    return pipeline_path(forward, backward, stages, micro_batches, hop_s).seconds(forward, backward, hop_s)


def pipelines_s(forward: Floats, backward: Floats, stages: int, micro_batches: int, hop_s: Floats) -> Floats:
    """`pipeline_s` of many pipelines of one schedule: rows of `forward` and `backward` [pipelines, chunks]."""
    if stages == 1:
        return np.asarray(micro_batches * (forward.sum(axis=1) + backward.sum(axis=1)))
    rounds = micro_batches // stages
    if rounds <= 3:
        return _all_simulated(forward, backward, stages, micro_batches, hop_s)
    rest = micro_batches % stages
    short = _all_simulated(forward, backward, stages, 2 * stages + rest, hop_s)
    longer = _all_simulated(forward, backward, stages, 3 * stages + rest, hop_s)
    return np.asarray(short + (rounds - 2) * (longer - short))


def _all_simulated(forward: Floats, backward: Floats, stages: int, micro_batches: int, hop_s: Floats) -> Floats:
    schedule = _waits_as_run(stages, forward.shape[1] // stages, micro_batches)
    return schedules_s(schedule, forward, backward, np.zeros_like(backward), hop_s)
