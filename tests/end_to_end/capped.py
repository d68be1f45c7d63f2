"""Plain models whose experts drop tokens, in loops: what programs of plans with a capacity are held to."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from fractions import Fraction
from math import ceil
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from tests.end_to_end import parity
from tests.end_to_end.models import LENGTH


def kept(index: Tensor, num_experts: int, factor: str) -> Tensor:
    """Whether each pair [T, k] of a token and an expert is kept: of every sequence the first ones of each expert."""
    slots = ceil(Fraction(factor) * LENGTH * index.shape[1] / num_experts)
    found = torch.zeros(index.shape, dtype=torch.bool)
    taken: dict[tuple[int, int], int] = {}
    for token, chosen in enumerate(index.tolist()):
        for place, expert in enumerate(chosen):
            row = token // LENGTH, expert
            taken[row] = taken.get(row, 0) + 1
            found[token, place] = taken[row] <= slots
    return found


@contextmanager
def dropping(factor: str, dropped: list[int] | None = None) -> Iterator[None]:
    """While open, experts of transformers' models see none of the pairs beyond a capacity; `dropped` counts them.

    A pair that is dropped has the weight 0: it adds nothing to its token, and gives its expert no gradient.
    """
    from transformers.integrations import moe
    from transformers.models.llama4.modeling_llama4 import Llama4Router

    def note(keep: Tensor) -> Tensor:
        if dropped is not None:
            dropped.append(int((~keep).sum()))
        return keep

    def interface(_: str, plain: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def forward(module: Any, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
            keep = note(kept(index, module.num_experts, factor))
            return plain(module, hidden, index, weights * keep.to(weights.dtype))

        return forward

    scored = Llama4Router.forward

    def router(module: Any, hidden: Tensor) -> tuple[Tensor, Tensor]:
        scores, logits = scored(module, hidden)
        index = torch.topk(logits, module.top_k, dim=1).indices
        keep = note(kept(index, module.num_experts, factor))
        return scores * torch.zeros_like(scores).scatter(1, index, keep.to(scores.dtype)), logits

    with (
        patch.object(moe.ALL_EXPERTS_FUNCTIONS, "get_interface", interface),
        patch.object(Llama4Router, "forward", router),
    ):
        yield


def reference(family: str, recipe: str, factor: str, path: Path) -> int:
    """The trace of the plain model that drops, written to `path`; returns how many pairs it dropped in all."""
    dropped: list[int] = []
    with dropping(factor, dropped):
        parity.reference(family, recipe, path)
    return sum(dropped)
