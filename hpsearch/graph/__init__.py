"""What the model computes. No torch."""

from hpsearch.graph.capacity import slots_of, with_capacity
from hpsearch.graph.model_graph import (
    ADDS_UP,
    ITEM_BYTES,
    Call,
    Input,
    ModelGraph,
    Op,
    OpGraph,
    Param,
    Rule,
    Targets,
    Value,
)

__all__ = [
    "ADDS_UP", "ITEM_BYTES", "Call", "Input", "ModelGraph", "Op", "OpGraph", "Param", "Rule", "Targets", "Value",
    "slots_of", "with_capacity",
]  # fmt: skip
