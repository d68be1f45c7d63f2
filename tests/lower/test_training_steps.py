"""What a step may be made of: frozen parameters, uneven shards, several ways to run it, failures in the middle."""

from __future__ import annotations

import traceback
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hpsearch.capture import CapturedGraph, capture
from hpsearch.errors import LoweringError
from hpsearch.layout import Mesh
from hpsearch.lower import ParallelProgram, lower
from tests.lower.models import Transformer, batch
from tests.lower.plans import cut_at_rest, make_plan
from tests.lower.reference import compare, cut, plain_step
from tests.lower.simulate import run_ranks

ROWS = 6


def program_of(model: nn.Module, mesh: Mesh, **choices: Any) -> tuple[CapturedGraph, ParallelProgram]:
    graph = capture(model, batch(ROWS), recipe="fp64")
    return graph, lower(graph, make_plan(graph.graph, mesh, ROWS, **choices))


def held_by(rank: int, program: ParallelProgram, graph: CapturedGraph, model: nn.Module, rows: Any) -> tuple[Any, ...]:
    """(params, buffers, inputs) of one rank."""
    state = dict(model.named_parameters())
    params = {s.fqn: cut(state[s.fqn].detach(), s.stored, program.mesh, rank) for s in program.params}
    leaves = zip(graph.batch.flatten(rows), program.inputs, strict=True)
    return params, dict(model.named_buffers()), [cut(t, s.layout, program.mesh, rank) for t, s in leaves]


FROZEN = {
    "embedding": ["embed.weight"],
    "first block": ["embed.weight", "gain", "blocks.0."],
    "biases of all blocks": [".bias"],
    "head": ["head.weight", "norm."],
    "all but the last norm": ["embed", "gain", "blocks", "head"],
}


@pytest.mark.parametrize("what", list(FROZEN))
def test_frozen_parameters_get_no_gradient(what: str) -> None:
    model = Transformer()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not any(word in name for word in FROZEN[what]))
    graph, program = program_of(model, Mesh.of(dp_shard=2), stored=cut_at_rest("dp_shard"))
    assert any(not slot.trainable for slot in program.params)
    found = compare(model, [batch(ROWS)], graph, program)
    assert max(found.loss, found.gradient) <= 1e-10


@pytest.mark.parametrize("reduce", ["step", "micro_batch"])
def test_uneven_shards_over_three_ranks(reduce: str) -> None:
    """Width 32 over 3 ranks is 11 + 11 + 10; the second plan cuts biases of 2 heads' width into empty pieces too."""
    model = Transformer(depth=1, vocab=64)
    for mesh in (Mesh.of(dp_shard=3), Mesh.of(dp_shard=6)):
        graph, program = program_of(model, mesh, stored=cut_at_rest("dp_shard"), reduce=reduce)
        found = compare(model, [batch(ROWS)], graph, program)
        assert max(found.loss, found.gradient) <= 1e-10


def test_ways_to_run_a_step_agree() -> None:
    """step, and forward_train … backward … finish, with an evaluation between, give the same gradients."""
    model = Transformer(tied=True)
    graph, program = program_of(
        model, Mesh.of(dp_shard=2), stored=cut_at_rest("dp_shard"), residency="step", reduce="step", micro_batches=2
    )
    batches = [batch(ROWS, i) for i in range(2)]

    def work(rank: int, bound: Any) -> Any:
        params, buffers, first = held_by(rank, program, graph, model, batches[0])
        second = held_by(rank, program, graph, model, batches[1])[2]
        loss, grads = bound.step(params, buffers, [first, second])
        one, state_one = bound.forward_train(params, buffers, first)
        two, state_two = bound.forward_train(params, buffers, second)
        assert torch.equal(bound.forward(params, buffers, first), one)
        bound.backward(state_two, 0.5)
        bound.backward(state_one, torch.tensor(0.5))
        again = bound.finish()
        assert not bound._gathered
        return loss, grads, (one + two) / 2, again

    for loss, grads, mean, again in run_ranks(program, work):
        torch.testing.assert_close(loss, mean, rtol=1e-12, atol=0)
        assert list(grads) == list(again)
        for name, grad in grads.items():
            torch.testing.assert_close(grad, again[name], rtol=1e-12, atol=1e-14)


