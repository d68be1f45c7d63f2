"""Peak bytes of the fullest device, by what lives when the peak is reached."""

from __future__ import annotations

from dataclasses import dataclass

from hpsearch.estimate.parallel import ParallelLayout
from hpsearch.estimate.shape import ModelShape
from hpsearch.estimate.stages import Chunk, chunks
from hpsearch.estimate.work import BLOCKS, Work, head

CONTEXT_BYTES = 2.3e9
"""CUDA context, collective buffers, libraries."""
RESERVE = 0.03
"""Of all tensors: what the allocator holds beyond them."""
ACTIVATION_RESERVE = 0.07
"""Of activations, besides: blocks of many sizes that come and go leave holes."""
UNCOUNTED = 1.08
"""Saved activations over those counted from shapes: statistics, rotary copies, views that were made contiguous."""


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


def memory(shape: ModelShape, layout: ParallelLayout) -> Memory:
    """The fullest of all pipeline ranks."""
    works = {name: BLOCKS[name](shape, layout) for name in sorted(shape.counts)}
    cut = chunks(shape, layout)
    top = head(shape, layout)
    ranks = range(layout.pp) if layout.pp < 3 else (0, 1, layout.pp - 1)
    found = [Memory(rank, _rank_parts(shape, layout, cut, works, top, rank)) for rank in ranks]
    return max(found, key=lambda one: one.peak_bytes)


def _rank_parts(
    shape: ModelShape, layout: ParallelLayout, cut: tuple[Chunk, ...], works: dict[str, Work], top: Work, rank: int
) -> tuple[tuple[str, float], ...]:
    mine = cut[rank :: layout.pp]
    dense = sum(works[name].params * n for chunk in mine for name, n in chunk.blocks.items())
    expert = sum(works[name].expert_params * n for chunk in mine for name, n in chunk.blocks.items())
    if any(chunk.embedding for chunk in mine):
        dense += shape.embedding_params / layout.tp
    has_head = any(chunk.heads for chunk in mine)
    if has_head and not (shape.tied and layout.pp == 1):
        dense += shape.vocab * shape.hidden / layout.tp
    weights, gradients, optimizer = states(layout, dense, expert)
    kept, peak = _activations(shape, layout, mine, works, rank)
    logits = top.saved if has_head else 0.0
    parts = [
        ("weights", weights),
        ("gradients", gradients),
        ("optimizer", optimizer),
        ("activations", UNCOUNTED * _resident(layout, kept, in_flight(layout, rank))),
        ("working set", peak + logits),
        ("buffers", _buffers(layout, works)),
    ]
    tensors = sum(size for _, size in parts)
    reserve = RESERVE * tensors + ACTIVATION_RESERVE * dict(parts)["activations"]
    return (*parts, ("reserve", reserve), ("context", CONTEXT_BYTES))


def _resident(layout: ParallelLayout, kept: float, chunks_alive: float) -> float:
    """Activations on the device: what is not in host memory, and two chunks on their way there or back."""
    staged = min(layout.offload_share, 2 / chunks_alive) if layout.offload_share else 0.0
    return kept * (1 - layout.offload_share + staged)


def states(layout: ParallelLayout, dense: float, expert: float) -> tuple[float, float, float]:
    """(weights, gradients, optimizer) bytes: 16-bit weights, fp32 master and two moments. Fully sharded storage holds
    the master alone; what is gathered in 16 bit counts as a buffer."""
    if layout.lora:
        bytes_each = 2.0 if not layout.fsdp else 2.0 / layout.shards
        return bytes_each * (dense + expert), 0.0, 0.02 * (dense + expert)
    weights = gradients = optimizer = 0.0
    for params, ranks in ((dense, layout.data_ranks), (expert, layout.expert_data_ranks)):
        shards = max(1, min(ranks, layout.shards if layout.shard_ranks else ranks))
        weights += 0.0 if layout.fsdp else 2 * params / (shards if layout.zero >= 3 else 1)
        gradients += layout.grad_bytes * params / (shards if layout.zero >= 2 else 1)
        optimizer += 12 * params / (shards if layout.zero >= 1 else 1)
    return weights, gradients, optimizer


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
    itself if it is computed again). Blocks of different sizes do not take each other's place: it adds to the logits."""
    rows = layout.tokens / layout.tp if layout.sp else layout.tokens
    layers = sum(chunk.layers for chunk in mine) / len(mine)
    entry = 2.0 * shape.hidden * rows
    whole = sum(works[name].saved * n for chunk in mine for name, n in chunk.blocks.items()) / len(mine)
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


def _buffers(layout: ParallelLayout, works: dict[str, Work]) -> float:
    """Gathered parameters of two layers with full sharding."""
    if not layout.fsdp:
        return 0.0
    layer = sum(work.params for work in works.values())
    return (2 * 2 + layout.grad_bytes) * layer
