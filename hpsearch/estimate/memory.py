"""Peak bytes of the fullest device, by what lives when the peak is reached.

States live through the step. On top of them comes the fullest of three moments: the *loss* (all activations kept, and
the logits with their gradient), the *backward* of a layer (all activations kept, the gradients of that layer's, what
is computed again, gathered parameters), the *update* (no activations; temporaries of the optimizer).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from hpsearch.estimate.kept import Kept, kept_under
from hpsearch.estimate.optimizer import matrices, moment_bytes
from hpsearch.estimate.parallel import AS_RUN, ParallelLayout
from hpsearch.estimate.shape import ModelShape
from hpsearch.estimate.stages import Chunk, chunks
from hpsearch.estimate.work import Work, block_work, head

CONTEXT_BYTES = 0.6e9
"""CUDA context with loaded kernels, and cuBLAS workspaces."""
COMMUNICATOR_BYTES = 0.27e9
"""NCCL's buffers of one communicator: 4 MiB for each of up to 32 channels, for sending and for receiving
(NCCL_BUFFSIZE, docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html)."""
RESERVE = 0.02
"""Of all tensors: what the allocator holds beyond them."""
HOLES = 0.05
"""Of activations, besides, with segments of fixed size: blocks of many sizes that come and go leave holes."""
MASTER_BYTES = 4.0
"""fp32 master copy of one parameter."""
GATHERED_LAYERS = 2
"""Layers whose parameters stand gathered at once under full sharding: the one at work and the next."""
COPIED_LAYERS = 2
"""Layers whose activations are copied to or from the host as one."""
BUCKET_PARAMS = 5e8
"""Gradients in one bucket of ZeRO-2 (DeepSpeed's `reduce_bucket_size`, deepspeed.ai/docs/config-json)."""
OVERLAPPED_LINEARS = 8
"""Products with a buffer of their own: of the four linears of a layer, forward and backward (Transformer Engine's
`initialize_ub`)."""
LORA_RANK = 16
"""Of adapters, on every linear (arXiv 2106.09685; the rank of MLPerf's benchmark and of most recipes)."""


REMEDIES = {
    "logits": "a loss in chunks or split over the vocabulary, context parallelism, smaller micro-batches",
    "activations": "recompute, offload, sequence or context parallelism, smaller micro-batches",
    "working set": "tensor or context parallelism, smaller micro-batches",
    "optimizer": "ZeRO-1 or more data ranks",
    "gradients": "ZeRO-2, 16-bit gradients",
    "weights": "ZeRO-3, tensor, pipeline or expert parallelism",
    "buffers": "tensor or expert parallelism",
}
"""What makes a part smaller."""


@dataclass(frozen=True)
class Memory:
    """Bytes on one device of a pipeline rank."""

    rank: int
    parts: tuple[tuple[str, float], ...]

    @property
    def peak_bytes(self) -> float:
        return sum(size for _, size in self.parts)

    @property
    def tensor_bytes(self) -> float:
        """Without context and reserve: what torch's `max_memory_allocated` counts."""
        return sum(size for name, size in self.parts if name not in ("context", "reserve"))

    @property
    def reserved_bytes(self) -> float:
        """With what the allocator holds beyond tensors: torch's `max_memory_reserved`."""
        return self.tensor_bytes + dict(self.parts)["reserve"]

    @property
    def persistent_bytes(self) -> float:
        """What lives through the whole step."""
        return sum(size for name, size in self.parts if name in ("weights", "gradients", "optimizer"))

    @property
    def largest(self) -> tuple[tuple[str, float], ...]:
        """The parts there are, largest first."""
        return tuple(sorted((part for part in self.parts if part[1]), key=lambda part: (-part[1], part[0])))

    def __str__(self) -> str:
        first = self.largest[0][0]
        rows = [f"peak {self.peak_bytes / 1e9:.4g} GB on pipeline rank {self.rank}"]
        rows += [f"  {name:<12}{size / 1e9:10.4g} GB" for name, size in self.largest]
        return "\n".join([*rows, *([f"smaller {first}: {REMEDIES[first]}"] if first in REMEDIES else [])])


@dataclass(frozen=True)
class _Held:
    """Parameters of one pipeline rank on one device."""

    dense: float
    expert: float
    head: float
    """Of the output projection, tied or not."""
    adapters: float
    """Trained in place of all others; 0 without adapters."""


def memory(
    shape: ModelShape,
    layout: ParallelLayout,
    cut: tuple[Chunk, ...] | None = None,
    works: dict[str, Work] | None = None,
) -> Memory:
    """The fullest of all pipeline ranks. `cut`: the layers of each chunk, if they are not to be chosen here."""
    is_told = cut or layout.cut or layout.schedule_kind not in AS_RUN
    ranks = range(layout.pp) if layout.pp < 3 or is_told else (0, 1, layout.pp - 1)
    works, cut = works or _works(shape, layout), cut or chunks(shape, layout)
    held = (stage_memory(shape, layout, rank, _of_rank(cut, layout, rank), works) for rank in ranks)
    return max(held, key=lambda one: one.peak_bytes)


def rank_memory(
    shape: ModelShape,
    layout: ParallelLayout,
    rank: int,
    cut: tuple[Chunk, ...] | None = None,
    works: dict[str, Work] | None = None,
) -> Memory:
    """One device of pipeline rank `rank`, at the fullest of the three moments. `works`: of the blocks and the head, if
    they are known already."""
    mine = _of_rank(cut or chunks(shape, layout), layout, rank)
    return stage_memory(shape, layout, rank, mine, works or _works(shape, layout))


def _of_rank(cut: tuple[Chunk, ...], layout: ParallelLayout, rank: int) -> tuple[Chunk, ...]:
    return tuple(cut[i] for i in layout.chunks_of(rank))


def _works(shape: ModelShape, layout: ParallelLayout) -> dict[str, Work]:
    return {name: block_work(name, shape, layout) for name in sorted(shape.counts)} | {"head": head(shape, layout)}


def stage_memory(
    shape: ModelShape, layout: ParallelLayout, rank: int, mine: tuple[Chunk, ...], works: dict[str, Work]
) -> Memory:
    """One device of pipeline rank `rank`, which has the chunks `mine`; `works` of the blocks and the head."""
    held = _held(shape, layout, mine, works)
    weights, gradients, optimizer = states(layout, held.dense, held.expert, held.adapters)
    kept, peak = _kept(shape, layout, mine, works, rank)
    moments: tuple[tuple[tuple[str, float], ...], ...] = (
        (
            ("activations", kept.after_forward), ("logits", kept.logits_after_forward),
            ("buffers", _gathered(layout, held.head)),
        ),
        (
            ("activations", kept.in_backward), ("logits", kept.logits_in_backward), ("working set", peak),
            ("buffers", _layer_buffers(shape, layout, works)),
        ),
        (("update", _update(layout, optimizer)),),
    )  # fmt: skip
    fullest = max(moments, key=lambda parts: sum(size for _, size in parts))
    exchange = ("exchange", _exchange(shape, layout, works) + _bucket(layout, held.dense + held.expert))
    parts = [("weights", weights), ("gradients", gradients), ("optimizer", optimizer), *fullest, exchange]
    reserve = RESERVE * sum(size for _, size in parts)
    if not layout.expandable:
        reserve += HOLES * dict(parts).get("activations", 0.0)
    return Memory(rank, (*parts, ("reserve", reserve), ("context", _context(layout))))


def _held(shape: ModelShape, layout: ParallelLayout, mine: tuple[Chunk, ...], works: dict[str, Work]) -> _Held:
    """Embedding on the first chunk; last norm and output projection on the last, where a tied projection is a second
    copy unless the embedding stands there too."""
    dense = sum(works[name].params * n for chunk in mine for name, n in chunk.blocks.items())
    expert = sum(works[name].expert_params * n for chunk in mine for name, n in chunk.blocks.items())
    first, last = any(chunk.embedding for chunk in mine), any(chunk.heads for chunk in mine)
    output = shape.vocab * shape.hidden / layout.tp if last else 0.0
    dense += shape.embedding_params / layout.tp if first else 0.0
    dense += (0.0 if shape.tied and first else output) + (shape.hidden * (2 if shape.bias else 1) if last else 0)
    adapters = 0.0
    if layout.lora:
        adapters = sum(adapter_params(shape, layout, name) * n for chunk in mine for name, n in chunk.blocks.items())
    return _Held(dense, expert, output, adapters)


def _context(layout: ParallelLayout) -> float:
    """One communicator for all ranks, and one for each mesh axis; a pipeline rank has one to each neighbour."""
    axes = sum(size > 1 for size in (layout.tp, layout.cp, layout.dp, layout.ep)) + (2 if layout.pp > 1 else 0)
    return CONTEXT_BYTES + COMMUNICATOR_BYTES * (axes + (1 if layout.devices > 1 else 0))


def _resident(layout: ParallelLayout, kept: float, layers: float) -> float:
    """Activations on the device, of `layers` layers alive: what is not in host memory, and what is there on its way.
    One stage offloads its first layers, which have left by the time the loss is reached; with nearly all offloaded the
    fullest time is when some layers are at work and as many leave. In a pipeline forwards and backwards take turns, so
    that layers at work, leaving and coming back stand beside what is kept."""
    if not layout.offload_share:
        return kept
    share, layers = layout.offload_share, max(layers, 1)
    if layout.pp == 1:
        return kept * max(1 - share, min(1.0, 2 * COPIED_LAYERS / layers))
    return kept * (1 - share + min(share, 4 * COPIED_LAYERS / layers))


def states(layout: ParallelLayout, dense: float, expert: float, adapters: float = 0.0) -> tuple[float, float, float]:
    """(weights, gradients, optimizer) bytes: 16-bit weights, fp32 master and two moments. Fully sharded storage holds
    the master alone, and gradients of its type; what is gathered in 16 bit counts as a buffer, unless it stays from
    forward to backward (ZeRO-2).
    Frozen weights have no master, and in low precision are stored in it."""
    if layout.lora:
        each = 1.0 if layout.low_precision else 2.0
        frozen = each * (dense + expert) / (layout.shards if layout.fsdp else 1)
        weights, gradients, optimizer = states(replace(layout, lora=False), adapters, 0.0)
        return frozen + weights, gradients, optimizer
    weights = gradients = optimizer = 0.0
    for params, ranks in ((dense, layout.data_ranks), (expert, layout.expert_data_ranks)):
        shards = max(1, min(ranks, layout.shards if layout.shard_ranks else ranks))
        weights += 0.0 if layout.fsdp and layout.zero >= 3 else 2 * params / (shards if layout.zero >= 3 else 1)
        each = MASTER_BYTES if layout.fsdp else layout.grad_bytes
        gradients += each * params / (shards if layout.zero >= 2 else 1)
        optimizer += (MASTER_BYTES + moment_bytes(layout)) * params / (shards if layout.zero >= 1 else 1)
    return weights, gradients, optimizer


def adapter_params(shape: ModelShape, layout: ParallelLayout, block: str) -> float:
    """Low-rank adapters of one block on one device: rank·(inputs + outputs) of each linear. The half that meets a
    dim which tp cuts is cut with it. Routers and state-space blocks have none."""
    return LORA_RANK * float(sum(inputs + outputs for inputs, outputs in matrices(shape, layout, block)))


def _update(layout: ParallelLayout, optimizer: float) -> float:
    """Temporaries of the update: fp32 copies of gradients that are kept in 16 bit; the square root of second moments
    is taken in place."""
    share = MASTER_BYTES / (MASTER_BYTES + moment_bytes(layout))
    return optimizer * share if layout.grad_bytes < MASTER_BYTES and not layout.fsdp else 0.0


def in_flight(layout: ParallelLayout, rank: int) -> float:
    """Chunk activations alive at once on a pipeline rank, in chunks."""
    p, v, m = layout.pp, max(layout.vpp, 1), layout.micro_batches
    if p == 1:
        return 1.0 * v
    if v == 1:
        return float(min(m, p - rank))
    return float(min(m * v, 2 * (p - rank - 1) + (v - 1) * p + 1))


def _kept(
    shape: ModelShape, layout: ParallelLayout, mine: tuple[Chunk, ...], works: dict[str, Work], rank: int
) -> tuple[Kept, float]:
    """What is kept on the device, and the working set of a backward on top."""
    if layout.schedule_kind not in AS_RUN:
        plain = replace(layout, recompute="none", recomputed=())
        told = [plain if chunk.again is not None and not chunk.layers_again else layout for chunk in mine]
        alone = [_activations(shape, how, (chunk,), works) for how, chunk in zip(told, mine, strict=True)]
        resident = [_resident(layout, kept, chunk.layers) for (kept, _), chunk in zip(alone, mine, strict=True)]
        peak = max(working for _, working in alone)
        return kept_under(shape, layout, rank, mine, works, resident), peak
    each, peak = _activations(shape, layout, mine, works)
    alive = in_flight(layout, rank)
    kept = _resident(layout, alive * each, alive * sum(chunk.layers for chunk in mine) / len(mine))
    logits = works["head"].saved * sum(chunk.heads for chunk in mine)
    return Kept(kept, logits, kept, 0.0 if layout.fused else logits), peak


def _activations(
    shape: ModelShape, layout: ParallelLayout, mine: tuple[Chunk, ...], works: dict[str, Work]
) -> tuple[float, float]:
    """(kept between forward and backward by the average chunk, working set on top: gradients of one layer's
    activations, and the layer itself if it is computed again)."""
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
            for chunk in mine for name, n in chunk.blocks.items() for part in sorted(layout.recompute_parts)
        ) / len(mine)  # fmt: skip
    biggest = max((works[name].saved for chunk in mine for name in chunk.blocks), default=0.0)
    pair = sum(works[name].saved for name in sorted(set(shape.pattern[0])))
    again = [(name, n) for chunk in mine if chunk.again is not None for name, n in chunk.again.items()]
    if again:
        left = sum((works[name].saved + works[name].copies) * n for name, n in again) / len(mine)
        kept = whole - left + entry * sum(chunk.layers_again for chunk in mine) / len(mine)
        return kept, max(pair, biggest) * 1.25
    if layout.recompute == "full" and not layout.recomputed:
        share = layout.recompute_share
        kept = share * layers * entry + (1 - share) * whole
        return kept, max(pair, biggest) * 1.25
    return whole - dropped, pair + dropped / max(layers, 1)


