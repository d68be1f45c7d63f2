"""How a parameter is kept: the choices for one parameter on one mesh, with the bytes and collectives each implies.

A parameter is *used* in a layout (tp may cut it, that of experts the axes they are spread over, no other axis does) and
*stored* in one that dp_shard may cut further, and ep where it is whole in use. Residency says how the two meet:

    stored       used as stored; gradients are summed over the data axes once a step (DDP)
    step         gathered once a step and kept; gradient accumulated whole, reduce-scattered once a step (ZeRO-1, -2)
    micro_batch  gathered for forward and again for backward of each micro-batch, gradient reduce-scattered after each
                 backward (ZeRO-3, FSDP)
"""

from __future__ import annotations

from dataclasses import dataclass

from hpsearch.cost.job import Job, optimizer_states
from hpsearch.graph import ITEM_BYTES
from hpsearch.layout import Collective, Layout, Mesh, Placement, redistribute, shard

RESIDENCIES = ("stored", "step", "micro_batch")


@dataclass(frozen=True)
class Storage:
    """One way to keep one parameter of global `shape`."""

    shape: tuple[int, ...]
    used: Layout
    stored: Layout
    residency: str
    gradient: Layout | None
    """Layout in which backward leaves the gradient; None for a frozen parameter."""
    passes: int
    """How many of forward and backward read it; a bias or an embedding table is not read by backward."""

    def gathers(self, job: Job, mesh: Mesh) -> tuple[Collective, ...]:
        """Collectives of one gather, in the compute dtype."""
        return redistribute(self.shape, ITEM_BYTES[job.recipe.compute], self.stored, self.used, mesh.sizes)

    def reductions(self, job: Job, mesh: Mesh) -> tuple[Collective, ...]:
        """Collectives that bring one gradient from where backward leaves it to where the parameter is stored."""
        if self.gradient is None:
            return ()
        return redistribute(self.shape, ITEM_BYTES[job.recipe.reduce], self.gradient, self.stored, mesh.sizes)

    def gathers_per_step(self, job: Job) -> int:
        return {"stored": 0, "step": 1, "micro_batch": self.passes * job.micro_batches}[self.residency]

    def reductions_per_step(self, job: Job) -> int:
        return job.micro_batches if self.residency == "micro_batch" else 1

    def static_bytes(self, job: Job, mesh: Mesh) -> dict[str, int]:
        """Bytes that stay for the whole step, by category."""
        stored = _elements(self.shape, self.stored, mesh)
        used = _elements(self.shape, self.used, mesh)
        master, reduce = ITEM_BYTES[job.recipe.master], ITEM_BYTES[job.recipe.reduce]
        found = {"parameters": stored * master}
        if self.gradient is not None:
            if not job.states_on_host:
                found["optimizer"] = self.states_bytes(job, mesh)
            summed = self.residency == "step" and job.micro_batches > 1  # whole until the last micro-batch
            found["gradients"] = (used if summed else stored) * reduce
        if self.residency == "step":
            found["gathered"] = used * ITEM_BYTES[job.recipe.compute]
        return found

    def used_bytes(self, mesh: Mesh, dtype: str) -> int:
        """Bytes of a tensor as the parameter is used."""
        return _elements(self.shape, self.used, mesh) * ITEM_BYTES[dtype]

    def states_bytes(self, job: Job, mesh: Mesh) -> int:
        """Bytes of the optimizer's states, wherever they rest."""
        if self.gradient is None:
            return 0
        return (
            _elements(self.shape, self.stored, mesh) * ITEM_BYTES[job.recipe.master] * optimizer_states(job.optimizer)
        )

    def update_bytes(self, job: Job, mesh: Mesh) -> dict[str, int]:
        """Bytes on the device while the optimizer updates, by category."""
        stored = _elements(self.shape, self.stored, mesh)
        found = {"parameters": stored * ITEM_BYTES[job.recipe.master]}
        if self.gradient is not None:
            found["optimizer"] = self.states_bytes(job, mesh)
            found["gradients"] = stored * ITEM_BYTES[job.recipe.master]
        return found

    def passing_bytes(self, job: Job, mesh: Mesh) -> int:
        """Bytes of the copy that exists only around its use: gathered, or cast to the compute dtype."""
        if self.residency == "step":
            return 0
        if self.residency == "stored" and job.recipe.compute == job.recipe.master:
            return 0
        return _elements(self.shape, self.used, mesh) * ITEM_BYTES[job.recipe.compute]


def _elements(shape: tuple[int, ...], layout: Layout, mesh: Mesh) -> int:
    count = 1
    for size in layout.local_shape(shape, mesh.sizes):
        count *= size
    return count


def storages(
    shape: tuple[int, ...], tp: Placement, mesh: Mesh, gradient: Layout | None, passes: int, by_expert: bool = False
) -> tuple[Storage, ...]:
    """Every way to keep a parameter that tp uses as `tp` in `passes` passes.

    `gradient`: its layout as backward leaves it, None when frozen. `by_expert`: whether axes that experts are spread
    over cut it in use.
    """
    given = {"tp": tp} | {axis.name: shard(0) for axis in mesh.expert_axes if by_expert}
    used = Layout(tuple((axis, given[axis]) for axis in mesh.names if axis in given))
    found = [Storage(shape, used, used, "stored", gradient, passes)]
    cut = stored_layout(shape, used, mesh)
    if cut != used:
        found += [Storage(shape, used, cut, residency, gradient, passes) for residency in ("step", "micro_batch")]
    return tuple(found)


def stored_layout(shape: tuple[int, ...], used: Layout, mesh: Mesh) -> Layout:
    """`used`, cut further at rest by ep (unless it is cut by ep in use) and by dp_shard, each along the dim that leaves
    a rank the fewest elements, the first of equals.

    An even cut always wins over an uneven one; where none is even, the last ranks hold less, or nothing, and the gather
    is padded. No cut where it saves nothing: scalars, one element, empty tensors, meshes without these axes.
    """
    cut = used
    for axis in ("ep", "dp_shard"):
        pieces = mesh.size(axis)
        if pieces == 1 or used[axis].is_shard or not shape or 0 in shape:
            continue
        local = cut.local_shape(shape, mesh.sizes)
        best = min(range(len(local)), key=lambda d: -(-local[d] // pieces) / local[d])
        cut = cut.with_(axis, shard(best), mesh.names) if local[best] > 1 else cut
    return cut
