"""Dropout: the same masks under every plan, and the gradients that plain autograd has under those masks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from transformers import GPT2Config, GPT2LMHeadModel, T5Config, T5ForConditionalGeneration

import hpsearch
from tests.end_to_end.models import VOCAB
from tests.end_to_end.ranks import RankPool
from tests.end_to_end.slow import slow_devices

ROWS, TOKENS, STEPS = 8, 12, 3
PLANS: tuple[tuple[int, dict[str, Any]], ...] = (
    (1, {}),
    (1, {"micro_batches": 4, "recompute": "full"}),
    (4, {"dp_shard": 4}),
    (4, {"tp": 2, "dp_replicate": 2, "micro_batches": 2}),
    (2, {"tp": 2, "recompute": "full"}),
    (2, {"pp": 2, "micro_batches": 4}),
)


def gpt2() -> nn.Module:
    return GPT2LMHeadModel(GPT2Config(n_embd=48, n_layer=2, n_head=4, n_positions=32, vocab_size=VOCAB))


def t5() -> nn.Module:
    return T5ForConditionalGeneration(
        T5Config(d_model=48, d_kv=12, d_ff=96, num_layers=2, num_heads=4, vocab_size=VOCAB, decoder_start_token_id=0)
    )


MODELS: dict[str, Callable[[], nn.Module]] = {"gpt2": gpt2, "t5": t5}


def apart(found: torch.Tensor, expected: torch.Tensor) -> float:
    return ((found - expected).abs().max() / expected.abs().max()).item()


def case(family: str) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    model = MODELS[family]().double()
    tokens = torch.randint(VOCAB, (ROWS, TOKENS))
    return model, {"input_ids": tokens, "labels": tokens}


def train(family: str, fix: dict[str, Any]) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses, and the parameters at the end (on rank 0)."""
    model, batch = case(family)
    devices = dist.get_world_size() if dist.is_initialized() else 1
    parallel = hpsearch.compile(model, slow_devices(devices), recipe="fp64", fix=fix, example=batch, seed=5)
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=1e-3)
    losses = []
    for _ in range(STEPS):
        losses.append(parallel.step(batch).item())
        parallel.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
    return losses, parallel.state_dict(full=True)


@pytest.mark.dist
@pytest.mark.parametrize("family", MODELS)
def test_training_is_the_same_under_every_plan(ranks: RankPool, family: str) -> None:
    plans = PLANS if family == "gpt2" else PLANS[:4]
    found = [ranks.run(f"{__name__}:train", ranks=n, family=family, fix=fix)[0] for n, fix in plans]
    losses, parameters = found[0]
    for other_losses, other in found[1:]:
        torch.testing.assert_close(torch.tensor(other_losses), torch.tensor(losses), rtol=5e-7, atol=0)
        for name, value in parameters.items():
            assert apart(other[name], value) <= 1e-8, name


def recorded(family: str) -> tuple[float, dict[str, torch.Tensor], list[torch.Tensor]]:
    """Loss, gradients and the masks of one step on one device, in the order of the forward."""
    model, batch = case(family)
    parallel = hpsearch.compile(model, slow_devices(1), recipe="fp64", fix={"micro_batches": 1}, example=batch)
    bound = parallel._receive(batch)[0].bound
    plain, masks = bound.functions["dropout"], []

    def dropout(*args: Any) -> Any:
        made = plain(*args)
        masks.append(made[1])
        return made

    bound.functions["dropout"] = dropout
    loss = parallel.step(batch).item()
    return loss, {name: p.grad.full_tensor() for name, p in parallel.named_parameters()}, masks


@contextmanager
def masked_by(masks: list[torch.Tensor]) -> Iterator[None]:
    left = iter(masks)

    def dropout(x: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
        return x * next(left) / (1 - p) if training and p else x

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(F, "dropout", dropout)
        yield
    assert next(left, None) is None, "the program dropped more than the model does"


@pytest.mark.dist
def test_the_gradients_are_those_of_the_plain_model_under_these_masks(ranks: RankPool) -> None:
    loss, gradients, masks = ranks.run(f"{__name__}:recorded", ranks=1, family="gpt2")[0]
    model, batch = case("gpt2")
    model.set_attn_implementation("eager")
    with masked_by(masks):
        expected = model(**batch).loss
    expected.backward()
    assert loss == pytest.approx(expected.item(), rel=5e-7)
    for name, parameter in model.named_parameters():
        assert apart(gradients[name], parameter.grad) <= 1e-7, name
