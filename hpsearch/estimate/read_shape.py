"""`shape_of_graph`: the `ModelShape` of a captured model, read off its ops.

Every block is taken apart in units (`anatomy`); a unit with its linears is a block of one kind: attention, mlp, moe,
mamba. Equal blocks share one entry of the pattern; others of a kind get a number and sizes of their own. Parameters
are those of the graph, block by block.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod

from hpsearch.errors import CaptureError
from hpsearch.estimate.anatomy import Anatomy, Unit, dissect
from hpsearch.estimate.shape import LatentAttention, ModelShape, StateSpace
from hpsearch.estimate.units import COLUMN, ROW, WHOLE, Core, Experts, Linear, Scan
from hpsearch.graph import Call, ModelGraph, Op, OpGraph

Block = tuple[str, ModelShape]
"""Kind, and the sizes that belong to it."""
Layer = tuple[Block, ...]


def shape_of_graph(graph: ModelGraph) -> ModelShape:
    """The shape of a model whose step is made of attention, feed-forward layers, routed experts and scans.

    Raises CaptureError where no such part is found: there is nothing this estimate could price.
    """
    ends = _ends(graph)
    seq_len = max((leaf.fixed[1] for leaf in graph.inputs if len(leaf.fixed) == 2), default=0)
    parts = {name: tuple(_Blocks(ends, dissect(piece), seq_len).read()) for name, piece in graph.blocks.items()}
    for name, blocks in parts.items():
        if not blocks:
            raise CaptureError(f"block {name}", "expected linear layers to estimate, but found none", "Use `plan`.")
    before, behind = _single(graph, ends, seq_len)
    layers = [*before, *(parts[name] for name, _ in graph.instances), *behind]
    if not layers:
        raise CaptureError(graph.name, "expected linear layers to estimate, but found none", "Use `plan`.")
    alone = sum(dict(shape.exact)[kind] for blocks in (*before, *behind) for kind, shape in blocks)
    names = _names(layers)
    pattern = tuple(tuple(names[block] for block in blocks) for blocks in layers)
    counts = Counter(block for layer in pattern for block in layer)
    variants = tuple((name, replace(shape, pattern=((kind,),) * counts[name])) for (kind, shape), name in names.items())
    return replace(ends, pattern=pattern, variants=variants, rest=max(ends.rest - alone, 0))


def _single(graph: ModelGraph, ends: ModelShape, seq_len: int) -> tuple[list[Layer], list[Layer]]:
    """Layers of which there is only one, which were not folded: (before the first block, behind it). What they attend
    to is taken from the nearest block with attention."""
    steps = graph.outer.steps
    first = next((i for i, step in enumerate(steps) if isinstance(step, Call)), len(steps))
    found = []
    calls = [graph.blocks[name] for name, _ in graph.instances]
    for part, order in ((steps[:first], 1), (steps[first:], -1)):
        ops = [step for step in part if isinstance(step, Op)]
        near = next((piece for piece in calls[::order] if dissect(piece).cores), graph.outer)
        anatomy = replace(dissect(graph.outer, ops), causal=near.causal)
        units = tuple(u for u in anatomy.units if not (isinstance(u, Linear) and u.n == ends.vocab))
        blocks = tuple(_Blocks(ends, replace(anatomy, units=units, params={}), seq_len).weights())
        found.append([blocks] if blocks else [])
    return found[0], found[1]


def _names(layers: Sequence[Layer]) -> dict[Block, str]:
    """`attention`, `attention#2`, …: one name for equal blocks, in the order in which they are met."""
    found: dict[Block, str] = {}
    seen: Counter[str] = Counter()
    for block in (block for blocks in layers for block in blocks):
        if block not in found:
            seen[block[0]] += 1
            found[block] = block[0] if seen[block[0]] == 1 else f"{block[0]}#{seen[block[0]]}"
    return found


def _ends(graph: ModelGraph) -> ModelShape:
    """What stands outside the blocks: embedding tables, head, the rest."""
    outer = graph.outer
    forward = [op for op in outer.ops if op.phase == "forward"]
    losses = [outer.values[op.inputs[0]].fixed[-1] for op in forward if "_log_softmax" in op.target]
    held = {value: outer.values[value].fixed for value in outer.params.values()}
    projections = [shape for shape in held.values() if len(shape) == 2 and losses and losses[-1] in shape]
    vocab = losses[-1] if projections and _embeds(outer) else 0
    hidden = min(projections[0]) if vocab else _stream(graph)
    tables = {op.inputs[0] for op in forward if op.target.startswith("aten.embedding.") and op.inputs[0] in held}
    positions = sum(held[table][0] for table in tables if vocab and held[table] == (held[table][0], hidden))
    positions -= vocab if any(held[table] == (vocab, hidden) for table in tables) else 0
    known = sum(map(prod, projections)) + hidden * (1 + positions) if vocab else 0
    rest = sum(map(prod, held.values())) - known
    return ModelShape(
        name=graph.name, hidden=hidden, heads=1, kv_heads=1, head_dim=1, vocab=vocab, pattern=(),
        tied=len(projections) == 1, positions=positions, rest=max(rest, 0),
    )  # fmt: skip


def _embeds(outer: OpGraph) -> bool:
    return any(op.target.startswith("aten.embedding.") for op in outer.ops)


def _stream(graph: ModelGraph) -> int:
    piece = graph.blocks[graph.instances[0][0]] if graph.blocks else graph.outer
    shape = piece.values[piece.outputs[0]].fixed
    return shape[-1] if shape else 0


@dataclass(frozen=True)
class _Blocks:
    """The blocks of one piece."""

    ends: ModelShape
    anatomy: Anatomy
    seq_len: int

    def read(self) -> Iterator[Block]:
        """Each with its parameters; what no linear holds (norms, biases) goes to the first."""
        found = list(self.weights())
        rest = self.anatomy.num_params - sum(_held(kind, shape) for kind, shape in found)
        for i, (kind, shape) in enumerate(found):
            counted = dict(shape.exact)[kind] + (rest if i == 0 else 0)
            yield kind, replace(shape, exact=((kind, counted),))

    def weights(self) -> Iterator[Block]:
        """Each with the parameters of its linears alone."""
        for units in self.joined():
            block = self.block(units)
            if block is not None:
                yield block

    def joined(self) -> list[tuple[Unit, ...]]:
        """Segments; those at and behind routed experts are one (router, shared expert)."""
        segments = list(self.anatomy.segments())
        routed = [i for i, units in enumerate(segments) if any(_chooses(u) for u in units)]
        if not routed:
            return segments
        first = routed[0]
        return [*segments[:first], tuple(unit for units in segments[first:] for unit in units)]

    def block(self, units: tuple[Unit, ...]) -> Block | None:
        linears = [u for u in units if isinstance(u, Linear)]
        cores = [u for u in units if isinstance(u, Core)]
        shape = replace(self.ends, vocab=0, tied=False, rest=0, tokens=self.tokens(linears))
        weights = sum(linear.n * linear.k for linear in linears)
        for unit in units:
            if isinstance(unit, Scan):
                return "mamba", replace(_scanned(shape, unit), exact=(("mamba", weights),))
            if isinstance(unit, Experts):
                return "moe", replace(_routed(shape, unit, linears), exact=(("moe", weights + shape.hidden),))
        if cores:
            return "attention", replace(self.attention(shape, cores[0], linears), exact=(("attention", weights),))
        if any(linear.cut == ROW for linear in linears):
            return "mlp", replace(_feed_forward(shape, linears), exact=(("mlp", weights),))
        return None

    def tokens(self, linears: Sequence[Linear]) -> int:
        """Tokens of a row, where they are not those of the batch."""
        rows = min((int(linear.rows) for linear in linears), default=0)
        return 0 if rows == self.seq_len else rows

    def attention(self, shape: ModelShape, core: Core, linears: Sequence[Linear]) -> ModelShape:
        anatomy = self.anatomy
        return replace(
            shape,
            heads=core.heads,
            kv_heads=core.kv_heads,
            head_dim=core.width,
            mla=_latent(core, linears, shape.hidden),
            causal=anatomy.causal and core.is_self,
            window=anatomy.window,
            window_layers=anatomy.windowed,
        )


def _chooses(unit: Unit) -> bool:
    return isinstance(unit, Experts) or (isinstance(unit, Linear) and unit.routes)


def _held(kind: str, shape: ModelShape) -> int:
    routed = shape.experts * shape.expert_params() if kind == "moe" else 0
    return dict(shape.exact)[kind] + routed


def _latent(core: Core, linears: Sequence[Linear], hidden: int) -> LatentAttention | None:
    """Keys and values that come from a narrow tensor; queries may."""
    narrow = [linear for linear in linears if linear.cut == COLUMN and linear.k < hidden]
    down = [linear for linear in linears if linear.cut == WHOLE]
    keys = next((u for u in narrow if u.n != core.heads * core.width or len(narrow) == 1), None)
    if keys is None or not down:
        return None
    queries = next((u.k for u in narrow if u is not keys), 0)
    shared = next((d.n - keys.k for d in down if d.n != queries and 0 < d.n - keys.k < core.width), 0)
    return LatentAttention(queries, keys.k, core.width - shared, shared, core.v_width)


def _feed_forward(shape: ModelShape, linears: Sequence[Linear]) -> ModelShape:
    last = next(linear for linear in reversed(linears) if linear.cut == ROW)
    up = sum(linear.n for linear in linears if linear.cut == COLUMN)
    return replace(shape, ffn=last.k, gated=up > last.k)


def _routed(shape: ModelShape, unit: Experts, linears: Sequence[Linear]) -> ModelShape:
    shared = next((linear.k for linear in linears if linear.cut == ROW), 0)
    return replace(
        shape, experts=unit.experts, top_k=unit.top_k, moe_ffn=unit.ffn, moe_gated=unit.gated, shared_ffn=shared,
        moe_latent=unit.width if unit.width != shape.hidden else 0, expert_bias=unit.bias,
        expert_groups=unit.groups, most_groups=unit.most_groups,
    )  # fmt: skip


def _scanned(shape: ModelShape, unit: Scan) -> ModelShape:
    state = max(unit.state, 1)
    return replace(
        shape, mamba=StateSpace(unit.heads, unit.inner // unit.heads, state, max(unit.states // state, 1)),
    )  # fmt: skip
