"""Peak bytes of the fullest device, by what lives when the peak is reached.

States live through the step. On top of them comes the fullest of three moments: the *loss* (all activations kept, and
the logits with their gradient), the *backward* of a layer (all activations kept, the gradients of that layer's, what
is computed again, gathered parameters), the *update* (no activations; temporaries of the optimizer).
"""

from __future__ import annotations

from dataclasses import dataclass

from hpsearch.estimate.parallel import ParallelLayout
from hpsearch.estimate.shape import ModelShape
from hpsearch.estimate.stages import Chunk, chunks
from hpsearch.estimate.work import BLOCKS, Work, head

CONTEXT_BYTES = 0.6e9
"""CUDA context with loaded kernels, and cuBLAS workspaces."""
COMMUNICATOR_BYTES = 0.27e9
"""NCCL's buffers of one communicator: 4 MiB for each of up to 32 channels, for sending and for receiving
(NCCL_BUFFSIZE, docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html)."""
RESERVE = 0.03
"""Of all tensors: what the allocator holds beyond them."""
HOLES = 0.03
"""Of activations, besides, with segments of fixed size: blocks of many sizes that come and go leave holes."""
MASTER_BYTES, MOMENT_BYTES = 4.0, 8.0
"""fp32 master copy, and the two fp32 moments of Adam, of one parameter."""
GATHERED_LAYERS = 2
"""Layers whose parameters stand gathered at once under full sharding: the one at work and the next."""
COPIED_LAYERS = 2
"""Layers whose activations are copied to or from the host as one."""
LORA_RANK = 16


@dataclass(frozen=True)
class Memory:
    """Bytes on the fullest pipeline rank."""

    rank: int
    parts: tuple[tuple[str, float], ...]

    @property
    def peak_bytes(self) -> float:
        return sum(size for _, size in self.parts)

    @property
    def tensor_bytes(self) -> float:
        """Without context and reserve: what torch's `max_memory_allocated` counts."""
        return sum(size for name, size in self.parts if name not in ("context", "reserve"))

    def __str__(self) -> str:
        rows = [f"peak {self.peak_bytes / 1e9:.4g} GB on pipeline rank {self.rank}"]
        return "\n".join(rows + [f"  {name:<12}{size / 1e9:10.4g} GB" for name, size in self.parts])


@dataclass(frozen=True)
class _Held:
    """Parameters of one pipeline rank on one device."""

    dense: float
    expert: float
    head: float
    """Of the dense ones, those of the output projection."""
    embedding: float


def memory(shape: ModelShape, layout: ParallelLayout) -> Memory:
    """The fullest of all pipeline ranks."""
    works = {name: BLOCKS[name](shape, layout) for name in sorted(shape.counts)}
    cut = chunks(shape, layout)
    top = head(shape, layout)
    ranks = range(layout.pp) if layout.pp < 3 else (0, 1, layout.pp - 1)
    found = [Memory(rank, _rank_parts(shape, layout, cut, works, top, rank)) for rank in ranks]
    return max(found, key=lambda one: one.peak_bytes)


def _held(shape: ModelShape, layout: ParallelLayout, mine: tuple[Chunk, ...], works: dict[str, Work]) -> _Held:
    dense = sum(works[name].params * n for chunk in mine for name, n in chunk.blocks.items())
    expert = sum(works[name].expert_params * n for chunk in mine for name, n in chunk.blocks.items())
    embedding = shape.embedding_params / layout.tp if any(chunk.embedding for chunk in mine) else 0.0
    output = 0.0
    if any(chunk.heads for chunk in mine):
        output = shape.vocab * shape.hidden / layout.tp
    own_output = 0.0 if shape.tied and layout.pp == 1 else output
    return _Held(dense + embedding + own_output, expert, output, embedding)


def _rank_parts(
    shape: ModelShape, layout: ParallelLayout, cut: tuple[Chunk, ...], works: dict[str, Work], top: Work, rank: int
) -> tuple[tuple[str, float], ...]:
    mine = cut[rank :: layout.pp]
    held = _held(shape, layout, mine, works)
    weights, gradients, optimizer = states(layout, held.dense, held.expert)
    kept, peak = _activations(shape, layout, mine, works, rank)
    alive = in_flight(layout, rank)
    kept = _resident(layout, kept, alive * sum(chunk.layers for chunk in mine) / len(mine))
    logits = top.saved if held.head else 0.0
    referenced = 0.0 if layout.fused else logits
    moments: tuple[tuple[tuple[str, float], ...], ...] = (
        (("activations", kept), ("logits", logits), ("buffers", _gathered(layout, held.head))),
        (
            ("activations", kept), ("logits", referenced), ("working set", peak),
            ("buffers", _layer_buffers(layout, works)),
        ),
        (("update", _update(layout, optimizer)),),
    )  # fmt: skip
    fullest = max(moments, key=lambda parts: sum(size for _, size in parts))
    parts = [("weights", weights), ("gradients", gradients), ("optimizer", optimizer), *fullest]
    tensors = sum(size for _, size in parts)
    reserve = RESERVE * tensors
    if not layout.expandable:
        reserve += HOLES * dict(parts).get("activations", 0.0)
    return (*parts, ("reserve", reserve), ("context", _context(layout)))


