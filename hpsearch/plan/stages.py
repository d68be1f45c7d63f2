"""A pipeline's stages, each as a model of its own: what it computes, what it takes from its neighbours and gives them.

Values travel from stage to stage, forward and back; one that is needed further on is handed through. The outer graph of
a stage has the received values among its inputs and the received gradients among its tangents, under the names they
have in the whole graph, so decisions about a step are the same wherever it stands.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from hpsearch.errors import LegalityError
from hpsearch.graph import Call, Input, ModelGraph, Op, OpGraph, Value
from hpsearch.plan.placing import Placing, place


@dataclass(frozen=True)
class Stage:
    index: int
    graph: ModelGraph
    """The stage alone. Inputs: leaves of the batch, then `takes`."""
    leaves: tuple[str, ...]
    """Names of the batch's tensors that it reads."""
    takes: tuple[str, ...]
    """Values from the stage before, in forward."""
    gives: tuple[str, ...]
    """Values for the stage behind, in forward."""
    takes_back: tuple[str, ...]
    """Values from the stage behind, in backward."""
    gives_back: tuple[str, ...]
    """Values for the stage before, in backward."""
    loss: str | None
    """Name of the loss, on the stage that makes it."""
    shared: tuple[str, ...]
    """Parameters that other stages have as well; their gradients are added up once a step."""
    instances: tuple[int, ...]
    """Index in the whole model of each of its calls."""


def split(model: ModelGraph, cut: tuple[int, ...]) -> tuple[Stage, ...]:
    """The stages of `model` with `cut` calls of blocks on each, in order.

    Raises LegalityError for a cut that leaves a stage without a block, or that the model's wiring does not allow.
    """
    check_cut(model, cut)
    placing = place(model.outer, cut)
    ways = _Ways(placing)
    return tuple(_stage(model, placing, ways, index) for index in range(len(cut)))


def check_cut(model: ModelGraph, cut: tuple[int, ...]) -> None:
    calls = sum(1 for call in model.outer.calls if call.phase == "forward")
    if calls < len(cut):
        raise LegalityError(
            f"{len(cut)} stages of {model.name}",
            f"expected at least as many repeated blocks as stages, but found {calls}",
            f"Choose pp x vpp of at most {calls}." if calls else "A model without repeated blocks has no stages.",
        )
    if min(cut) < 1 or sum(cut) != calls:
        raise LegalityError(
            f"cut {'+'.join(map(str, cut))}",
            f"expected {len(cut)} numbers of at least 1 that add up to the {calls} blocks of {model.name}",
            f"For example {'+'.join(map(str, even(calls, len(cut))))}.",
        )


