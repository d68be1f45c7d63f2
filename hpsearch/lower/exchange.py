"""Tokens on their way to the experts of a mixture and back, over the ranks of one mesh axis; no autograd inside.

    flow = route(index, experts, group, hops)      who sends how many rows to whom: one micro-batch, one layer
    rows, counts = send(flow, x)                   [T, D] -> [R, D], sorted by local expert
    out = collect(flow, rows, weight)              [R, D] -> [T, D], the weighted sum of every token's copies

and their adjoints. Experts lie in equal runs: those of rank p of the group are p · E/P … (p + 1) · E/P - 1. Without
`hops` every copy of a token travels on its own (one a (token, expert) pair) in one uneven all_to_all. With them a copy
goes once to each part that has any of the token's experts, hop by hop: (across, within) sends a token once to each
domain, and on to each rank inside; the way back sums inside a rank, then inside the domain, then at the token's rank.
One hop over the whole group is one copy a rank.

Every rank joins every collective, whatever it has. `index` is [T, k], T from 0 on and different on each rank; a slot
of -1 goes nowhere. Sums are in fp32 at least. Groups are names or process groups, made once by whoever calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _resolve_process_group

from hpsearch.errors import LoweringError

c10d = torch.ops._c10d_functional
Group = str | dist.ProcessGroup


@dataclass(frozen=True)
class Hop:
    """One exchange: copies leave in order of the rank they go to."""

    group: Group
    held: int
    """Rows before it."""
    order: Tensor
    """[copies sent]: which row each copy is of."""
    sent: list[int]
    received: list[int]
    """Copies to and from each rank of the group."""
    slots: Tensor
    """[scalars sent]: their places in the flattened [rows, slots] table before it."""
    table: tuple[int, int]
    """Shape of that table."""
    scalars_sent: list[int]
    scalars_received: list[int]
    landed: Tensor
    """[scalars received]: their places in the flattened table after it."""
    arrived: tuple[int, int]
    """Shape of the table after it."""


@dataclass(frozen=True)
class Route:
    """Who sends what to whom, for the tokens of one micro-batch at one layer of experts."""

    hops: tuple[Hop, ...]
    tokens: int
    top_k: int
    rows: Tensor
    """[R]: which of the copies that arrived each row is."""
    slots: Tensor
    """[R]: the place of its scalar in the flattened table of the last hop."""
    counts: Tensor
    """[E / P]: rows of each local expert."""


def route(index: Tensor, num_experts: int, group: Group | None, hops: Sequence[Group] | None = None) -> Route:
    """The way of every token. Collective; the one place where hosts wait for devices.

    index: [T, k] expert of each slot of each token, -1 for none; may differ in T on every rank.
    hops: None (each copy on its own in `group`), or groups from the outermost in, whose sizes multiply to that of
    `group` if there is one.
    LoweringError: experts that do not divide, hops that do not fit the group, an expert that does not exist.
    """
    groups = tuple(hops) if hops is not None else () if group is None else (group,)
    sizes = [group_size(each) for each in groups]
    size = prod(sizes) if group is None else group_size(group)
    if num_experts % size:
        raise LoweringError(
            f"{num_experts} experts over {size} ranks",
            f"expected an equal number on each, but {num_experts} / {size} is {num_experts / size:.4g}",
            "Use a divisor of the number of experts as the degree.",
        )
    if prod(sizes) != size:
        raise LoweringError(
            f"exchange over {size} ranks",
            f"expected hops whose sizes multiply to {size}, but found {' x '.join(map(str, sizes))}",
            "Give one group for each level, from the outermost in.",
        )
    tokens, top_k = index.shape
    wanted, found, span = index.to(torch.int64), [], num_experts
    rows_each = 1  # of `wanted`, for each row of tokens
    if hops is None:
        wanted, rows_each = wanted.reshape(-1, 1), top_k
    for one, parts in zip(groups, sizes, strict=True):
        span //= parts
        hop, wanted = _hop(one, parts, wanted, span, rows_each)
        found.append(hop)
        rows_each = 1
    slots = (wanted.reshape(-1) >= 0).nonzero().squeeze(1)
    experts = wanted.reshape(-1)[slots]
    slots = slots[experts.argsort(stable=True)]
    counts = torch.bincount(experts, minlength=span)
    return Route(tuple(found), tokens, top_k, slots // wanted.shape[1], slots, counts)


def _hop(group: Group, parts: int, wanted: Tensor, span: int, rows_each: int) -> tuple[Hop, Tensor]:
    """One exchange of what each of `wanted` [M, w] asks for (experts, or -1), `span` experts a part; with what those
    that arrive ask for, counted from the part's first expert. `rows_each` rows of `wanted` are of one row of tokens."""
    part = wanted.div(span, rounding_mode="floor")
    ranked = part.sort(dim=1).values
    first = ranked >= 0
    first[:, 1:] &= ranked[:, 1:] != ranked[:, :-1]
    row, column = first.nonzero(as_tuple=True)
    to = ranked[row, column]
    by_part = to.argsort(stable=True)
    row, to = row[by_part], to[by_part]
    asked = torch.where(part[row] == to[:, None], wanted[row] - to[:, None] * span, -1)
    sent = torch.bincount(to, minlength=parts)
    if len(sent) != parts:
        raise LoweringError(
            "index of experts", f"expected at most {parts * span - 1}, but found {int(wanted.max())}",
            "Check the router's number of experts.",
        )  # fmt: skip
    inside = asked >= 0
    scalars = torch.zeros_like(sent).index_add_(0, to, inside.sum(1))
    both = torch.stack((sent, scalars), 1)
    met = _all_to_all(both, [1] * parts, [1] * parts, group)
    (copies_out, scalars_out), (copies_in, scalars_in) = both.t().tolist(), met.t().tolist()
    arrived = _all_to_all(_narrow(asked, span), copies_in, copies_out, group)
    arrived = _widen(arrived, span)
    width = wanted.shape[1]
    hop = Hop(
        group=group,
        held=wanted.shape[0] // rows_each,
        order=row // rows_each,
        sent=copies_out,
        received=copies_in,
        slots=(row[:, None] * width + torch.arange(width, device=row.device))[inside],
        table=(wanted.shape[0] // rows_each, width * rows_each),
        scalars_sent=scalars_out,
        scalars_received=scalars_in,
        landed=(arrived.reshape(-1) >= 0).nonzero().squeeze(1),
        arrived=(arrived.shape[0], width),
    )
    return hop, arrived


def send(flow: Route, x: Tensor) -> tuple[Tensor, Tensor]:
    """x [T, D] to where its experts live: (rows [R, D] sorted by local expert, rows of each local expert [E / P]).

    R depends on the data; the order of one expert's rows on nothing but the route.
    """
    _check(x, "tokens", flow.tokens)
    for hop in flow.hops:
        x = _all_to_all(x[hop.order], hop.received, hop.sent, hop.group)
    return x[flow.rows], flow.counts


def send_adjoint(flow: Route, grad_rows: Tensor) -> Tensor:
    """[R, D] back to where the tokens came from, summed over the copies of each: [T, D]; the adjoint of `send`."""
    _check(grad_rows, "rows", flow.rows.shape[0])
    x = _sum_at(grad_rows, flow.rows, sum(flow.hops[-1].received))
    for hop in reversed(flow.hops):
        x = _sum_at(_all_to_all(x, hop.sent, hop.received, hop.group), hop.order, hop.held)
    return x


def collect(flow: Route, rows: Tensor, weight: Tensor) -> Tensor:
    """The sum over the copies of each token of weight [T, k] times row [R, D]: [T, D] in the dtype of rows."""
    return send_adjoint(flow, _times(rows, send_weight(flow, weight)))


def collect_adjoint(flow: Route, rows: Tensor, weight: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of `collect` by its rows and its weight, from grad [T, D]: ([R, D], [T, k]).

    grad crosses as tokens do; what comes back is one number a copy.
    """
    grad_out, _ = send(flow, grad)
    wide = torch.promote_types(torch.promote_types(grad_out.dtype, rows.dtype), torch.float32)
    by_weight = (grad_out.to(wide) * rows.to(wide)).sum(1).to(weight.dtype)
    return _times(grad_out, send_weight(flow, weight)), send_weight_adjoint(flow, by_weight)


def send_weight(flow: Route, weight: Tensor) -> Tensor:
    """weight [T, k], one number a (token, expert) pair, to the rows of `send`: [R]."""
    _check(weight, "tokens", flow.tokens)
    for hop in flow.hops:
        got = _all_to_all(weight.reshape(-1)[hop.slots], hop.scalars_received, hop.scalars_sent, hop.group)
        table = got.new_zeros(prod(hop.arrived))
        table[hop.landed] = got
        weight = table
    return weight.reshape(-1)[flow.slots]


def send_weight_adjoint(flow: Route, grad: Tensor) -> Tensor:
    """grad [R] back to its (token, expert) pairs: [T, k], 0 where a slot went nowhere; the adjoint of `send_weight`."""
    _check(grad, "rows", flow.rows.shape[0])
    table = grad.new_zeros(prod(flow.hops[-1].arrived))
    table[flow.slots] = grad
    for hop in reversed(flow.hops):
        got = _all_to_all(table[hop.landed], hop.scalars_sent, hop.scalars_received, hop.group)
        table = got.new_zeros(prod(hop.table))
        table[hop.slots] = got
    return table.reshape(flow.tokens, flow.top_k)


def hop_ranks(members: Sequence[int], sizes: Sequence[int], rank: int) -> tuple[tuple[int, ...], ...]:
    """The group of `rank` in each hop, outermost first, where `members` of an axis, in order, are `sizes[0]` domains of
    `sizes[1]` domains of … ranks."""
    place, stride, found = list(members).index(rank), len(members), []
    for size in sizes:
        stride //= size
        first = place - place // stride % size * stride
        found.append(tuple(members[first + i * stride] for i in range(size)))
    return tuple(found)


def group_size(group: Group) -> int:
    """Ranks of a group, or of the group of that name."""
    return (_resolve_process_group(group) if isinstance(group, str) else group).size()


def swap(x: Tensor, group: Group, ranks: int) -> Tensor:
    """Equal pieces of x, one for each of the `ranks` of a group, for as many from them."""
    each = [x.shape[0] // ranks] * ranks
    return _all_to_all(x, each, each, group)


def _all_to_all(x: Tensor, received: list[int], sent: list[int], group: Group) -> Tensor:
    name = getattr(group, "group_name", group)
    return c10d.wait_tensor(c10d.all_to_all_single(x.contiguous(), received, sent, name))


def _sum_at(x: Tensor, places: Tensor, length: int) -> Tensor:
    """[length, D]: row i the sum of the rows of x whose place is i, in fp32 at least."""
    wide = torch.promote_types(x.dtype, torch.float32)
    total = x.new_zeros((length, *x.shape[1:]), dtype=wide)
    return total.index_add_(0, places, x.to(wide)).to(x.dtype)


def _times(rows: Tensor, weight: Tensor) -> Tensor:
    return (rows * weight[:, None]).to(rows.dtype)


def _narrow(experts: Tensor, span: int) -> Tensor:
    """-1 … span - 1 in as few bytes as hold them, as bytes: not every backend moves integers of 16 bit."""
    return experts.to(_short(span)).view(torch.uint8)


def _widen(moved: Tensor, span: int) -> Tensor:
    return moved.view(_short(span)).to(torch.int64)


def _short(span: int) -> torch.dtype:
    return torch.int8 if span <= 127 else torch.int16 if span <= 32767 else torch.int32


def _check(x: Tensor, what: str, count: int) -> None:
    if x.shape[0] != count:
        raise LoweringError(
            f"exchange of {what}", f"expected {count}, as in the route, but found {x.shape[0]}",
            "Use the route that was made from the same index.",
        )  # fmt: skip
