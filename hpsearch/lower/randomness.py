"""Random numbers other than dropout's are refused: drawn on pieces they are others, and others again when forward runs
twice. Two ranks that hold the same piece would also need the same numbers, and two that hold different ones,
different. Dropout draws by place (`dropout`).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import fx

from hpsearch.errors import LoweringError
from hpsearch.graph import ModelGraph
from hpsearch.plan import Plan

_PROBABILITY = ("p", "dropout_p")
"""Arguments that say how often; at zero nothing is drawn."""


def refuse_random(model: ModelGraph, graphs: Mapping[str, fx.Graph], plan: Plan) -> None:
    """Raises LoweringError for an op that draws random numbers on several ranks, or in a forward that runs again."""
    again = {name for name, choice in plan.file.job.recompute.items() if choice == "full"}
    for graph, _ in model.pieces():
        if plan.num_ranks == 1 and graph.name not in again:
            continue
        sources = {op.name: op.source for op in graph.ops}
        for node in graphs[graph.name].nodes:
            if _draws(node):
                raise LoweringError(
                    f"{graph.name}.{node.name} ({node.target}, {sources.get(node.name) or 'source unknown'})",
                    "draws random numbers, which would be other ones under every layout and in every recomputation",
                    "Set its probability to 0, draw it outside the model, or train on one device without recompute.",
                )


def _draws(node: fx.Node) -> bool:
    if node.target is torch.ops.aten.native_dropout.default:
        return False
    if not isinstance(node.target, torch._ops.OpOverload) or torch.Tag.nondeterministic_seeded not in node.target.tags:
        return False
    for position, argument in enumerate(node.target._schema.arguments):
        if argument.name in _PROBABILITY:
            given = node.args[position] if position < len(node.args) else node.kwargs.get(argument.name)
            return bool(given != 0.0 and given is not None)
    return True
