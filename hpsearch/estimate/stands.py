"""Where the pipeline ranks of a layout stand on a cluster whose groups of nodes differ, and what room they have there.

A pipeline rank has as many devices as tp·cp·dp, which stand together. If they all lie in one group, the rank computes
as its devices do; if they lie in several, everyone waits for the slowest, and all hold what fits into the smallest.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import permutations
from math import factorial, prod

from hpsearch.cluster import Cluster
from hpsearch.cluster.group import Group, names_of
from hpsearch.errors import LegalityError
from hpsearch.estimate.memory import Memory, memory, rank_memory
from hpsearch.estimate.parallel import ParallelLayout
from hpsearch.estimate.shape import ModelShape
from hpsearch.estimate.stages import chunks
from hpsearch.estimate.work import Work

Stand = tuple[str, ...]
"""Names of the groups that one pipeline rank lies in."""
JOINED = "+"
MOST_ORDERED = 4
"""Groups that are put in every order."""
MOST_ARRANGEMENTS = 24
"""Ways to put whole stages on groups that are all considered; of more, those that keep a group's stages together."""


def stands_of(cluster: Cluster, layout: ParallelLayout) -> tuple[Stand, ...]:
    """Of each pipeline rank the groups it lies in; () where devices are all alike.

    LegalityError: the layout's `stage_groups` are not of this cluster, or do not stand on its devices.
    """
    told = layout.stage_groups
    if not cluster.groups:
        if told:
            raise LegalityError(
                "layout, stage_groups", f"expected none on {cluster.name}, whose devices are all alike, but found "
                f"{', '.join(told)}", "Use the cluster it was searched for.",
            )  # fmt: skip
        return ()
    each = layout.tp * layout.cp * layout.dp
    if not told:
        return _in_order(cluster.groups, layout.pp, each)
    found = tuple(tuple(one.split(JOINED)) for one in told)
    if len(found) != layout.pp or not _stands(cluster, found, each):
        there = ", ".join(f"{group.devices} of {group.name!r}" for group in cluster.groups)
        raise LegalityError(
            "layout, stage_groups", f"expected {layout.pp} stages of {each} devices on {there}, but found "
            f"{', '.join(told)}", "Search again for this cluster.",
        )  # fmt: skip
    return found


def in_words(stands: tuple[Stand, ...]) -> tuple[str, ...]:
    """As a layout's `stage_groups`."""
    return tuple(JOINED.join(one) for one in stands)


def _in_order(groups: tuple[Group, ...], stages: int, each: int, order: tuple[Group, ...] = ()) -> tuple[Stand, ...]:
    """Ranks filling the groups in this order; the names of a stage in that of the cluster."""
    place = {group.name: i for i, group in enumerate(groups)}
    found = (names_of(order or groups, stage * each, (stage + 1) * each) for stage in range(stages))
    return tuple(tuple(sorted(one, key=place.__getitem__)) for one in found)


def _stands(cluster: Cluster, found: tuple[Stand, ...], each: int) -> bool:
    """Whether there are devices for these stages: each in one group, or groups in some order."""
    if all(len(one) == 1 for one in found):
        have = {group.name: group.devices for group in cluster.groups}
        return all(count * each <= have.get(name, 0) for (name,), count in Counter(found).items())
    return found in set(_orders(cluster.groups, len(found), each))


def _orders(groups: tuple[Group, ...], stages: int, each: int) -> Iterator[tuple[Stand, ...]]:
    """Groups one behind the other, in every order; of many, in theirs and backwards."""
    every = permutations(groups) if len(groups) <= MOST_ORDERED else (groups, groups[::-1])
    return (_in_order(groups, stages, each, tuple(order)) for order in every)


def arrangements(cluster: Cluster, stages: int, each: int) -> tuple[tuple[Stand, ...], ...]:
    """Every way considered to put `stages` of `each` devices on the groups; ((),) where devices are all alike.

    Whole stages in any sequence if there are few ways; else, and where stages lie in several groups, the groups in any
    order.
    """
    if not cluster.groups:
        return ((),)
    counts = [group.devices // each for group in cluster.groups]
    is_whole = all(group.devices % each == 0 for group in cluster.groups) and sum(counts) == stages
    if is_whole and factorial(stages) // prod(map(factorial, counts)) <= MOST_ARRANGEMENTS:
        left = {group.name: count for group, count in zip(cluster.groups, counts, strict=True)}
        return tuple(_sequences(left, stages))
    return tuple(dict.fromkeys(_orders(cluster.groups, stages, each)))


def _sequences(left: dict[str, int], stages: int) -> Iterator[tuple[Stand, ...]]:
    if not stages:
        yield ()
        return
    for name in left:
        if left[name]:
            for rest in _sequences({**left, name: left[name] - 1}, stages - 1):
                yield ((name,), *rest)


def rooms_of(cluster: Cluster, layout: ParallelLayout) -> tuple[int, ...]:
    """Memory of a device of each pipeline rank, in bytes."""
    stands = stands_of(cluster, layout) or ((),) * layout.pp
    return tuple(cluster.among(stand).device.memory_bytes for stand in stands)


def tightest(
    shape: ModelShape, layout: ParallelLayout, cluster: Cluster, works: dict[str, Work] | None = None
) -> tuple[Memory, int]:
    """The pipeline rank with the least left, and what a device has there; on like devices the fullest rank."""
    if not cluster.groups:
        return memory(shape, layout, works=works), cluster.device.memory_bytes
    cut = chunks(shape, layout)
    rooms = rooms_of(cluster, layout)
    held = [rank_memory(shape, layout, rank, cut, works) for rank in range(layout.pp)]
    return min(zip(held, rooms, strict=True), key=lambda one: one[1] - one[0].peak_bytes)
