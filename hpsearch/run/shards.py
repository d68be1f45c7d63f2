"""Pieces of tensors: which slice of a global tensor a rank holds, and local pieces as DTensors.

The nested cut is torch.chunk's, axis after axis in split order, which is also DTensor's left-to-right order: uneven
dims give shorter, possibly empty, last pieces, and putting the pieces together gives back the tensor bit for bit.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from hpsearch.errors import InternalError
from hpsearch.layout import Layout, Mesh

PIPELINE = "pp"
"""Name of the pipeline axis, which stands in front of those of the mesh."""
SOLO = "solo"
"""Axis name of the mesh of one device; a DeviceMesh needs an axis."""


def device_mesh(mesh: Mesh, device_type: str) -> DeviceMesh:
    """The mesh as torch knows it: dims in split order, each rank where its strides put it. Collective on all ranks."""
    if not mesh.axes:
        return DeviceMesh(device_type, torch.zeros(1, dtype=torch.int), mesh_dim_names=(SOLO,))
    sizes, strides = [a.size for a in mesh.axes], [a.stride for a in mesh.axes]
    ranks = torch.arange(mesh.num_ranks, dtype=torch.int).as_strided(sizes, strides)
    return DeviceMesh(device_type, ranks, mesh_dim_names=mesh.names)


def stage_mesh(mesh: Mesh, degree: int, device_type: str) -> tuple[DeviceMesh, dist.ProcessGroup]:
    """The mesh of this rank's pipeline rank, out of `degree` that stand one behind the other, and the group of this
    rank's place on all of them. Collective on all ranks."""
    sizes, strides = [a.size for a in mesh.axes] or [1], [a.stride for a in mesh.axes] or [1]
    count = mesh.num_ranks
    ranks = torch.arange(degree * count, dtype=torch.int).as_strided([degree, *sizes], [count, *strides])
    names = mesh.names or (SOLO,)
    whole = DeviceMesh(device_type, ranks, mesh_dim_names=(PIPELINE, *names))
    return whole[names], whole.get_group(PIPELINE)


def placements(layout: Layout, mesh: Mesh) -> tuple[Placement, ...]:
    """The layout as DTensor placements, one for each dim of `device_mesh(mesh)`."""
    if not mesh.axes:
        return (Replicate(),)
    found: list[Placement] = []
    for axis in mesh.axes:
        placement = layout[axis.name]
        if placement.is_partial:
            raise InternalError(f"layout {layout}", f"a stored tensor cannot be partial over {axis.name}")
        found.append(Shard(placement.dim) if placement.is_shard else Replicate())
    return tuple(found)


def piece(shape: tuple[int, ...], layout: Layout, mesh: Mesh, coordinate: Mapping[str, int]) -> tuple[slice, ...]:
    """The slice of each dim that the rank at `coordinate` holds."""
    bounds = [(0, size) for size in shape]
    for axis in mesh.axes:
        placement = layout[axis.name]
        if not placement.is_shard:
            continue
        start, stop = bounds[placement.dim]
        step = -(-(stop - start) // axis.size)
        first = min(start + coordinate[axis.name] * step, stop)
        bounds[placement.dim] = (first, min(first + step, stop))
    return tuple(slice(*bound) for bound in bounds)


def as_dtensor(local: torch.Tensor, shape: tuple[int, ...], layout: Layout, mesh: Mesh, device: DeviceMesh) -> DTensor:
    """The local piece as a DTensor of global `shape`; no communication, no copy."""
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(
        local, device, placements(layout, mesh), run_check=False, shape=torch.Size(shape), stride=stride
    )
