"""One process: planning without a launcher, one device, evaluation, dropout."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

import hpsearch
from tests.end_to_end.models import build
from tests.end_to_end.test_parity import slow_devices


@pytest.fixture(autouse=True)
def _no_group_is_left():  # type: ignore[no-untyped-def]
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


class Dropping(nn.Module):
    """Linear layers with dropout between them, and a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.5), nn.Linear(16, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).square().mean()


def test_outside_a_launcher_one_reads_plan_and_program_and_is_told_how_to_run() -> None:
    case = build("llama", torch.float32)
    parallel = hpsearch.compile(case.model, slow_devices(4), recipe="fp32", example=case.batch)
    assert parallel.plan.mesh.num_ranks == 4
    assert "def " in parallel.program.code
    with pytest.raises(hpsearch.LaunchError, match=r"needs 4 ranks.*torchrun --nproc-per-node 4"):
        parallel.step(case.batch)


def test_a_plan_for_one_device_does_not_stand_in_the_way_of_the_next() -> None:
    case = build("llama", torch.float32)
    hpsearch.compile(case.model, slow_devices(1), recipe="fp32", example=case.batch).step(case.batch)
    parallel = hpsearch.compile(case.model, slow_devices(4), recipe="fp32", example=case.batch)
    with pytest.raises(hpsearch.LaunchError, match=r"needs 4 ranks.*torchrun --nproc-per-node 4"):
        parallel.step(case.batch)


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE=2 is set as by a launcher, but not RANK, MASTER_ADDR, MASTER_PORT"),
        ({"WORLD_SIZE": "1", "RANK": "0", "MASTER_PORT": "1"}, "WORLD_SIZE=1 is set .* but not MASTER_ADDR"),
        ({"WORLD_SIZE": "2", "RANK": "2", "MASTER_ADDR": "::1", "MASTER_PORT": "1"}, "RANK from 0 .* found 2 of 2"),
        ({"WORLD_SIZE": "x", "RANK": "0", "MASTER_ADDR": "::1", "MASTER_PORT": "1"}, "RANK from 0 .* found 0 of x"),
    ],
)
def test_half_a_launcher_is_refused_before_anything_waits(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], message: str
) -> None:
    for name in ("WORLD_SIZE", "RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(hpsearch.LaunchError, match=message):
        hpsearch.compile(nn.Linear(2, 2), slow_devices(1), recipe="fp32", example=(torch.zeros(2, 2),))


def test_nothing_is_known_before_the_first_batch() -> None:
    parallel = hpsearch.compile(build("llama", torch.float32).model, slow_devices(1), recipe="fp32")
    with pytest.raises(hpsearch.BatchError, match=r"parallel.prepare\(global_batch\)"):
        _ = parallel.plan


def test_the_first_batch_has_the_rows_that_were_announced() -> None:
    case = build("llama", torch.float32)
    with pytest.raises(hpsearch.BatchError, match="expected the global batch of 16 rows, but found 12"):
        hpsearch.compile(case.model, slow_devices(1), recipe="fp32", global_batch=16, example=case.batch)


def test_one_device_is_the_plain_model_bit_for_bit() -> None:
    case = build("llama", torch.float32)
    parallel = hpsearch.compile(case.model, slow_devices(1), recipe="fp32")
    loss = parallel(**case.batch)
    loss.backward()
    expected = case.model(**case.batch).loss
    expected.backward()
    assert parallel.plan.mesh.axes == ()
    assert parallel.plan.file.collectives == ()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    for name, parameter in case.model.named_parameters():
        torch.testing.assert_close(parallel.get_parameter(name).grad.full_tensor(), parameter.grad, rtol=0, atol=1e-8)


def test_gradients_add_up_and_a_loss_is_differentiated_once() -> None:
    case = build("llama", torch.float64)
    parallel = hpsearch.compile(case.model, slow_devices(1), recipe="fp64")
    parallel.step(case.batch)
    once = {n: p.grad.full_tensor().clone() for n, p in parallel.named_parameters()}
    loss = parallel(**case.batch)
    (2 * loss).backward(retain_graph=True)
    for name, parameter in parallel.named_parameters():
        torch.testing.assert_close(parameter.grad.full_tensor(), 3 * once[name])
    with pytest.raises(RuntimeError, match="differentiated once"):
        loss.backward()
    loss = parallel(**case.batch)
    with torch.no_grad():
        next(parallel.parameters()).mul_(2)
    with pytest.raises(RuntimeError, match="changed between forward and backward"):
        loss.backward()


def test_evaluation_turns_dropout_off_and_leaves_everything_else() -> None:
    torch.manual_seed(0)
    model, x = Dropping().double(), torch.randn(6, 8).double()
    parallel = hpsearch.compile(model, slow_devices(1), recipe="fp64")
    first, second = parallel.step(x).item(), parallel.step(x).item()
    assert first != second
    parallel.eval()
    with torch.no_grad():
        found = parallel(x)
    assert not found.requires_grad
    assert model.training
    assert found.item() == pytest.approx(model.eval()(x).item(), rel=1e-12)
    parallel.train()
    assert parallel.step(x).item() != found.item()


def test_a_plan_for_another_model_or_cluster_is_refused() -> None:
    case = build("llama", torch.float32)
    plan = hpsearch.compile(case.model, slow_devices(1), recipe="fp32", example=case.batch).plan
    other = build("qwen2", torch.float32)
    with pytest.raises(hpsearch.PlanError, match="another model"):
        hpsearch.compile(other.model, plan=plan, recipe="fp32", example=other.batch)
    with pytest.raises(hpsearch.PlanError, match="another cluster"):
        hpsearch.compile(case.model, slow_devices(2), plan=plan, recipe="fp32", example=case.batch)
