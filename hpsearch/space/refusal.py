"""Why there is no answer: the pin that leaves no legal layout, with what would; or the layout that came nearest to
fitting, with what fills it."""

from __future__ import annotations

from dataclasses import replace
from math import ceil
from typing import Any

from hpsearch.cluster.tier import node_size
from hpsearch.errors import HpsearchError, InfeasibleError, LegalityError, counted
from hpsearch.estimate import Memory, ParallelLayout
from hpsearch.estimate.memory import REMEDIES, RESERVE, context_bytes, states
from hpsearch.estimate.stages import filled_sizes
from hpsearch.estimate.stands import tightest
from hpsearch.space.prices import Prices
from hpsearch.space.rules import Rules
from hpsearch.space.space import PINS, Row, Space, names_of

OUTSIDE = ("pp", "vpp", "dp", "micro_batches", "zero", "shard_ranks", "schedule")
"""Columns of an outside."""
LEANEST = 64
"""Layouts whose memory is worked out for the message."""


def none_in_time(limit_s: float) -> HpsearchError:
    """The error to raise where time is over and nothing was found that fits."""
    problem = (
        f"expected time for a first answer, but of the most promising layouts none fits, and {limit_s:g} s are over"
    )
    return LegalityError("time limit", problem, "Give it more seconds: whether anything fits at all is not known yet.")


def none_is_legal(space: Space) -> HpsearchError:
    """The error to raise where the rules and pins of `space` leave nothing."""
    if space.cut and (legal := _chunks(replace(space, cut=()))):
        problem = f"expected as many numbers as a legal layout has chunks (pp·vpp), but got {len(space.cut)}"
        return LegalityError("pin cut", problem, f"Legal for {_question(space)}: {_joined(legal)}.")
    pinned = [name for name in PINS if name in space.pins]
    for name in pinned:
        others = {other: values for other, values in space.pins.items() if other != name}
        if legal := legal_values(replace(space, pins=others), name):
            beside = f" beside {_text(others)}" if others else ""
            problem = f"expected a legal value for {_question(space)}{beside}, but got {_joined(space.pins[name])}"
            return LegalityError(f"pin {name}", problem, f"Legal: {_joined(legal)}.")
    free, rules = replace(space, pins={}), Rules()
    for inside in space.insides(rules):
        space.outsides(inside, rules)
    broken = "; ".join(f"{rule} ({count} times: {what})" for rule, what, count in rules.rows()[:3])
    problem = f"expected a legal layout for {_question(space)}, but {'the pins' if pinned else 'the rules'} leave none"
    legal_alone = "; ".join(f"{name} {_joined(legal_values(free, name))}" for name in pinned)
    return InfeasibleError("search", problem, f"Legal without pins: {legal_alone}." if pinned else f"Broken: {broken}.")


def _chunks(space: Space) -> list[int]:
    """pp·vpp of all layouts of a space."""
    rules = Rules()
    return sorted({int(n) for one in space.insides(rules) for n in space.outsides(one, rules)[:, :2].prod(axis=1)})


def legal_values(space: Space, name: str) -> list[Any]:
    """Values of one dimension in all layouts of a space."""
    found: set[Any] = set()
    rules, outsides = Rules(), dict[tuple[int, ...], list[Row]]()
    for inside in space.insides(rules):
        if name not in OUTSIDE and getattr(inside, name) in found:
            continue
        key = (inside.tp, inside.cp, inside.ep, inside.etp, inside.micro_batch)
        if key not in outsides:
            outsides[key] = space.outsides(inside, rules).tolist()
        if name in OUTSIDE:
            held = {row[OUTSIDE.index(name)] for row in outsides[key]}
            found |= {one for bits in held for one in names_of(bits)} if name == "schedule" else held
        elif outsides[key]:
            found.add(getattr(inside, name))
    return sorted(found)


