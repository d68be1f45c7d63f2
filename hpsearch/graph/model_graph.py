"""`ModelGraph`: what a model computes in one training step, as facts without torch.

A model is one *outer* graph and a few *block classes*. The outer graph holds everything around the repeated modules
(embedding, final norm, head, loss) and a `Call` wherever a repeated module stands; each class is captured once, as a
joint forward and backward graph of its own, however often it is called. Depth is therefore a number of calls, not a
number of ops. A model without repeated modules is an outer graph alone.

Every size is affine in the rows of the batch that is captured: `size(rows) = fixed + per_row * rows`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

from hpsearch.graph.routed import by_expert, routed

ITEM_BYTES = {
    "float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "int64": 8, "int32": 4, "int16": 2, "int8": 1,
    "uint8": 1, "bool": 1, "complex64": 8, "complex128": 16, "float8_e4m3fn": 1, "float8_e5m2": 1,
}  # fmt: skip
"""Bytes of one element, by torch's dtype name."""


@dataclass(frozen=True)
class Value:
    """A tensor of a graph, by global (unsplit) shape."""

    name: str
    """Unique in its graph; the traced node's name, or `name.0`, `name.1`, … where a node returns several."""
    fixed: tuple[int, ...]
    per_row: tuple[int, ...]
    """Shape = fixed + per_row * rows, dim by dim; at most one dim has per_row > 0 in practice: the batch dim."""
    dtype: str
    role: str
    """param, buffer, input, tangent (gradient of an output, arrives from outside), or op (made here)."""

    def shape(self, rows: int) -> tuple[int, ...]:
        return tuple(f + p * rows for f, p in zip(self.fixed, self.per_row, strict=True))

    @property
    def batch_dims(self) -> tuple[int, ...]:
        return tuple(d for d, p in enumerate(self.per_row) if p)

    def nbytes(self, rows: int) -> int:
        count = ITEM_BYTES[self.dtype]
        for size in self.shape(rows):
            count *= size
        return count


Rule = tuple[tuple[str, ...], tuple[str, ...]]
"""Placements of the tensor inputs and of the outputs on one mesh axis, as text: (("S0", "R"), ("S0",)).

A rule says: run the op on these local pieces and the local results are these pieces of the results."""


@dataclass(frozen=True)
class Op:
    """One traced operation on global tensors."""

    name: str
    target: str
    """Operator name, `aten.mm.default`; `hpsearch.einsum` for a contraction restored from view-mm-view."""
    inputs: tuple[str, ...]
    """Value names of the tensor arguments in order (lists flattened, None left out); a value may appear twice."""
    outputs: tuple[str, ...]
    phase: str
    """forward or backward."""
    kind: str
    """matmul, attention, conv, embedding, pointwise, reduction, view, factory, other: which price formula applies."""
    rules: int
    """Index into `OpGraph.rule_tables`."""
    flops: tuple[int, int]
    """Multiply and add counted apart: (fixed, per_row) FLOPs of the whole op."""
    equation: str = ""
    """Einsum text for contractions, "bsd,fd->bsf"; empty otherwise."""
    scope: str = ""
    """Module path inside the piece, `self_attn.q_proj`."""
    source: str = ""
    """`file.py:line` of the model code it came from."""


@dataclass(frozen=True)
class Call:
    """A repeated module called from the outer graph; its forward and its backward are two steps."""

    name: str
    block: str
    """Name of the block class."""
    instance: int
    """Index into `ModelGraph.instances`."""
    phase: str
    inputs: tuple[str, ...]
    """forward: outer values for the class's `inputs`. backward: outer values for its `tangents`."""
    outputs: tuple[str, ...]
    """forward: outer names of the class's `outputs`. backward: of its `input_grads`, those that exist, in order."""


