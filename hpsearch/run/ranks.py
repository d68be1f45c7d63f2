"""`Ranks`: this process's place on the mesh, with the groups it speaks to."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from hpsearch.layout import Layout, Mesh
from hpsearch.run import shards
from hpsearch.run.launch import local_device, require


@dataclass(frozen=True)
class Ranks:
    mesh: Mesh
    device: torch.device
    device_mesh: DeviceMesh
    rank: int

    @staticmethod
    def join(mesh: Mesh) -> Ranks:
        """Take this process's place. Collective; raises LaunchError when the ranks are not there."""
        require(mesh.num_ranks)
        device = local_device()
        return Ranks(mesh, device, shards.device_mesh(mesh, device.type), dist.get_rank())

    @property
    def coordinate(self) -> dict[str, int]:
        return self.mesh.coordinate(self.rank)

    @property
    def groups(self) -> dict[str, str]:
        """Name of this rank's process group along each axis, as functional collectives take it."""
        return {name: self.device_mesh.get_group(name).group_name for name in self.mesh.names}

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


def data_index(mesh: Mesh, rank: int) -> int:
    """Which piece of the batch `rank` takes: data axes cut the rows in split order."""
    index = 0
    for axis in mesh.data_axes:
        index = index * axis.size + mesh.coordinate(rank)[axis.name]
    return index
