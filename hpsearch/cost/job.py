"""What is trained: rows of a step, how they are cut in micro-batches, precision, optimizer, recompute."""

from __future__ import annotations

from dataclasses import dataclass

from hpsearch.errors import LegalityError
from hpsearch.layout import Mesh


@dataclass(frozen=True)
class Recipe:
    """Which dtype each kind of tensor has. `fp8`: products of `graph.scaled` are in 8 bits, all else is as in bf16."""

    name: str
    compute: str
    """Parameters at the op, activations, their gradients, and what travels between activations."""
    master: str
    """Stored parameters and optimizer state."""
    reduce: str
    """Gradients when they are summed over ranks or micro-batches."""


RECIPES = {
    "bf16": Recipe("bf16", "bfloat16", "float32", "float32"),
    "bf16_grads": Recipe("bf16_grads", "bfloat16", "float32", "bfloat16"),
    "fp8": Recipe("fp8", "bfloat16", "float32", "float32"),
    "fp32": Recipe("fp32", "float32", "float32", "float32"),
    "fp64": Recipe("fp64", "float64", "float64", "float64"),
}

OPTIMIZER_STATES = {"adamw": 2, "adam": 2, "sgd": 0, "momentum": 1}
"""Tensors of the parameter's size that an optimizer keeps, in the master dtype."""


def recipe_of(name: str) -> Recipe:
    if name not in RECIPES:
        raise LegalityError(f"recipe {name!r}", f"expected one of {', '.join(RECIPES)}", "Choose one of them.")
    return RECIPES[name]


def optimizer_states(name: str) -> int:
    if name not in OPTIMIZER_STATES:
        known = ", ".join(OPTIMIZER_STATES)
        raise LegalityError(f"optimizer {name!r}", f"expected one of {known}", "Choose the one with as many states.")
    return OPTIMIZER_STATES[name]


@dataclass(frozen=True)
class Job:
    global_batch: int
    micro_batches: int
    recipe: Recipe
    optimizer: str
    recompute: frozenset[str] = frozenset()
    """Block classes whose forward runs again in backward."""
    offload: frozenset[str] = frozenset()
    """Block classes whose kept activations wait in host memory."""
    states_on_host: bool = False
    """Whether optimizer states rest in host memory and visit the device for the update."""
    pipelined: bool = False
    """Whether other micro-batches run between the forward and the backward of one."""

    def micro_rows(self) -> int:
        """Rows of one micro-batch over all ranks."""
        return self.global_batch // self.micro_batches

    def local_rows(self, mesh: Mesh) -> int:
        """Rows of one micro-batch on one data rank."""
        return self.micro_rows() // mesh.num_data_ranks

    def runs(self, graph: str, phase: str) -> int:
        """How often one micro-batch executes a phase of a graph: a recomputed forward runs twice."""
        return 2 if phase == "forward" and graph in self.recompute else 1


def check_batch(global_batch: int, micro_batches: int, mesh: Mesh) -> None:
    """global_batch = rows a data rank and micro-batch x data ranks x micro-batches, all whole numbers."""
    ranks = mesh.num_data_ranks
    if global_batch % (micro_batches * ranks):
        legal = [m for m in range(1, global_batch // ranks + 1) if global_batch % (m * ranks) == 0] if ranks else []
        near = micro_batches * ranks
        above = -(-global_batch // near) * near
        raise LegalityError(
            f"global batch {global_batch}",
            f"expected a multiple of micro_batches x data ranks = {micro_batches} x {ranks} = {near}, "
            f"but {global_batch} % {near} = {global_batch % near}",
            f"Legal micro_batches on {ranks} data ranks: {legal or 'none'}; the next legal global batch is {above}.",
        )