@dataclass(frozen=True)
class OpGraph:
    """A joint forward and backward graph: steps in execution order, all forward steps first."""

    name: str
    """`outer`, or the class name of the block (`LlamaDecoderLayer`, with `#2` for a second shape of it)."""
    values: dict[str, Value]
    steps: tuple[Op | Call, ...]
    params: dict[str, str]
    """Local parameter name (FQN inside the piece) → value name. A tied parameter appears once, by its first name."""
    buffers: dict[str, str]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    tangents: tuple[str, ...]
    """One for each output that is differentiated, in output order."""
    tangent_of: tuple[int, ...]
    """Which output each tangent belongs to."""
    input_grads: tuple[str | None, ...]
    """One for each input; None where the input needs no gradient."""
    param_grads: dict[str, str | None]
    """Local parameter name → value name of its gradient; None when frozen."""
    rule_tables: tuple[tuple[Rule, ...], ...] = ()
    aliases: dict[str, str] = field(default_factory=dict)
    """View-of relation for memory: value → the value whose storage it shares."""
    causal: bool = False
    """Whether its self-attention looks back only, so that half of the query-key pairs need no work."""
    window: int = 0
    """Keys that one query of its self-attention sees, in `windowed` of its calls; 0: all."""
    windowed: int = 0
    slots: int = 0
    """Rows that each expert has for a row of the batch (see `graph/capacity.py`); 0: those of the tokens that chose
    it."""

    @cached_property
    def ops(self) -> tuple[Op, ...]:
        return tuple(step for step in self.steps if isinstance(step, Op))

    @cached_property
    def calls(self) -> tuple[Call, ...]:
        return tuple(step for step in self.steps if isinstance(step, Call))

    @cached_property
    def producer(self) -> dict[str, Op | Call]:
        return {out: step for step in self.steps for out in step.outputs}

    @cached_property
    def _by_name(self) -> dict[str, Op | Call]:
        return {step.name: step for step in self.steps}

    def step(self, name: str) -> Op | Call:
        """The step of that name."""
        return self._by_name[name]

    def rules_of(self, op: Op) -> tuple[Rule, ...]:
        return self.rule_tables[op.rules]

    def storage(self, value: str) -> str:
        """The value that owns the memory of `value` (itself, unless it is a view)."""
        while value in self.aliases:
            value = self.aliases[value]
        return value

    @cached_property
    def routed(self) -> frozenset[str]:
        """Rows of experts and what goes with them: how they are cut is decided where they are routed, and nothing can
        turn one cut into another (see capture/expert_rules.py)."""
        return routed(self.ops, self.values)

    @cached_property
    def by_expert(self) -> frozenset[str]:
        """Values whose dim 0 counts experts: weights, their gradients, rows of each expert."""
        return by_expert(self.ops, self.values)

    @cached_property
    def saved(self) -> tuple[str, ...]:
        """Forward values (inputs and op results, not parameters or buffers) that a backward op of this graph reads."""
        made = {out for step in self.steps if step.phase == "forward" for out in step.outputs} | set(self.inputs)
        read = [v for step in self.steps if step.phase == "backward" for v in step.inputs if v in made]
        return tuple(dict.fromkeys(read))


@dataclass(frozen=True)
class Param:
    """A parameter of the model under its FQN."""

    fqn: str
    shape: tuple[int, ...]
    dtype: str
    """Dtype in which the model uses it (the recipe's compute dtype); stored in the recipe's master dtype."""
    trainable: bool
    aliases: tuple[str, ...] = ()
    """Further FQNs of the same tensor (tied weights)."""


@dataclass(frozen=True)
class Input:
    """One tensor leaf of the batch, in the order of the flattened call."""

    name: str
    """Path of the leaf in the batch, `input_ids`."""
    fixed: tuple[int, ...]
    per_row: tuple[int, ...]
    dtype: str


ADDS_UP = ("sum", "sum_over_count")
"""Reductions by which the losses of micro-batches are added."""


@dataclass(frozen=True)
class Targets:
    """A tensor of labels, of which those other than -100 count."""

    leaf: str
    """Name of the input, `labels`."""
    skipped: int = 0
    """Labels at the start of the last dim that are no targets: 1 where the next token is predicted."""


@dataclass(frozen=True)
class ModelGraph:
    """The noun of this room; what the search half knows about a model."""

    name: str
    """Class name of the model, `LlamaForCausalLM`."""
    outer: OpGraph
    blocks: dict[str, OpGraph]
    instances: tuple[tuple[str, str], ...]
    """(block class, FQN prefix) of each called module, in call order: ("LlamaDecoderLayer", "model.layers.0")."""
    params: dict[str, Param]
    inputs: tuple[Input, ...]
    loss_reduction: str
    """What the loss of a batch is, in terms of those of equal micro-batches (proved by capture/loss.py).
    `sum_over_count`: loss = Σ tokens / num_items given as an input, adds up over micro-batches exactly.
    `sum`: a sum over rows; adds up too. `mean`: a mean over rows; micro-batches are averaged.
    `mean_over_targets`: a mean over the valid targets of `targets`; averaged, once all have equally many.
    `whole`: none of these is proved; only one micro-batch is right."""
    recipe: str
    """bf16, bf16_grads, fp8, fp32 or fp64."""
    limits: dict[str, int] = field(default_factory=dict)
    """Named sizes of the config that bound a degree: num_attention_heads, num_key_value_heads, vocab_size, …"""
    rows: int = 0
    """Rows at which the facts were read (any even number; sizes are affine, so another count needs no new capture)."""
    assumed: tuple[str, ...] = ()
    """What a config file leaves to its class: `vocab_size = 262208`; information only."""
    targets: Targets | None = None
    """Of a loss that is `mean_over_targets`."""
    traced: ModelGraph | None = None
    """What was captured, of a graph whose experts were given a capacity."""

    @property
    def adds_up(self) -> bool:
        """Whether losses of micro-batches are added, not averaged."""
        return self.loss_reduction in ADDS_UP

    @property
    def num_params(self) -> int:
        """Elements of all parameters, each tied tensor once."""
        return sum(_prod(p.shape) for p in self.params.values())

    def pieces(self) -> Iterator[tuple[OpGraph, int]]:
        """Each graph with the number of times it runs in one micro-batch: the outer graph once, a block once a call."""
        yield self.outer, 1
        for name, block in self.blocks.items():
            yield block, sum(1 for cls, _ in self.instances if cls == name)

    def fqns(self, block: str, local: str) -> tuple[str, ...]:
        """The FQNs that a block's local parameter name stands for, one for each instance, in call order."""
        return tuple(f"{prefix}.{local}" for cls, prefix in self.instances if cls == block)


def _prod(shape: tuple[int, ...]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count