def _context(layout: ParallelLayout) -> float:
    """One communicator for all ranks, and one for each mesh axis; a pipeline rank has one to each neighbour."""
    axes = sum(size > 1 for size in (layout.tp, layout.cp, layout.dp, layout.ep)) + (2 if layout.pp > 1 else 0)
    return CONTEXT_BYTES + COMMUNICATOR_BYTES * (axes + (1 if layout.devices > 1 else 0))


def _resident(layout: ParallelLayout, kept: float, layers: float) -> float:
    """Activations on the device, of `layers` layers alive: what is not in host memory, and what is there on its way:
    layers at work and layers leaving; in a pipeline, where forwards and backwards take turns, layers coming as well."""
    if not layout.offload_share:
        return kept
    moving = (4 if layout.pp > 1 else 2) * COPIED_LAYERS
    return kept * (1 - layout.offload_share + min(layout.offload_share, moving / layers))


def states(layout: ParallelLayout, dense: float, expert: float) -> tuple[float, float, float]:
    """(weights, gradients, optimizer) bytes: 16-bit weights, fp32 master and two moments. Fully sharded storage holds
    the master alone; what is gathered in 16 bit counts as a buffer, unless it stays from forward to backward (ZeRO-2).
    Frozen weights of a low precision have no master and are stored in it."""
    if layout.lora:
        bytes_each = 1.0 if layout.low_precision else 2.0
        bytes_each /= layout.shards if layout.fsdp else 1
        return bytes_each * (dense + expert), 0.0, 0.02 * (dense + expert)
    weights = gradients = optimizer = 0.0
    for params, ranks in ((dense, layout.data_ranks), (expert, layout.expert_data_ranks)):
        shards = max(1, min(ranks, layout.shards if layout.shard_ranks else ranks))
        weights += 0.0 if layout.fsdp and layout.zero >= 3 else 2 * params / (shards if layout.zero >= 3 else 1)
        gradients += layout.grad_bytes * params / (shards if layout.zero >= 2 else 1)
        optimizer += (MASTER_BYTES + MOMENT_BYTES) * params / (shards if layout.zero >= 1 else 1)
    return weights, gradients, optimizer


def _update(layout: ParallelLayout, optimizer: float) -> float:
    """Temporaries of the update: fp32 copies of gradients that are kept in 16 bit; the square root of second moments
    is taken in place."""
    return optimizer * (MASTER_BYTES / (MASTER_BYTES + MOMENT_BYTES)) if layout.grad_bytes < 4 else 0.0


def in_flight(layout: ParallelLayout, rank: int) -> float:
    """Chunk activations alive at once on a pipeline rank, in chunks."""
    p, v, m = layout.pp, max(layout.vpp, 1), layout.micro_batches
    if p == 1:
        return 1.0 * v
    if v == 1:
        return float(min(m, p - rank))
    return float(min(m * v, 2 * (p - rank - 1) + (v - 1) * p + 1))


def _activations(
    shape: ModelShape, layout: ParallelLayout, mine: tuple[Chunk, ...], works: dict[str, Work], rank: int
) -> tuple[float, float]:
    """(kept between forward and backward, working set on top: gradients of one layer's activations, and the layer
    itself if it is computed again)."""
    rows = layout.tokens / layout.tp if layout.sp else layout.tokens
    layers = sum(chunk.layers for chunk in mine) / len(mine)
    entry = 2.0 * shape.hidden * rows
    whole = sum(
        (works[name].saved + works[name].copies) * n for chunk in mine for name, n in chunk.blocks.items()
    ) / len(mine)
    dropped = 0.0
    if layout.recompute == "selective":
        dropped = sum(
            works[name].saved_parts.get(part, 0.0) * n
            for chunk in mine for name, n in chunk.blocks.items() for part in layout.recompute_parts
        ) / len(mine)  # fmt: skip
    biggest = max((works[name].saved for chunk in mine for name in chunk.blocks), default=0.0)
    pair = sum(works[name].saved for name in set(shape.pattern[0]))
    if layout.recompute == "full":
        share = layout.recompute_share
        kept = share * layers * entry + (1 - share) * whole
        return in_flight(layout, rank) * kept, max(pair, biggest) * 1.25
    return in_flight(layout, rank) * (whole - dropped), pair + dropped / max(layers, 1)


def _gathered(layout: ParallelLayout, params: float) -> float:
    """Parameters gathered in 16 bit from fully sharded storage, and their gradient before it is scattered."""
    return (2 + layout.grad_bytes) * params if layout.fsdp else 0.0


def _layer_buffers(layout: ParallelLayout, works: dict[str, Work]) -> float:
    layer = sum(work.params + work.expert_params for work in works.values())
    return _gathered(layout, layer) + (2 * (GATHERED_LAYERS - 1) * layer if layout.fsdp else 0.0)
