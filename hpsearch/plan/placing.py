"""Which stage of a pipeline each step of the outer graph belongs to, once the calls are dealt out.

Calls stand where the plan's cut puts them; every other step follows its data. Forward: as early as its operands allow;
a step that reads only parameters and the batch (an embedding) goes to its first reader. What follows from the batch
alone (masks, rotary tables), and views of parameters, are made on every stage that reads them instead of being sent.
Backward: as soon as its gradients are there, on a stage that has the forward values and the parameter it reads.
A parameter of several stages (an embedding tied to a head) has one gradient on each of them: the addition that joins
them in the traced graph is left out, since their sum is made once a step, and not in every micro-batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from hpsearch.errors import LegalityError
from hpsearch.graph import Call, Op, OpGraph

ADD = "aten.add.Tensor"


@dataclass
class Placing:
    """Where each step and value of the outer graph is."""

    outer: OpGraph
    stages: int
    stage_of: dict[str, int] = field(default_factory=dict)
    """Step → stage; steps that are copied are not in it."""
    copied: set[str] = field(default_factory=set)
    """Steps that run on every stage that reads them."""
    home: dict[str, int] = field(default_factory=dict)
    """Value → the stage that makes it; parameters, buffers, the batch and what is copied have none."""
    addends: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Parameter of several stages → the gradients whose sum is its gradient, in order."""
    joins: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Parameter of several stages → the steps that add its gradients in the traced graph."""

    def homes(self, param: str) -> tuple[int, ...]:
        """Stages whose forward reads a parameter (by value name), in order."""
        return tuple(sorted(self._param_homes.get(param, ())))

    _param_homes: dict[str, set[int]] = field(default_factory=dict)


def place(outer: OpGraph, cut: tuple[int, ...]) -> Placing:
    """Places every step. `cut`: forward calls of each stage, in order; their sum is the number of calls.

    Raises LegalityError where a call would need what only a later stage makes.
    """
    work = _Work(outer, cut)
    work.forward()
    work.later()
    work.gradients_of_shared()
    work.backward()
    work.nearer()
    return work.placing


class _Work:
    def __init__(self, outer: OpGraph, cut: tuple[int, ...]) -> None:
        self.outer, self.placing = outer, Placing(outer, len(cut))
        instances = [c.instance for c in outer.calls if c.phase == "forward"]
        dealt = [stage for stage, count in enumerate(cut) for _ in range(count)]
        self.of_call = dict(zip(instances, dealt, strict=True))
        self.params = set(outer.params.values())
        self.rest = {n for n, v in outer.values.items() if v.role in ("input", "buffer")}
        """Values that are on every stage, with those that copied steps make."""
        self.readers: dict[str, list[Op | Call]] = {}
        for step in outer.steps:
            for value in step.inputs:
                self.readers.setdefault(value, []).append(step)
        self.made_in = {out: step.phase for step in outer.steps for out in step.outputs}
        self.skipped: set[str] = set()

    def put(self, step: Op | Call, stage: int) -> None:
        self.placing.stage_of[step.name] = stage
        self.placing.home.update((out, stage) for out in step.outputs)

    def copies(self, step: Op | Call) -> bool:
        """Whether a step without a stage follows from the batch alone, or is a view of a parameter."""
        if isinstance(step, Call):
            return False
        if all(value in self.rest for value in step.inputs):
            return True
        return all(out in self.outer.aliases and self.outer.storage(out) in self.params for out in step.outputs)

    def copy(self, step: Op) -> None:
        self.placing.copied.add(step.name)
        if all(value in self.rest for value in step.inputs):
            self.rest.update(step.outputs)

    def forward(self) -> None:
        waiting: list[Op | Call] = []
        for step in self.outer.steps:
            if step.phase != "forward":
                continue
            found = [self.placing.home[v] for v in step.inputs if v in self.placing.home]
            if isinstance(step, Call):
                stage = self.of_call[step.instance]
                if found and max(found) > stage:
                    raise _backwards(step, stage, max(found))
                self.put(step, stage)
            elif found:
                self.put(step, max(found))
            elif self.copies(step):
                self.copy(step)
            else:
                waiting.append(step)
        for step in reversed(waiting):
            self.put(step, self.first_reader(step))

    def later(self) -> None:
        """Forward steps move to their first reader where that sends fewer tensors, products and views also where it is
        as many: projections of an encoder's output stand where they are read, and the output itself travels."""
        of, home = self.placing.stage_of, self.placing.home
        for step in reversed(self.outer.steps):
            if step.phase != "forward" or isinstance(step, Call) or step.name not in of:
                continue
            here, readers = of[step.name], [r for out in step.outputs for r in self.readers.get(out, ())]
            wanted = min((of[r.name] for r in readers if r.phase == "forward" and r.name in of), default=here)
            if wanted > here and not set(step.outputs) & set(self.outer.outputs):
                operands = {v for v in step.inputs if home.get(v, wanted) < wanted}
                more = sum(not self.is_sent(v, wanted, step) for v in operands)
                if more < len(step.outputs) + (step.kind in ("view", "matmul")):
                    self.put(step, wanted)
        for step in self.outer.steps:
            if step.phase == "forward" and step.name in of:
                for value in step.inputs:
                    if (root := self.outer.storage(value)) in self.params:
                        self.placing._param_homes.setdefault(root, set()).add(of[step.name])

    def is_sent(self, value: str, stage: int, but: Op) -> bool:
        """Whether another forward step than `but` reads a value on `stage` or behind it."""
        of = self.placing.stage_of
        others = (r for r in self.readers.get(value, ()) if r.phase == "forward" and r.name != but.name)
        return any(of.get(r.name, -1) >= stage for r in others)

    def first_reader(self, step: Op | Call) -> int:
        """Of what only parameters and the batch lead to; the last stage for what forward does not read."""
        of = self.placing.stage_of
        found = [of[r.name] for out in step.outputs for r in self.readers.get(out, ()) if r.name in of]
        return min(found, default=self.placing.stages - 1)

    def gradients_of_shared(self) -> None:
        """Takes apart the sums that are the gradients of parameters of several stages."""
        for local, grad in self.outer.param_grads.items():
            if grad is None or len(self.placing.homes(self.outer.params[local])) < 2:
                continue
            joins: list[str] = []
            self.placing.addends[local] = tuple(self.summands(grad, joins))
            self.placing.joins[local] = tuple(joins)
            self.skipped.update(joins)

    def summands(self, value: str, joins: list[str]) -> Iterator[str]:
        step = self.outer.producer.get(value)
        alone = len(self.readers.get(value, ())) <= (1 if joins else 0)
        if isinstance(step, Op) and step.target == ADD and len(step.inputs) == 2 and alone:
            joins.append(step.name)
            for operand in step.inputs:
                yield from self.summands(operand, joins)
        else:
            yield value

    def backward(self) -> None:
        for tangent, of in zip(self.outer.tangents, self.outer.tangent_of, strict=True):
            self.placing.home[tangent] = self.placing.home[self.outer.outputs[of]]
        waiting: list[Op | Call] = []
        for step in self.outer.steps:
            if step.phase != "backward" or step.name in self.skipped:
                continue
            gradients, there = self.gradients_of(step), self.values_of(step)
            if isinstance(step, Call):
                stage = self.of_call[step.instance]
                if gradients and min(gradients) < stage:
                    raise _backwards(step, stage, min(gradients))
                self.put(step, stage)
            elif gradients:
                there = [where for where in there if where[0] <= min(gradients)] or there
                self.put(step, min([*gradients, *(where[-1] for where in there)]))
            elif there:
                self.put(step, max(where[0] for where in there))
            elif self.copies(step):
                self.copy(step)
            else:
                waiting.append(step)
        placed = self.placing.stage_of
        for step in reversed(waiting):
            found = [placed[r.name] for out in step.outputs for r in self.readers.get(out, ()) if r.name in placed]
            self.put(step, max(found, default=0))

    def gradients_of(self, step: Op | Call) -> list[int]:
        """Stages of the operands that backward makes."""
        home = self.placing.home
        return [home[v] for v in step.inputs if v in home and self.made_in.get(v) != "forward"]

    def values_of(self, step: Op | Call) -> list[tuple[int, int]]:
        """Of each operand of forward, and each parameter, the first stage and the last that forward has it on."""
        home = self.placing.home
        found: list[tuple[int, int]] = []
        for value in step.inputs:
            if value in home and self.made_in.get(value) == "forward":
                found.append((home[value], self.reach(value)))
            homes = self.placing.homes(self.outer.storage(value))
            if len(homes) == 1:
                found.append((homes[0], homes[0]))
        return found

    def reach(self, value: str) -> int:
        """The last stage on which forward reads a value, or where it is made."""
        of, made = self.placing.stage_of, self.placing.home[value]
        return max([made, *(of.get(r.name, made) for r in self.readers.get(value, ()) if r.phase == "forward")])

    def nearer(self) -> None:
        """Steps of one gradient alone move to the stage that reads them: what is sent is no more, and parameters'
        gradients end where the parameter is."""
        of = self.placing.stage_of
        for step in reversed(self.outer.steps):
            if step.phase != "backward" or isinstance(step, Call) or step.name not in of:
                continue
            gradients = self.gradients_of(step)
            if len(gradients) != 1 or self.values_of(step) or len(step.outputs) != 1:
                continue
            wanted = [of[r.name] for r in self.readers.get(step.outputs[0], ()) if r.name in of]
            wanted += self.wanted_by_parameter(step.outputs[0])
            if wanted and max(wanted) < of[step.name]:
                self.put(step, max(wanted))

    def wanted_by_parameter(self, value: str) -> list[int]:
        found = []
        for local, grad in self.outer.param_grads.items():
            homes = self.placing.homes(self.outer.params[local])
            if value == grad and local not in self.placing.addends and homes:
                found.append(homes[-1])
            elif value in self.placing.addends.get(local, ()):
                found.append(max((h for h in homes if h <= self.placing.home[value]), default=homes[0]))
        return found


def _backwards(step: Call, stage: int, needed: int) -> LegalityError:
    return LegalityError(
        f"stage {stage} of the pipeline",
        f"{step.name} ({step.block}, {step.phase}) stands on it, but needs what stage {needed} makes",
        "Cut between blocks in the order in which the model calls them.",
    )
