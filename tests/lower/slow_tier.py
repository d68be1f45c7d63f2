"""An emulated cluster of supernodes: rank r stands in supernode r // ranks, and what goes to another one is counted."""

from __future__ import annotations

import os
import socket
import struct
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

from hpsearch.layout import PARTIAL, Layout, Mesh, shard
from hpsearch.lower import local_ops
from hpsearch.lower.exchange import Group, collect, collect_adjoint, route, send, send_adjoint
from hpsearch.lower.redistribution import redistribute_value
from hpsearch.lower.statement import LocalValue
from hpsearch.run.shards import as_dtensor, device_mesh
from tests.lower.exchange_rank import hops_of
from tests.lower.gloo_rank import group_name
from tests.lower.reference import cut

c10d = torch.ops._c10d_functional

EXPERTS, TOP_K = 64, 8
TOKEN = torch.float32.itemsize * 512
"""Bytes of a token."""


def drawn(rank: int, tokens: int, supernodes: int, limit: int | None) -> Tensor:
    """[tokens, TOP_K]: the best experts by scores drawn evenly; with a limit those of the `limit` supernodes with the
    largest sums of their best TOP_K / limit scores (DeepSeek-V3, arXiv 2412.19437, section 2.1.2)."""
    score = torch.rand(tokens, EXPERTS, generator=torch.Generator().manual_seed(rank))
    if limit is not None:
        best = score.view(tokens, supernodes, -1).topk(TOP_K // limit, -1).values.sum(-1)
        allowed = torch.zeros(tokens, supernodes, dtype=torch.bool).scatter_(1, best.topk(limit, -1).indices, True)
        score = score.masked_fill(~allowed.repeat_interleave(EXPERTS // supernodes, 1), -1.0)
    return score.topk(TOP_K, -1).indices


def layer(index: Tensor, group: Group, hops: Sequence[Group] | None) -> None:
    """Forward and backward of a layer whose experts do nothing: four times over the links."""
    tokens = len(index)
    x = torch.arange(tokens * TOKEN // 4, dtype=torch.float32).view(tokens, -1)
    weight = torch.full((tokens, TOP_K), 1 / TOP_K)
    flow = route(index, EXPERTS, group, hops)
    rows, _ = send(flow, x)
    torch.testing.assert_close(collect(flow, rows, weight), x)
    grad_rows, grad_weight = collect_adjoint(flow, rows, weight, x)
    torch.testing.assert_close(send_adjoint(flow, grad_rows), x)
    torch.testing.assert_close(grad_weight, (x * x).sum(1, keepdim=True).expand(-1, TOP_K), rtol=1e-4, atol=0)


def dispatched(cases: list[tuple[int, int | None]], tokens: int) -> list[tuple[dict[int, int], dict[int, int]]]:
    """What one gloo rank does: the layer for each (supernodes, limit), each copy on its own and one a domain; what its
    sockets sent to each other rank."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    found = []
    for supernodes, limit in cases:
        index = drawn(rank, tokens, supernodes, limit)
        sizes = (supernodes, ranks // supernodes) if ranks > supernodes else (ranks,)
        sent = []
        for hops in (None, hops_of(tuple(range(ranks)), sizes, rank)):
            before = socket_bytes()
            layer(index, dist.group.WORLD, hops)
            sent.append(since(before))
        found.append((sent[0], sent[1]))
    return found


def summed(elements: int, axis_by_axis: bool) -> dict[int, int]:
    """What one of 2 x 2 gloo ranks does: a sum over both axes of a mesh, and the bytes that its sockets took."""
    mesh, rank = Mesh.of(dp_replicate=2, dp_shard=2), dist.get_rank()
    groups = {axis: group_name(mesh, axis, rank) for axis in mesh.names}
    x, partial = torch.full((elements,), float(rank)), Layout.of(dict.fromkeys(mesh.names, PARTIAL))
    if axis_by_axis:
        before = socket_bytes()
        for axis in mesh.names:
            x = c10d.wait_tensor(c10d.all_reduce(x, "sum", groups[axis]))
        assert torch.equal(x, torch.full((elements,), 6.0))
        return since(before)
    y, sent = moved(x, (elements,), partial, Layout(), mesh, groups)
    assert torch.equal(y, torch.full((elements,), 6.0))
    return sent


def exchanged(
    shape: tuple[int, ...], axes: dict[str, int], source: dict[str, int], target: dict[str, int]
) -> tuple[dict[int, int], dict[int, int]]:
    """What one gloo rank does: a cut tensor gets other cuts (axis → dim) by the statements of a program, and by
    DTensor; the bytes that its sockets took for each."""
    mesh, rank = Mesh.of(**axes), dist.get_rank()
    groups = {axis: group_name(mesh, axis, rank) for axis in mesh.names}
    whole = torch.arange(prod(shape), dtype=torch.float32).view(shape)
    before, after = (Layout.of({a: shard(d) for a, d in each.items()}) for each in (source, target))
    mine = cut(whole, before, mesh, rank)
    made, sent = moved(mine, shape, before, after, mesh, groups)
    assert torch.equal(made, cut(whole, after, mesh, rank))
    devices = device_mesh(mesh, "cpu")
    tensor = as_dtensor(mine, shape, before, mesh, devices)
    start = socket_bytes()
    assert isinstance(tensor, DTensor)
    placed = [Shard(target[a]) if a in target else Replicate() for a in devices.mesh_dim_names or ()]
    assert torch.equal(tensor.redistribute(placements=placed).to_local(), made)
    return sent, since(start)


def moved(
    x: Tensor, shape: tuple[int, ...], source: Layout, target: Layout, mesh: Mesh, groups: dict[str, str]
) -> tuple[Tensor, dict[int, int]]:
    """x with another layout, by the statements of a program; and the bytes that the sockets took for each rank."""
    value = LocalValue("x", shape, "float32", source)
    statements = redistribute_value(value, target, mesh, phase="backward", what="x", name="y")
    names = {"c10d": c10d, "groups": groups, "coordinate": mesh.coordinate(dist.get_rank()), "x": x}
    names |= {name: getattr(local_ops, name) for name in ("cut", "join", "split")}
    before = socket_bytes()
    exec("\n".join(s.text for s in statements), names)
    return names["y"], since(before)


Ends = tuple[int, int]
"""Ports of a connection here and there; all ranks are on this machine."""


def socket_bytes() -> Counter[Ends]:
    """Bytes that the kernel has sent on each connection of this process, those that it sent again counted once:
    tcpi_bytes_sent less tcpi_bytes_retrans of <linux/tcp.h>."""
    found: Counter[Ends] = Counter()
    for fd in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # the listing's own, or a socket without another end
            if os.readlink(f"/proc/self/fd/{fd}").startswith("socket:"):
                with socket.socket(fileno=os.dup(int(fd))) as end:
                    if end.type == socket.SOCK_STREAM and end.family in (socket.AF_INET, socket.AF_INET6):
                        ends = end.getsockname()[1], end.getpeername()[1]
                        told = end.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
                        sent, again = struct.unpack_from("QQ", told, 200)
                        found[ends] += sent - again
    return found


def since(before: Counter[Ends]) -> dict[int, int]:
    """Rank → bytes sent to it since `before`, by whose socket the other end is. Collective."""
    dist.barrier()
    now = socket_bytes()
    ports: list[list[int]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(ports, [here for here, _ in now])
    owner = {port: rank for rank, own in enumerate(ports) for port in own}
    found: Counter[int] = Counter()
    for ends, total in now.items():
        found[owner[ends[1]]] += total - before[ends]
    return dict(found)
