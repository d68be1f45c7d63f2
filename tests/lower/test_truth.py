"""Loss and every gradient of the program equal those of the plain model, fp64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from plans import make_plan
from simulate import run_ranks
from torch import Tensor, nn

from hpsearch.capture import CapturedGraph, capture
from hpsearch.layout import Layout, Mesh, Placement
from hpsearch.lower import ParallelProgram, lower

TOLERANCE = 1e-10


def cut(tensor: Tensor, layout: Layout, mesh: Mesh, rank: int) -> Tensor:
    """What `rank` holds of a global tensor: torch.chunk in split order, spelled independently of the program."""
    coordinate = mesh.coordinate(rank)
    for axis, placement in layout:
        size = mesh.size(axis)
        pieces = list(tensor.chunk(size, placement.dim))
        empty = tensor.narrow(placement.dim, 0, 0)
        tensor = (pieces + [empty] * size)[coordinate[axis]]
    return tensor.contiguous()


def check(
    model: nn.Module, batches: list[dict[str, Tensor]], captured: CapturedGraph, program: ParallelProgram
) -> float:
    """Largest relative error of loss and gradients over all ranks, for one step over `batches`."""
    share = 1.0 if program.loss_reduction == "sum_over_count" else 1.0 / len(batches)
    model.zero_grad()
    loss = torch.zeros((), dtype=torch.float64)
    for batch in batches:
        part = model(**batch)
        part = (part if isinstance(part, Tensor) else part.loss) * share
        part.backward()
        loss += part.detach()
    state = dict(model.named_parameters(remove_duplicate=False))
    buffers = dict(model.named_buffers())
    slots = {slot.fqn: slot for slot in program.params}

    def work(rank: int, bound: Any) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        params = {n: cut(state[n].detach(), s.stored, program.mesh, rank) for n, s in slots.items()}
        micro = [
            [
                cut(t, s.layout, program.mesh, rank)
                for t, s in zip(captured.batch.flatten(b), program.inputs, strict=True)
            ]
            for b in batches
        ]
        alone = bound.forward(params, buffers, micro[0])
        total, grads = bound.step(params, buffers, micro)
        return alone, total, grads

    worst = 0.0
    for rank, (alone, total, grads) in enumerate(run_ranks(program, work)):
        if len(batches) == 1:
            worst = max(worst, error(alone, loss))
        worst = max(worst, error(total, loss))
        assert set(grads) == {n for n, s in slots.items() if s.trainable}
        for name, grad in grads.items():
            whole = state[name].grad
            wanted = cut(
                torch.zeros_like(state[name]) if whole is None else whole, slots[name].stored, program.mesh, rank
            )
            assert grad.shape == wanted.shape, name
            scale = 1.0 if whole is None else float(whole.abs().max()) or 1.0
            worst = max(worst, float((grad - wanted).abs().max()) / scale if grad.numel() else 0.0)
    return worst


def error(a: Tensor, b: Tensor) -> float:
    return float((a - b).abs().max() / b.abs().max())


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


def fsdp(*axes: str) -> Any:
    """Stored like used, and dim 0 cut over `axes` besides."""

    def stored(fqn: str, shape: tuple[int, ...], used: Layout) -> Layout:
        found = dict(used)
        return Layout(tuple((a, Placement.parse("S0") if a in axes else found[a]) for a in ("dp_replicate", "tp", "dp_shard") if a in axes or a in found))  # fmt: skip

    return stored


@pytest.fixture(scope="module")
def small_llama() -> tuple[nn.Module, CapturedGraph]:
    model = llama()
    return model, capture(model, tokens(8), recipe="fp64")


PLANS: dict[str, tuple[Mesh, dict[str, Any]]] = {
    "single": (Mesh.of(), {}),
    "ddp-2": (Mesh.of(dp_replicate=2), {"reduce": "step"}),
    "fsdp-4": (Mesh.of(dp_shard=4), {"stored": fsdp("dp_shard")}),
    "fsdp-4-step": (Mesh.of(dp_shard=4), {"stored": fsdp("dp_shard"), "residency": "step", "reduce": "step"}),
    "fsdp-4-recompute": (
        Mesh.of(dp_shard=4),
        {"stored": fsdp("dp_shard"), "recompute": {"LlamaDecoderLayer": "full"}},
    ),
    "hsdp-2x2": (Mesh.of(dp_replicate=2, dp_shard=2), {"stored": fsdp("dp_shard")}),
}


@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("name", list(PLANS))
def test_data_parallel_llama(small_llama: tuple[nn.Module, CapturedGraph], name: str, micro_batches: int) -> None:
    model, captured = small_llama
    mesh, choices = PLANS[name]
    plan = make_plan(captured.graph, mesh, 8, micro_batches=micro_batches, **choices)
    program = lower(captured, plan)
    assert check(model, [tokens(8, i, micro_batches) for i in range(micro_batches)], captured, program) <= TOLERANCE
