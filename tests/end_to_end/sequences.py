"""Small models with attention of every kind that cuts of the sequence meet: two heads of keys for eight of queries."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tests.end_to_end import parity, pipelined
from tests.end_to_end.models import OTHERS, VOCAB, Case

ROWS, LENGTH = 4, 16
_SIZES = {
    "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 4,
    "num_hidden_layers": 2, "vocab_size": VOCAB, "max_position_embeddings": 64, "pad_token_id": 0,
}  # fmt: skip


def _batch(**more: Any) -> dict[str, Any]:
    ids = torch.randint(1, VOCAB, (ROWS, LENGTH), generator=torch.Generator().manual_seed(1))
    labels = ids.clone()
    labels[0, :3] = labels[2, 9:] = -100
    return {"input_ids": ids, "labels": labels, "use_cache": False, **more}


def causal() -> Case:
    from transformers import LlamaConfig, LlamaForCausalLM

    return Case(LlamaForCausalLM(LlamaConfig(**_SIZES)), _batch())


def window() -> Case:
    from transformers import MistralConfig, MistralForCausalLM

    return Case(MistralForCausalLM(MistralConfig(**_SIZES, sliding_window=5)), _batch())


def packed() -> Case:
    """Several documents in each row, other ones in each: positions begin anew, and the mask is block-diagonal.

    transformers would build that mask from the positions, by looking at their values, which no capture can.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    lengths = ((5, 11), (16,), (3, 4, 9), (8, 8))
    positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in lengths])
    document = torch.stack([torch.repeat_interleave(torch.arange(len(row)), torch.tensor(row)) for row in lengths])
    seen = (document[:, :, None] == document[:, None, :]) & torch.ones(LENGTH, LENGTH).tril().bool()
    more = {"attention_mask": seen[:, None], "position_ids": positions}
    return Case(LlamaForCausalLM(LlamaConfig(**_SIZES)), _batch(**more))


def mixed_windows() -> Case:
    """Layers with a window and one without."""
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    config = Gemma3TextConfig(**_SIZES | {"num_hidden_layers": 6}, sliding_window=5, query_pre_attn_scalar=4)
    return Case(Gemma3ForCausalLM(config), _batch())


def by_products() -> Case:
    """Attention written as products, with a softmax between them."""
    from transformers import LlamaConfig, LlamaForCausalLM

    return Case(LlamaForCausalLM(LlamaConfig(**_SIZES, attn_implementation="eager")), _batch())


ATTENTIONS: dict[str, Callable[[], Case]] = {
    f.__name__: f for f in (causal, window, packed, mixed_windows, by_products)
}
OTHERS.update(ATTENTIONS)
parity.DOUBLED.add("mixed_windows")


def compare(family: str, recipe: str, plan: bytes, path: str) -> dict[str, float]:
    """`parity.compare` for the families above."""
    return parity.compare(family, recipe, plan, path)


def compare_stages(family: str, recipe: str, plan: bytes, path: str) -> dict[str, float]:
    """`pipelined.compare` of one plan for the families above."""
    ((errors, _),) = pipelined.compare(family, recipe, [plan], path)
    return errors