def test_parameters_may_change_between_steps() -> None:
    """What is gathered for a whole step is gathered anew in the next, after an evaluation too."""
    model = Transformer(depth=1)
    graph, program = program_of(model, Mesh.of(dp_shard=2), stored=cut_at_rest("dp_shard"), residency="step")

    def work(rank: int, bound: Any) -> list[Tensor]:
        params, buffers, inputs = held_by(rank, program, graph, model, batch(ROWS))
        losses = [bound.forward(params, buffers, inputs)]
        for _ in range(2):
            for p in params.values():
                p.mul_(0.9)
            losses.append(bound.step(params, buffers, [inputs])[0])
        return losses

    wanted = [plain_step(model, [batch(ROWS)], False)[0]]
    for _ in range(2):
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(0.9)
        wanted.append(plain_step(model, [batch(ROWS)], False)[0])
    model = Transformer(depth=1)
    for losses in run_ranks(program, work):
        torch.testing.assert_close(torch.stack(losses), torch.stack(wanted), rtol=1e-10, atol=0)


def test_gradients_are_memory_of_their_own() -> None:
    model = Transformer(depth=1)
    graph, program = program_of(model, Mesh.of())

    def work(rank: int, bound: Any) -> None:
        params, buffers, inputs = held_by(rank, program, graph, model, batch(ROWS))
        _, grads = bound.step(params, buffers, [inputs])
        before = {n: g.clone() for n, g in grads.items()}
        for n, g in grads.items():
            g.mul_(2)
            assert torch.equal(g, before[n] * 2)
        assert len({g.untyped_storage().data_ptr() for g in grads.values()}) == len(grads)

    run_ranks(program, work)


def test_a_failed_step_leaves_nothing_behind() -> None:
    model = Transformer(depth=1)
    graph, program = program_of(model, Mesh.of(), reduce="step", micro_batches=2)
    loss, wanted = plain_step(model, [batch(ROWS)], False)

    def work(rank: int, bound: Any) -> None:
        params, buffers, inputs = held_by(rank, program, graph, model, batch(ROWS))
        with pytest.raises(LoweringError, match="shape"):
            bound.step(params, buffers, [inputs, [t[:2] for t in inputs]])
        total, grads = bound.step(params, buffers, [inputs])
        torch.testing.assert_close(total, loss, rtol=1e-12, atol=0)
        for name, grad in grads.items():
            torch.testing.assert_close(grad, wanted[name], rtol=1e-10, atol=1e-13)

    run_ranks(program, work)


def test_an_uneven_activation_is_refused_by_name() -> None:
    model = Transformer(depth=1)
    graph = capture(model, batch(ROWS), recipe="fp64")
    with pytest.raises(LoweringError, match=r"dim 0 of shape \[6, 8\] must divide by dp_shard=4"):
        lower(graph, make_plan(graph.graph, Mesh.of(dp_shard=4), ROWS))


def test_tracebacks_show_the_line_of_the_program() -> None:
    model = Transformer(depth=1)
    graph, program = program_of(model, Mesh.of())

    def work(rank: int, bound: Any) -> None:
        params, buffers, inputs = held_by(rank, program, graph, model, batch(ROWS))
        params["head.weight"] = params["head.weight"][:, :5]
        try:
            bound.step(params, buffers, [inputs])
        except RuntimeError:
            assert ", head_weight)" in traceback.format_exc()
        else:
            pytest.fail("a parameter of the wrong shape went through")

    run_ranks(program, work)


class Shared(nn.Module):
    """Two blocks with one weight, which the outer graph reads too."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.first = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.blocks[2].weight = self.blocks[0].weight
        self.double()

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        x = self.first(ids)
        for block in self.blocks:
            x = torch.tanh(block(x))
        return (x - targets).square().mean() + self.blocks[0].weight.square().sum()


@pytest.mark.parametrize("mesh", [Mesh.of(), Mesh.of(dp_shard=2), Mesh.of(dp_replicate=2)], ids=str)
def test_shared_weights_sum_their_gradients(mesh: Mesh) -> None:
    model = Shared()
    rows = {"ids": torch.randn(4, 8).double(), "targets": torch.randn(4, 8).double()}
    graph = capture(model, rows, recipe="fp64")
    program = lower(
        graph, make_plan(graph.graph, mesh, 4, stored=cut_at_rest(*(a for a in mesh.names if a == "dp_shard")))
    )
    found = compare(model, [rows], graph, program)
    assert max(found.loss, found.gradient) <= 1e-10
