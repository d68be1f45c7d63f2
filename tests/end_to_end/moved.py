"""What ranks do in the tests of checkpoints that move between plans: a mixture of experts of four blocks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

import hpsearch
from hpsearch.plan import Plan
from hpsearch.run import ParallelModule
from tests.end_to_end.models import OTHERS, VOCAB, Case, _tokens, build

FAMILY = "mixtral_deep"
STEPS = 2
RATE = 1e-2


def mixtral_deep() -> Case:
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        hidden_size=32, intermediate_size=48, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
        num_hidden_layers=4, num_local_experts=4, num_experts_per_tok=2, vocab_size=VOCAB, pad_token_id=0,
        bos_token_id=1, eos_token_id=2, max_position_embeddings=64, experts_implementation="eager",
    )  # fmt: skip
    return Case(MixtralForCausalLM(config), _tokens())


OTHERS[FAMILY] = mixtral_deep


def _parallel(plan: bytes) -> tuple[ParallelModule, Any]:
    case = build(FAMILY, torch.float64)
    parallel = hpsearch.compile(case.model, plan=Plan.from_bytes(plan), recipe="fp64")
    return parallel, parallel.local_rows(case.batch)


def saved(plan: bytes, folder: Path) -> tuple[float, float]:
    """Losses of the two steps that follow STEPS of AdamW and a checkpoint."""
    parallel, rows = _parallel(plan)
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=RATE)
    for _ in range(STEPS):
        parallel.step(rows)
        optimizer.step()
        optimizer.zero_grad()
    parallel.save(folder, optimizer)
    return _two_steps(parallel, optimizer, rows)


def loaded(plan: bytes, folder: Path) -> tuple[float, float]:
    """Losses of the two steps that follow a checkpoint: the second needs the optimizer's states as well."""
    parallel, rows = _parallel(plan)
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=0.5)
    parallel.load(folder, optimizer)
    return _two_steps(parallel, optimizer, rows)


def _two_steps(parallel: ParallelModule, optimizer: torch.optim.Optimizer, rows: Any) -> tuple[float, float]:
    first = parallel.step(rows).item()
    optimizer.step()
    optimizer.zero_grad()
    return first, parallel.step(rows).item()
