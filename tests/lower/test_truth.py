"""Loss and every gradient of the program equal those of the plain model, fp64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hpsearch.capture import CapturedGraph, capture
from hpsearch.layout import Mesh
from hpsearch.lower import lower
from tests.lower.plans import cut_at_rest, make_plan
from tests.lower.reference import compare


def llama(**changes: Any) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32, "use_cache": False,
    }  # fmt: skip
    return LlamaForCausalLM(LlamaConfig(**(sizes | changes))).double()


def tokens(rows: int, seed: int = 0, micro_batches: int = 1) -> dict[str, Tensor]:
    """One micro-batch with some targets masked; the count is of the whole step (7 targets a row, one masked)."""
    ids = torch.randint(0, 64, (rows, 8), generator=torch.Generator().manual_seed(seed))
    labels = ids.clone()
    labels[0, 3] = -100
    return {"input_ids": ids, "labels": labels, "num_items_in_batch": torch.tensor((rows * 7 - 1) * micro_batches)}


@pytest.fixture(scope="module")
def small_llama() -> tuple[nn.Module, CapturedGraph]:
    model = llama()
    return model, capture(model, tokens(8), recipe="fp64")


PLANS: dict[str, tuple[Mesh, dict[str, Any]]] = {
    "single": (Mesh.of(), {}),
    "ddp-2": (Mesh.of(dp_replicate=2), {"reduce": "step"}),
    "fsdp-4": (Mesh.of(dp_shard=4), {"stored": cut_at_rest("dp_shard")}),
    "fsdp-4-step": (Mesh.of(dp_shard=4), {"stored": cut_at_rest("dp_shard"), "residency": "step", "reduce": "step"}),
    "fsdp-4-recompute": (
        Mesh.of(dp_shard=4),
        {"stored": cut_at_rest("dp_shard"), "recompute": {"LlamaDecoderLayer": "full"}},
    ),
    "hsdp-2x2": (Mesh.of(dp_replicate=2, dp_shard=2), {"stored": cut_at_rest("dp_shard")}),
}


@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("name", list(PLANS))
def test_data_parallel_llama(small_llama: tuple[nn.Module, CapturedGraph], name: str, micro_batches: int) -> None:
    model, captured = small_llama
    mesh, choices = PLANS[name]
    plan = make_plan(captured.graph, mesh, 8, micro_batches=micro_batches, **choices)
    program = lower(captured, plan)
    batches = [tokens(8, i, micro_batches) for i in range(micro_batches)]
    found = compare(model, batches, captured, program)
    assert found.gradient <= 1e-10
    assert found.loss <= 1e-6  # transformers computes it in fp32
