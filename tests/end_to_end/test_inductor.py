"""Regional compilation: the same step, each class of block compiled once whatever the depth."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers import GPT2Config, GPT2LMHeadModel

import hpsearch
from tests.end_to_end.models import VOCAB
from tests.end_to_end.ranks import RankPool
from tests.end_to_end.slow import slow_devices

ROWS, TOKENS = 4, 12


def step(layers: int, fix: dict[str, Any], ranks: int, inductor: bool) -> Any:
    """Loss, gradients, and seconds of compilation by function."""
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(n_embd=48, n_layer=layers, n_head=4, n_positions=32, vocab_size=VOCAB))
    tokens = torch.randint(VOCAB, (ROWS, TOKENS))
    batch = {"input_ids": tokens, "labels": tokens}
    cluster = slow_devices(ranks)
    parallel = hpsearch.compile(model, cluster, recipe="fp32", fix=fix, example=batch, inductor=inductor)
    loss = parallel.step(batch).item()
    return loss, {name: p.grad.full_tensor() for name, p in parallel.named_parameters()}, parallel.compile_s


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.outer(F.dropout(self.inner(x).relu(), 0.3, self.training)).square().mean()


def small(inductor: bool) -> tuple[list[float], torch.Tensor, dict[str, float]]:
    torch.manual_seed(0)
    x = torch.randn(ROWS, 8)
    parallel = hpsearch.compile(Small(), slow_devices(1), recipe="fp32", example=(x,), inductor=inductor)
    losses = [parallel.step((x,)).item() for _ in range(3)]
    return losses, parallel.inner.weight.grad.full_tensor(), parallel.compile_s


@pytest.mark.slow
@pytest.mark.dist
def test_one_device_with_dropout_compiles_once_for_all_steps(ranks: RankPool) -> None:
    (losses, gradient, seconds), (plain_losses, plain, nothing) = (
        ranks.run(f"{__name__}:small", ranks=1, timeout_s=240, inductor=inductor)[0] for inductor in (True, False)
    )
    assert losses == pytest.approx(plain_losses, rel=1e-5)
    assert len(set(losses)) == 3
    assert (gradient - plain).abs().max() <= 1e-4 * plain.abs().max()
    assert not nothing
    assert {name.partition("_")[0] for name in seconds} == {"outer"}


@pytest.mark.exhaustive
@pytest.mark.timeout(1200)
@pytest.mark.dist
def test_a_compiled_step_is_the_step_and_blocks_are_compiled_once(ranks: RankPool) -> None:
    told = {"ranks": 2, "fix": {"tp": 2, "micro_batches": 2}}
    compiled, slowly = {}, {"ranks": 2, "timeout_s": 500}
    for layers in (2, 3):
        loss, gradients, compiled[layers] = ranks.run(f"{__name__}:go", told=told | {"layers": layers}, **slowly)[0]
        plain_loss, plain, nothing = ranks.run(
            f"{__name__}:go", told=told | {"layers": layers}, **slowly, inductor=False
        )[0]
        assert not nothing
        assert loss == pytest.approx(plain_loss, rel=1e-5)
        for name, value in plain.items():
            assert (gradients[name] - value).abs().max() <= 1e-4 * value.abs().max(), name
    assert compiled[2].keys() == compiled[3].keys()
    assert sum(name.endswith("_forward") for name in compiled[2]) == 3, "the block, and what stands before and behind"
    assert all(seconds > 0 for seconds in compiled[2].values())


def go(told: dict[str, Any], inductor: bool = True) -> Any:
    return step(**told, inductor=inductor)


def test_without_a_compiler_it_is_refused_before_anything_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(hpsearch.LoweringError, match=r"expected a C\+\+ compiler on the path"):
        step(2, {}, 1, inductor=True)
