"""Attention is split by whole heads: tp must divide every head count of the model.

Head counts have two sources: fields of the config (`ModelGraph.limits`, by the names that users write), and, for any
model, the head dim of the queries and keys of its attention operations.
"""

from __future__ import annotations

from math import gcd

from hpsearch.errors import LegalityError
from hpsearch.graph import ModelGraph

HEAD_FIELDS = (
    "num_attention_heads", "num_key_value_heads", "num_heads", "n_head", "encoder_attention_heads",
    "decoder_attention_heads",
)  # fmt: skip
"""Config fields that count heads, nested ones behind a prefix (`text_config.num_attention_heads`)."""
_HEAD_DIM = 1
"""Attention operations take [rows, heads, sequence, head size]."""


def head_counts(model: ModelGraph) -> dict[str, int]:
    """Head counts by the name a message gives them; one name for each number, config fields first."""
    found: dict[str, int] = {}
    for field in HEAD_FIELDS:
        for name, count in model.limits.items():
            if name.rpartition(".")[2] == field and count > 0 and count not in found.values():
                found[name] = count
    for graph, _ in model.pieces():
        for op in graph.ops:
            if op.kind != "attention" or op.phase != "forward":
                continue
            for argument, value in zip(("query", "key"), op.inputs, strict=False):
                shape = graph.values[value].fixed
                if len(shape) == 4 and shape[_HEAD_DIM] > 0 and shape[_HEAD_DIM] not in found.values():
                    found[f"{argument} heads of the attention at {op.source or op.scope or op.name}"] = shape[_HEAD_DIM]
    return found


def is_legal_tp(model: ModelGraph, tp: int) -> bool:
    return all(count % tp == 0 for count in head_counts(model).values())


def legal_tp(model: ModelGraph) -> list[int]:
    """Every degree that divides all head counts; empty for a model without heads, which bounds nothing."""
    common = gcd(*head_counts(model).values())
    return [t for t in range(1, common + 1) if common % t == 0]


def check_degree(model: ModelGraph, tp: int) -> None:
    """Raises LegalityError naming each head count that tp does not divide, and the legal set."""
    wrong = {name: count for name, count in head_counts(model).items() if count % tp}
    if wrong:
        expected = " and ".join(f"{name} = {count}" for name, count in wrong.items())
        found = " and ".join(f"{count} % {tp} = {count % tp}" for count in wrong.values())
        raise LegalityError(
            f"tp={tp}",
            f"expected a divisor of {expected}, but {found}",
            f"Legal tp for {model.name}: {legal_tp(model)}.",
        )
