"""What one gloo rank does in test_exchange_gloo.py."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from hpsearch.lower.exchange import collect, collect_adjoint, hop_ranks, route, send, send_adjoint
from tests.lower.mixture import mixture


def layers(cases: list[tuple[tuple[int, ...] | None, tuple[int, ...], str]]) -> None:
    for case in cases:
        layer(*case)


def layer(sizes: tuple[int, ...] | None, members: tuple[int, ...], dtype: str) -> None:
    """Forward and backward on a group of ranks that need not be neighbours, held to one process."""
    rank, experts, kind = dist.get_rank(), 12, getattr(torch, dtype)
    group = dist.new_group(list(members))
    hops = None if sizes is None else hops_of(members, sizes, rank)
    if rank not in members:
        return
    place = members.index(rank)
    case = mixture(len(members), experts, 4, 5, lambda r: 3 * r)
    wanted, own = case.alone(), experts // len(members)
    x, weight, grad = (t[place].to(kind) for t in (case.x, case.weight, case.grad))
    flow = route(case.index[place], experts, group, hops)
    rows, counts = send(flow, x)
    matrices = case.matrices[place * own : (place + 1) * own].to(kind)

    def each(a: Tensor, turn: bool) -> Tensor:
        parts = a.split(counts.tolist())
        return torch.cat([p @ (m.T if turn else m) for p, m in zip(parts, matrices, strict=True)])

    made = each(rows, False)
    out = collect(flow, made, weight)
    grad_made, grad_weight = collect_adjoint(flow, made, weight, grad)
    found = {"grad": out, "weight": grad_weight, "x": send_adjoint(flow, each(grad_made, True))}
    tolerance = {"float64": 1e-12, "float32": 1e-5, "bfloat16": 0.3}[dtype]
    for name, tensor in found.items():
        assert tensor.dtype == kind
        reference = getattr(wanted, name)[place]
        torch.testing.assert_close(tensor.double(), reference, rtol=tolerance, atol=tolerance)


def hops_of(members: tuple[int, ...], sizes: tuple[int, ...], rank: int) -> list[dist.ProcessGroup] | None:
    """This rank's groups, made by all ranks in one order."""
    every = [hop_ranks(members, sizes, member) for member in members]
    made = {ranks: dist.new_group(list(ranks)) for ranks in dict.fromkeys(r for hops in every for r in hops)}
    return [made[ranks] for ranks in every[members.index(rank)]] if rank in members else None