def _exchange(shape: ModelShape, layout: ParallelLayout, works: dict[str, Work]) -> float:
    """What stands ready to be sent or received: whole inputs or outputs of the layer's linears, which matmuls that
    overlap with their collective work through; activations and their gradients on the way between stages, both ways in
    a V; keys and values of the next cp rank, or of all, and their gradients; tokens sent to and received for experts.
    """
    size = 0.0
    if layout.tp > 1 and layout.overlap_tp and layout.sp:
        size += OVERLAPPED_LINEARS * 2.0 * shape.hidden * layout.tokens
    if layout.pp > 1:
        size += (8 if layout.is_vee else 4) * 2.0 * shape.hidden * layout.tokens / (layout.tp if layout.sp else 1)
    blocks = max((work.cp_bytes for work in works.values()), default=0.0)
    size += 2 * blocks * (1 if layout.cp_kind == "ring" else layout.cp)
    return size + 2 * max((work.ep_bytes for work in works.values()), default=0.0)


def loss_bytes(shape: ModelShape, layout: ParallelLayout, works: dict[str, Work]) -> float:
    """On the last stage at the loss, beside activations and what is gathered of the output projection."""
    return works["head"].saved * (1 + shape.mtp_layers) if shape.vocab else 0.0


def step_buffers(shape: ModelShape, layout: ParallelLayout, works: dict[str, Work]) -> tuple[float, float]:
    """(in the backward of a layer at least, in collectives), on every stage of `layout`."""
    pair = sum(works[name].saved for name in sorted(set(shape.pattern[0])))
    return pair + _layer_buffers(shape, layout, works), _exchange(shape, layout, works)


def context_bytes(layout: ParallelLayout) -> float:
    """What is there before the first tensor: contexts and communicators."""
    return _context(layout)


def _bucket(layout: ParallelLayout, params: float) -> float:
    """Gradients that wait for their reduction to the rank that keeps them, and those being reduced. Where every rank
    keeps all gradients, or gathers layer by layer, buckets are views of what is counted."""
    if layout.zero != 2 or layout.fsdp or layout.data_ranks == 1:
        return 0.0
    return 2 * layout.grad_bytes * min(params, BUCKET_PARAMS)


def _gathered(layout: ParallelLayout, params: float) -> float:
    """Parameters gathered in 16 bit from fully sharded storage, and their gradient before it is scattered."""
    return (2 + layout.grad_bytes) * params if layout.fsdp else 0.0


def _layer_buffers(shape: ModelShape, layout: ParallelLayout, works: dict[str, Work]) -> float:
    """Of the widest layer: its gradient, its parameters and those of the next."""
    widest = max(sum(works[name].params + works[name].expert_params for name in layer) for layer in set(shape.pattern))
    return _gathered(layout, widest) + (2 * (GATHERED_LAYERS - 1) * widest if layout.fsdp else 0.0)