def none_fits(prices: Prices) -> InfeasibleError:
    """The error to raise where nothing fits: the leanest of the layouts of one row, all layers computed again."""
    space = prices.space
    least, room, layout = _nearest(_leanest(prices))
    most, size = next(part for part in least.largest if part[0] != "reserve")
    names = ("tp", "cp", "pp", "dp", "ep", "zero", "micro_batch", "recompute")
    degrees = ", ".join(f"{name}={getattr(layout, name)}" for name in names)
    remedy = f"; smaller {most}: {REMEDIES[most]}" if most in REMEDIES else ""
    asked = dict(space.pins) | ({"cut": space.cut} if space.cut else {})
    beside = f" with the pins {_text(asked)}" if asked else ""
    return InfeasibleError(
        "search", f"expected a layout that fits in {room / 1e9:.4g} GB, but the leanest found{beside} needs "
        f"{least.peak_bytes / 1e9:.4g} GB ({degrees}), of which {most} {size / 1e9:.4g} GB. {_states(space)}",
        f"Use more devices, a smaller batch or sequence, or offload{remedy}.{_without(space) if asked else ''}",
    )  # fmt: skip


def _states(space: Space) -> str:
    """What all devices hold together, stored once, and how many devices have room for it."""
    device, params = space.cluster.device, float(space.shape.total_params)
    alone = [replace(space.base, zero=zero, fsdp=zero == 3) for zero in (1, 3)]
    whole, context = min((sum(states(one, params, 0.0)), context_bytes(one)) for one in alone)
    devices = ceil(whole / ((device.memory_bytes - context) / (1 + RESERVE)))
    node = node_size(space.cluster.tiers)
    nodes = f" ({-(-devices // node) * node} in whole nodes of {node})" if devices > node and devices % node else ""
    count = f"{params / 1e9:.2f}e9 parameters"
    told = f"Weights, gradients and optimizer state of {count} are {whole / 1e9:.4g} GB together"
    return f"{told}: at least {counted(devices, 'such device')}{nodes} have room for them"


def _without(space: Space) -> str:
    free = replace(space, pins={}, cut=())
    least, room, _ = _nearest(_leanest(Prices(free)))
    needs = f"the leanest found needs {least.peak_bytes / 1e9:.4g} GB"
    return f" Without the pins {'it fits' if least.peak_bytes <= room else needs}."


def _nearest(found: list[tuple[Memory, int, ParallelLayout]]) -> tuple[Memory, int, ParallelLayout]:
    """The layout that lacks least."""
    return min(found, key=lambda one: one[0].peak_bytes - one[1])


def _leanest(prices: Prices) -> list[tuple[Memory, int, ParallelLayout]]:
    """Of every inside the outside with the least states; of these the `LEANEST` with the least, in full, with the room
    of its tightest stage."""
    space, rules = prices.space, Rules()
    guesses: list[tuple[float, int, Row]] = []
    fewest = 0
    for inside in sorted(space.insides(rules), key=lambda one: one.micro_batch):
        if fewest and inside.micro_batch > fewest:
            break
        rows = space.outsides(inside, rules).tolist()
        if not rows:
            continue
        fewest = inside.micro_batch
        number = prices.numbers[inside] if inside in prices.numbers else prices.price(inside)
        table = prices.table(number, (1, 1, 1, 1, 0, 0, 0))
        for row in rows:
            held = prices.around(number, tuple(row))
            states = table.dense[-1] * held.per_dense + table.expert[-1] * held.per_expert
            kept = table.saved_bytes[-1] - table.freed_bytes[-1] + table.layer_bytes
            guesses.append((float(states / row[0] + kept), number, tuple(row)))
    found = []
    for _, number, row in sorted(guesses)[:LEANEST]:
        cut = list(space.cut) or filled_sizes(space.shape, row[0] * row[1])
        again = cut if prices.insides[number].recompute == "full" else ()
        layout = space.layout(prices.insides[number], row, cut, again)
        found.append((*tightest(space.shape, layout, space.cluster), layout))
    return found


def _question(space: Space) -> str:
    return f"{counted(space.devices, 'device')} and {counted(space.global_batch, 'sequence')} of {space.base.seq_len}"


def _text(pins: dict[str, Any]) -> str:
    return ", ".join(f"{name} = {_joined(values)}" for name, values in pins.items())


def _joined(values: Any) -> str:
    return ", ".join(str(value) for value in values) or "none"
