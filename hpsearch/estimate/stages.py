"""Which layers stand in which chunk of the pipeline."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from hpsearch.errors import LegalityError
from hpsearch.estimate.parallel import ParallelLayout
from hpsearch.estimate.shape import Layer, ModelShape


@dataclass(frozen=True)
class Chunk:
    """A run of layers; chunk i stands on pipeline rank i mod pp."""

    blocks: Counter[str]
    layers: int
    embedding: bool
    heads: int
    """Passes through the output projection: one more for each extra-prediction layer."""
    again: Counter[str] | None = None
    """Blocks whose forward the backward repeats under full recompute, if that is told layer by layer."""
    layers_again: int = 0
    kinds: Counter[Layer] = field(default_factory=Counter)
    """Its layers, which is what fully sharded storage gathers at once; extra-prediction layers among them."""


def chunks(shape: ModelShape, layout: ParallelLayout) -> tuple[Chunk, ...]:
    """`pp·vpp` runs of layers: equal ones where they divide, else as even as whole layers allow once the embedding,
    the head and extra-prediction layers are counted as the layers they weigh. The last has a layer more or less if all
    others are equal then, since one of those with a layer too many would set the pace."""
    count = layout.chunks
    found, at = [], 0
    for i, size in enumerate(_given(shape, layout) or sizes_of(shape, count)):
        blocks = Counter(block for layer in shape.pattern[at : at + size] for block in layer)
        kinds = Counter(shape.pattern[at : at + size])
        last = i == count - 1
        if last and shape.mtp_layers:
            kinds[shape.pattern[-1]] += shape.mtp_layers
            for block in shape.pattern[-1]:
                blocks[block] += shape.mtp_layers
        heads = (1 + shape.mtp_layers) if last and shape.vocab else 0
        found.append(Chunk(blocks, size, i == 0 and shape.vocab > 0, heads, kinds=kinds))
        at += size
    return tuple(_recomputed(shape, layout, found))


def of_layers(layers: Sequence[Layer]) -> Chunk:
    """A chunk of these layers and nothing else."""
    blocks = Counter(block for layer in layers for block in layer)
    return Chunk(blocks, len(layers), False, 0, kinds=Counter(layers))


def _given(shape: ModelShape, layout: ParallelLayout) -> tuple[int, ...]:
    """The layout's own cut. LegalityError: it is not one of this model's layers."""
    if layout.cut and min(layout.cut) < 0:
        raise LegalityError(
            "layout, cut", f"expected 0 or more layers in each chunk, but found {min(layout.cut)}",
            f"Legal: 0 to {shape.layers}.",
        )  # fmt: skip
    if layout.cut and sum(layout.cut) != shape.layers:
        raise LegalityError(
            "layout, cut", f"expected {shape.layers} layers in pp·vpp = {layout.pp}·{max(layout.vpp, 1)} chunks, but "
            f"found {sum(layout.cut)} in cut = {'+'.join(map(str, layout.cut))}",
            f"Legal: numbers that add up to {shape.layers}.",
        )  # fmt: skip
    return layout.cut


def with_again(shape: ModelShape, chunk: Chunk, at: int, layers: int) -> Chunk:
    """`chunk`, which starts at layer `at`, with its first `layers` computed again; with all of them, extra ones too,
    which a stage without layers of its own has no way to say."""
    if 0 < layers == chunk.layers:
        return replace(chunk, again=chunk.blocks, layers_again=layers)
    again = Counter(block for layer in shape.pattern[at : at + layers] for block in layer)
    return replace(chunk, again=again, layers_again=layers)


def _recomputed(shape: ModelShape, layout: ParallelLayout, found: list[Chunk]) -> list[Chunk]:
    """The chunks with what the layout computes again, if it tells that layer by layer."""
    at, made = 0, []
    for i, (chunk, layers) in enumerate(zip(found, layout.recomputed or (0,) * len(found), strict=True)):
        if not 0 <= layers <= chunk.layers:
            raise LegalityError(
                "layout, recomputed", f"expected 0 to {chunk.layers} layers of chunk {i}, but found {layers}",
                f"Legal: up to {', '.join(str(one.layers) for one in found)}.",
            )  # fmt: skip
        made.append(with_again(shape, chunk, at, layers) if layout.recomputed else chunk)
        at += chunk.layers
    return made


def filled_sizes(shape: ModelShape, count: int) -> list[int]:
    """`sizes_of`, but a chunk that a heavy head would leave without layers has one: programs have no empty stages."""
    sizes = sizes_of(shape, count)
    while min(sizes) < 1:
        sizes[sizes.index(max(sizes))] -= 1
        sizes[sizes.index(min(sizes))] += 1
    return sizes


def sizes_of(shape: ModelShape, count: int) -> list[int]:
    """Layers of each chunk, adding up to all of them, as frameworks deal them out: the last may have only the head."""
    base, more = divmod(shape.layers, count)
    if not more and not shape.mtp_layers:
        return [base] * count
    layer = max((shape.active_params - shape.embedding_params - shape.head_params) / shape.layers, 1.0)
    head = shape.vocab * shape.hidden / layer
    extra = shape.mtp_layers + (1 + shape.mtp_layers) * head
    if count == 1:
        return [shape.layers]
    last = min(max(round((shape.layers + extra) / count - extra), 0), base + (1 if more else 0))
    near = (one for one in (last, last + 1, last - 1) if 0 <= one <= base + 1)
    last = next((one for one in near if (shape.layers - one) % (count - 1) == 0), last)
    base, more = divmod(shape.layers - last, count - 1)
    first = (count - 1 - more + 1) // 2
    return [base + (1 if first <= i < first + more else 0) for i in range(count - 1)] + [last]