def even(calls: int, stages: int) -> tuple[int, ...]:
    """`calls` dealt out to `stages`, the first ones getting what is left over."""
    return tuple(calls // stages + (stage < calls % stages) for stage in range(stages))


class _Ways:
    """Which values cross each border, forward and back: border b is between stages b and b + 1."""

    def __init__(self, placing: Placing) -> None:
        self.placing, self.outer = placing, placing.outer
        self.steps = {stage: self._steps(stage) for stage in range(placing.stages)}
        """Names of the steps of each stage, copies among them."""
        self.ahead: list[set[str]] = [set() for _ in range(placing.stages - 1)]
        self.back: list[set[str]] = [set() for _ in range(placing.stages - 1)]
        self.forward_made = {out for step in self.outer.steps if step.phase == "forward" for out in step.outputs}
        for stage, names in self.steps.items():
            for step in self.outer.steps:
                if step.name in names:
                    for value in step.inputs:
                        self._travels(value, stage, step.phase)
        self.grads = {stage: self._grads(stage) for stage in range(placing.stages)}

    def _steps(self, stage: int) -> set[str]:
        """Steps placed here, and those of the copied ones that they follow from."""
        names = {name for name, at in self.placing.stage_of.items() if at == stage}
        for step in reversed(self.outer.steps):
            if step.name in names:
                makers = (self.outer.producer.get(value) for value in step.inputs)
                names.update(maker.name for maker in makers if maker and maker.name in self.placing.copied)
        return names

    def _travels(self, value: str, stage: int, phase: str) -> None:
        home = self.placing.home.get(value, stage)
        if home < stage:
            if value not in self.forward_made:
                raise LegalityError(
                    f"value {value}",
                    f"backward of stage {stage} needs it, but only stage {home} makes it",
                    "Cut elsewhere.",
                )
            for border in range(home, stage):
                self.ahead[border].add(value)
        elif home > stage:
            if phase == "forward":
                raise LegalityError(
                    f"value {value}",
                    f"forward of stage {stage} needs it, but only stage {home} makes it",
                    "Cut elsewhere.",
                )
            for border in range(stage, home):
                self.back[border].add(value)

    def _grads(self, stage: int) -> dict[str, tuple[str, ...]]:
        """Parameter → the gradients (addends of one) that end on this stage; frozen ones without."""
        found: dict[str, tuple[str, ...]] = {}
        for local, value in self.outer.params.items():
            homes = self.placing.homes(value)
            grad = self.outer.param_grads.get(local)
            addends = self.placing.addends.get(local, () if grad is None else (grad,))
            mine = []
            for addend in addends:
                at = self.placing.home.get(addend, homes[-1] if homes else 0)
                goal = at if at in homes or not homes else max((h for h in homes if h < at), default=homes[0])
                if goal == stage:
                    self._travels(addend, stage, "backward")
                    mine.append(addend)
            if mine or stage in homes:
                found[local] = tuple(mine)
        return found


def _stage(model: ModelGraph, placing: Placing, ways: _Ways, index: int) -> Stage:
    outer, last = model.outer, placing.stages - 1
    position = {name: i for i, name in enumerate(outer.values)}

    def ordered(values: Iterable[str]) -> tuple[str, ...]:
        return tuple(sorted(values, key=position.__getitem__))

    takes = ordered(ways.ahead[index - 1]) if index else ()
    gives = ordered(ways.ahead[index]) if index < last else ()
    takes_back = ordered(ways.back[index]) if index < last else ()
    gives_back = ordered(ways.back[index - 1]) if index else ()
    loss = outer.outputs[outer.tangent_of[0]]
    here = placing.home[loss] == index
    steps, instances = _steps(model, ways.steps[index])
    steps, grads = _with_sums(outer, placing, steps, ways.grads[index])
    read = {value for step in steps for value in step.inputs}
    leaves = tuple(value for value in outer.inputs if value in read)
    own_tangents = tuple(t for t in outer.tangents if here and t in read)
    ends = ((*leaves, *takes), (*takes_back, *own_tangents))
    values = _values(outer, steps, grads, *ends)
    graph = replace(
        outer,
        values=values,
        steps=steps,
        params={local: outer.params[local] for local in grads},
        buffers={local: value for local, value in outer.buffers.items() if value in read},
        inputs=ends[0],
        outputs=(*gives, *((loss,) if here else ())),
        tangents=ends[1],
        tangent_of=(),
        input_grads=(None,) * len(ends[0]),
        param_grads=grads,
        aliases=_aliases(outer, values, (*takes, *takes_back)),
    )
    names = tuple(_leaf(model)[value] for value in leaves)
    return Stage(
        index, _model(model, graph, instances, takes), names, takes, gives, takes_back, gives_back,
        loss if here else None, _shared(placing, outer, index), instances,
    )  # fmt: skip


def _steps(model: ModelGraph, names: set[str]) -> tuple[tuple[Op | Call, ...], tuple[int, ...]]:
    """The steps of those names, calls numbered anew, and the old numbers."""
    found = [step for step in model.outer.steps if step.name in names]
    instances = sorted({step.instance for step in found if isinstance(step, Call)})
    renumbered = [
        replace(step, instance=instances.index(step.instance)) if isinstance(step, Call) else step for step in found
    ]
    return tuple(renumbered), tuple(instances)


def _with_sums(
    outer: OpGraph, placing: Placing, steps: tuple[Op | Call, ...], grads: Mapping[str, tuple[str, ...]]
) -> tuple[tuple[Op | Call, ...], dict[str, str | None]]:
    """The steps with additions for parameters that have several gradients here, and one gradient a parameter.

    The additions are those of the traced graph, with other operands: of k gradients on n stages, k - n remain.
    """
    added: list[Op | Call] = []
    ends: dict[str, str | None] = {}
    for local, mine in grads.items():
        total = mine[0] if mine else None
        free = [outer.step(name) for name in placing.joins.get(local, ())]
        used = sum(1 for value in placing.addends.get(local, ()) if mine and _earlier(placing, value, mine[0]))
        for join, value in zip(free[used:], mine[1:], strict=False):
            assert isinstance(join, Op)
            added.append(replace(join, inputs=(total or "", value)))
            total = join.outputs[0]
        ends[local] = total
    return (*steps, *added), ends


def _earlier(placing: Placing, value: str, mine: str) -> bool:
    """Whether `value` is a gradient of an earlier stage than `mine`, which uses fewer additions than gradients."""
    return placing.home[value] < placing.home[mine]


def _values(
    outer: OpGraph,
    steps: Iterable[Op | Call],
    grads: Mapping[str, str | None],
    inputs: tuple[str, ...],
    tangents: tuple[str, ...],
) -> dict[str, Value]:
    names = {outer.params[local] for local in grads} | {*inputs, *tangents}
    for step in steps:
        names |= {*step.inputs, *step.outputs}
    found: dict[str, Value] = {}
    for name, value in outer.values.items():
        if name in names:
            role = "input" if name in inputs else "tangent" if name in tangents else value.role
            found[name] = value if value.role == role else replace(value, role=role)
    return found


def _aliases(outer: OpGraph, values: Mapping[str, Value], received: tuple[str, ...]) -> dict[str, str]:
    """Views of what is on this stage; what was received owns its memory."""
    return {view: of for view, of in outer.aliases.items() if view in values and of in values and view not in received}


def _leaf(model: ModelGraph) -> Mapping[str, str]:
    return {value: leaf.name for value, leaf in zip(model.outer.inputs, model.inputs, strict=True)}


def _model(model: ModelGraph, outer: OpGraph, instances: tuple[int, ...], takes: tuple[str, ...]) -> ModelGraph:
    """The stage's outer graph with the blocks, parameters and inputs it needs."""
    called = tuple(model.instances[i] for i in instances)
    names = {name for name, _ in called}
    own = {*outer.params, *(f"{prefix}.{local}" for name, prefix in called for local in model.blocks[name].params)}
    first = {alias: fqn for fqn, param in model.params.items() for alias in (fqn, *param.aliases)}
    kept = {first[name] for name in own}
    leaves = dict(zip(model.outer.inputs, model.inputs, strict=True))
    inputs = tuple(
        leaves[name] if name not in takes else Input(name, v.fixed, v.per_row, v.dtype)
        for name, v in ((name, outer.values[name]) for name in outer.inputs)
    )
    return replace(
        model,
        outer=outer,
        blocks={name: block for name, block in model.blocks.items() if name in names},
        instances=called,
        params={fqn: param for fqn, param in model.params.items() if fqn in kept},
        inputs=inputs,
    )


def _shared(placing: Placing, outer: OpGraph, index: int) -> tuple[str, ...]:
    """Parameters of the outer graph that stand on this stage and on another."""
    found = []
    for local, value in outer.params.items():
        homes = placing.homes(value)
        if len(homes) > 1 and index in homes:
            found.append(local)
    return tuple(found)
