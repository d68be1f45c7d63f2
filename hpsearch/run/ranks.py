"""`Ranks`: this process's place on the mesh, with the groups it speaks to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from hpsearch.layout import Layout, Mesh
from hpsearch.lower import ParallelProgram, PipelineProgram
from hpsearch.run import shards
from hpsearch.run.launch import local_device, require


@dataclass(frozen=True)
class Ranks:
    mesh: Mesh
    """Of the whole job, or of one pipeline rank."""
    device: torch.device
    device_mesh: DeviceMesh
    """Of the ranks of this pipeline rank."""
    rank: int
    """In the whole job."""
    pipeline: dist.ProcessGroup | None = None
    """The ranks at this place of every pipeline rank, in order; None without a pipeline."""
    shared: Mapping[tuple[int, ...], dist.ProcessGroup] = field(default_factory=dict)
    """Pipeline ranks that hold a parameter together, this one among them → the group of this place's."""
    hops: Mapping[str, dist.ProcessGroup] = field(default_factory=dict)
    """Name of each hop of `mesh.hops` → this rank's group."""

    @staticmethod
    def join(mesh: Mesh, program: ParallelProgram | PipelineProgram) -> Ranks:
        """Take this process's place. Collective; raises LaunchError when the ranks are not there."""
        pipelined = isinstance(program, PipelineProgram)
        degree = len(program.schedule.ranks) if pipelined else 1
        require(degree * mesh.num_ranks)
        device = local_device()
        if not pipelined:
            own = shards.device_mesh(mesh, device.type)
            return Ranks(mesh, device, own, dist.get_rank(), hops=_hop_groups(mesh, degree))
        own, pipeline = shards.stage_mesh(mesh, degree, device.type)
        holders = dict.fromkeys(ranks for ranks in program.holders.values() if len(ranks) > 1)
        shared = _shared_groups(mesh, list(holders))
        return Ranks(mesh, device, own, dist.get_rank(), pipeline, shared, _hop_groups(mesh, degree))

    @property
    def pipeline_rank(self) -> int:
        return self.rank // self.mesh.num_ranks

    @property
    def coordinate(self) -> dict[str, int]:
        return self.mesh.coordinate(self.rank)

    @property
    def groups(self) -> dict[str, str]:
        """Name of this rank's process group along each axis and hop, as functional collectives take it."""
        found = {name: self.device_mesh.get_group(name) for name in self.mesh.names} | dict(self.hops)
        return {name: group.group_name for name, group in found.items()}

    @property
    def data_index(self) -> int:
        """Which of the `mesh.num_data_ranks` pieces of the batch is this rank's."""
        return data_index(self.mesh, self.rank)

    def piece(self, shape: tuple[int, ...], layout: Layout) -> tuple[slice, ...]:
        """The slices of a tensor of global `shape` that this rank holds."""
        return shards.piece(shape, layout, self.mesh, self.coordinate)

    def as_dtensor(self, local: torch.Tensor, shape: tuple[int, ...], layout: Layout) -> torch.Tensor:
        """The local piece as a DTensor of global `shape`; no communication, no copy."""
        return shards.as_dtensor(local, shape, layout, self.mesh, self.device_mesh)


def _shared_groups(mesh: Mesh, holders: list[tuple[int, ...]]) -> dict[tuple[int, ...], dist.ProcessGroup]:
    """For each set of pipeline ranks, a group at every place of the mesh; those that this rank is in. Collective."""
    found, (own, place) = {}, divmod(dist.get_rank(), mesh.num_ranks)
    for ranks in holders:
        for inner in range(mesh.num_ranks):
            group = dist.new_group([rank * mesh.num_ranks + inner for rank in ranks])
            if inner == place and own in ranks:
                found[ranks] = group
    return found


def _hop_groups(mesh: Mesh, degree: int) -> dict[str, dist.ProcessGroup]:
    """This rank's group in every hop of an axis, on all pipeline ranks. Collective."""
    found, (own, place) = {}, divmod(dist.get_rank(), mesh.num_ranks) if mesh.hops else (0, 0)
    for hop in mesh.hops:
        for stage in range(degree):
            for ranks in dict.fromkeys(mesh.group(hop.name, rank) for rank in range(mesh.num_ranks)):
                group = dist.new_group([stage * mesh.num_ranks + rank for rank in ranks])
                if stage == own and place in ranks:
                    found[hop.name] = group
    return found


def data_index(mesh: Mesh, rank: int) -> int:
    """Which piece of the batch `rank` takes: data axes cut the rows in split order."""
    index = 0
    for axis in mesh.data_axes:
        index = index * axis.size + mesh.coordinate(rank)[axis.name]
    return index
