"""What the model computes. No torch."""

from hpsearch.graph.model_graph import ITEM_BYTES, Call, Input, ModelGraph, Op, OpGraph, Param, Rule, Value

__all__ = ["ITEM_BYTES", "Call", "Input", "ModelGraph", "Op", "OpGraph", "Param", "Rule", "Value"]
