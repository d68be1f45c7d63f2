"""Loss curves of one small model on real text under each recipe: the same first weights, the same rows."""

from __future__ import annotations

from pydoc_data.topics import topics
from typing import Any

import torch

import hpsearch
from hpsearch.capture import capture
from hpsearch.search import search
from tests.end_to_end.slow import slow_devices
from tests.lower.test_fp8 import eight_bits

ROWS, LENGTH = 8, 64


def text() -> torch.Tensor:
    """Python's own manual as bytes, without what is not ASCII; 0.5 million."""
    whole = "\n\n".join(topics[name] for name in sorted(topics))
    return torch.tensor(list(whole.encode("ascii", "ignore")), dtype=torch.int64)


def rows_of(manual: torch.Tensor, step: int) -> dict[str, Any]:
    """Rows of a step, from places that follow from its number."""
    generator = torch.Generator().manual_seed(step)
    starts = torch.randint(0, len(manual) - LENGTH, (ROWS,), generator=generator)
    ids = torch.stack([manual[start : start + LENGTH] for start in starts.tolist()])
    return {"input_ids": ids, "labels": ids.clone(), "use_cache": False}


def model(width: int = 64, layers: int = 3) -> torch.nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=128, hidden_size=width, intermediate_size=3 * width, num_hidden_layers=layers,
                         num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=LENGTH,
                         pad_token_id=0)  # fmt: skip
    return LlamaForCausalLM(config)


def curve(recipe: str, steps: int, width: int = 64, layers: int = 3, micro_batches: int = 2) -> list[float]:
    """Loss of each step; AdamW, masters in fp32."""
    manual, plain = text(), model(width, layers)
    first = rows_of(manual, 0)
    graph = capture(plain, first, recipe=recipe, rows=2).graph
    cluster = eight_bits(slow_devices(1))
    plan = search(graph, cluster, global_batch=ROWS, fix={"micro_batches": micro_batches, "recompute": "none"})
    parallel = hpsearch.compile(plain, plan=plan, recipe=recipe).prepare(first)
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=3e-3)
    losses = []
    for step in range(steps):
        losses.append(parallel.step(parallel.local_rows(rows_of(manual, step))).item())
        parallel.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
    return losses


def furthest(losses: list[float], others: list[float], window: int) -> float:
    """The largest relative difference between means over `window` steps."""
    means = [[sum(one[i : i + window]) / window for i in range(0, len(one), window)] for one in (losses, others)]
    return max(abs(a - b) / b for a, b in zip(*means, strict=True))
