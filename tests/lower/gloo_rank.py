"""What one gloo rank does in test_gloo.py."""

from __future__ import annotations

import pickle

import torch
import torch.distributed as dist

from hpsearch.layout import Mesh
from hpsearch.lower.accounting import count_collectives
from tests.lower.reference import cut, stated_by_kind


def step(path: str) -> dict[str, int]:
    """One step of the pickled program, held to the pickled loss and gradients; returns bytes sent by kind."""
    with open(path, "rb") as file:
        program, params, buffers, inputs, loss, gradients = pickle.load(file)
    mesh, rank = program.mesh, dist.get_rank()
    groups = {axis: group_name(mesh, axis, rank) for axis in mesh.names}
    bound = program.bind(groups, mesh.coordinate(rank), "cpu")
    slots = {slot.fqn: slot for slot in program.params}
    mine = {n: cut(params[n], s.stored, mesh, rank) for n, s in slots.items()}
    micro = [[cut(t, s.layout, mesh, rank) for t, s in zip(one, program.inputs, strict=True)] for one in inputs]
    with count_collectives() as count:
        total, found = bound.step(mine, buffers, micro)
    torch.testing.assert_close(total, loss, rtol=1e-10, atol=0)
    for name, gradient in found.items():
        wanted = cut(gradients[name], slots[name].stored, mesh, rank)
        torch.testing.assert_close(gradient, wanted, rtol=0, atol=1e-10 * float(gradients[name].abs().max()))
    assert count.nbytes == stated_by_kind(program)
    return dict(count.nbytes)


def group_name(mesh: Mesh, axis: str, rank: int) -> str:
    """Every rank makes every group of the axis, in the same order, and keeps its own."""
    for ranks in dict.fromkeys(mesh.group(axis, r) for r in range(mesh.num_ranks)):
        group = dist.new_group(list(ranks))
        if rank in ranks:
            mine = group.group_name
    return mine
