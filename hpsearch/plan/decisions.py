"""What a plan decides about each value of a graph, read back from its text: layouts made, layouts read.

Search writes a plan's placements; lowering, traffic and workspace all read them through this one view.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from hpsearch.errors import PlanError
from hpsearch.graph import Call, ModelGraph, Op, OpGraph
from hpsearch.layout import Layout, Placement
from hpsearch.plan.schema import PlanFile
from hpsearch.plan.stages import Stage


@dataclass(frozen=True)
class Read:
    """One argument of one step: the value, the layout in which the step wants it."""

    value: str
    layout: Layout


@dataclass(frozen=True)
class GraphDecisions:
    """Layouts of one graph under a plan."""

    graph: OpGraph
    axes: tuple[str, ...]
    """Split order."""
    placements: dict[str, dict[str, str]]
    blocks: dict[str, GraphDecisions]

    def _sides(self, name: str, axis: str, arity: int, results: int) -> tuple[list[str], list[str]]:
        text = self.placements.get(name, {}).get(axis)
        if text is None:
            return ["R"] * arity, ["R"] * results
        left, _, right = text.partition("->")
        inputs = left.split(",") if left else []
        outputs = right.split(",") if right else []
        if len(inputs) != arity or len(outputs) != results:
            raise PlanError(
                f"placements of {self.graph.name}.{name}, axis {axis}",
                f"expected {arity} inputs and {results} outputs, but {text!r} has {len(inputs)} and {len(outputs)}",
                "The plan was made for another graph; search again.",
            )
        return inputs, outputs

    def _layouts(self, columns: list[tuple[list[str], list[str]]], side: int, index: int) -> Layout:
        pairs = zip(self.axes, columns, strict=True)
        return Layout(tuple((axis, Placement.parse(column[side][index])) for axis, column in pairs))

    def _columns(self, name: str, arity: int, results: int) -> list[tuple[list[str], list[str]]]:
        return [self._sides(name, axis, arity, results) for axis in self.axes]

    def reads(self, step: Op | Call) -> tuple[Read, ...]:
        """The layouts in which a step wants its inputs; a call wants those of its block's entries."""
        if isinstance(step, Call):
            block = self.blocks[step.block]
            entries = block.graph.inputs if step.phase == "forward" else block.graph.tangents
            wanted = [block.made[entry] for entry in entries]
        else:
            columns = self._columns(step.name, len(step.inputs), len(step.outputs))
            wanted = [self._layouts(columns, 0, i) for i in range(len(step.inputs))]
        return tuple(Read(value, layout) for value, layout in zip(step.inputs, wanted, strict=True))

    @cached_property
    def made(self) -> dict[str, Layout]:
        """The layout in which each value arrives or is made."""
        found: dict[str, Layout] = {}
        for name, value in self.graph.values.items():
            if value.role != "op":
                found[name] = self._layouts(self._columns(name, 0, 1), 1, 0)
        for step in self.graph.steps:
            if isinstance(step, Call):
                block = self.blocks[step.block]
                given = block.graph.outputs if step.phase == "forward" else _existing(block.graph.input_grads)
                found.update((out, block.made[name]) for out, name in zip(step.outputs, given, strict=True))
            else:
                columns = self._columns(step.name, len(step.inputs), len(step.outputs))
                found.update((out, self._layouts(columns, 1, i)) for i, out in enumerate(step.outputs))
        return found

    def copies(self) -> Iterator[tuple[str, str, Layout]]:
        """(value, phase, layout) of every redistributed copy: one for each distinct layout a phase wants."""
        seen: set[tuple[str, str, Layout]] = set()
        for step in self.graph.steps:
            for read in self.reads(step):
                copy = (read.value, step.phase, read.layout)
                if read.layout != self.made[read.value] and copy not in seen:
                    seen.add(copy)
                    yield copy


def _existing(names: tuple[str | None, ...]) -> list[str]:
    return [name for name in names if name is not None]


def decisions_of(file: PlanFile, model: ModelGraph) -> dict[str, GraphDecisions]:
    """The decisions of every graph of `model`, by graph name."""
    axes = tuple(axis.name for axis in file.mesh)
    blocks = {
        name: GraphDecisions(block, axes, file.placements.get(name, {}), {}) for name, block in model.blocks.items()
    }
    outer = GraphDecisions(model.outer, axes, file.placements.get(model.outer.name, {}), blocks)
    return blocks | {model.outer.name: outer}


def stage_decisions(file: PlanFile, model: ModelGraph, stage: Stage) -> dict[str, GraphDecisions]:
    """The decisions of every graph of one stage: those of the whole model; what arrives is as its maker leaves it."""
    whole = decisions_of(file, model)
    outer = whole[model.outer.name]
    placements = dict(outer.placements)
    for name in (*stage.takes, *stage.takes_back):
        placements[name] = {axis: f"->{outer.made[name][axis]}" for axis in outer.axes}
    blocks = {name: whole[name] for name in stage.graph.blocks}
    return blocks | {model.outer.name: GraphDecisions(stage.graph.outer, outer.axes, placements, blocks)}
