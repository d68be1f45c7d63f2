"""First values: the model's own initialisers, module by module, independent of everything but seed and name."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hpsearch.errors import CaptureError
from hpsearch.run.initial import fill
from tests.end_to_end.models import FAMILIES, ConvNet


def filled(model: nn.Module, seed: int = 0) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    fill(model, lambda name, value: found.update({name: value.clone()}), seed=seed, device=torch.device("cpu"))
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_a_meta_model_gets_the_spread_that_its_constructor_gives(family: str) -> None:
    with torch.device("meta"):
        model = FAMILIES[family]().model
    found, again, other = filled(model), filled(model), filled(model, seed=1)
    torch.manual_seed(0)
    real = FAMILIES[family]().model
    expected = dict(real.named_parameters()) | dict(real.named_buffers())
    assert set(found) == set(expected)
    assert all(torch.equal(found[name], again[name]) for name in found)
    assert any(not torch.equal(found[name], other[name]) for name in found)
    assert all(tensor.is_meta for tensor in model.parameters())
    for name, value in expected.items():
        value = value.detach().double()
        spread, got = value.std(correction=0).item(), found[name].double().std(correction=0).item()
        # Two samples of n numbers: their spreads differ by 1/sqrt(n) of themselves, one standard deviation.
        assert got == pytest.approx(spread, rel=5 / value.numel() ** 0.5, abs=1e-9), name
        if spread == 0:
            assert torch.equal(found[name], value.to(found[name].dtype)), name
    for name, buffer in real.named_buffers():
        assert torch.equal(found[name], buffer), name


def test_only_a_few_tensors_are_real_at_a_time() -> None:
    with torch.device("meta"):
        model = FAMILIES["llama"]().model
    most = 0

    class Counting(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            nonlocal most
            result = func(*args, **(kwargs or {}))
            if (
                isinstance(result, torch.Tensor)
                and result.device.type == "cpu"
                and "fake" not in str(type(result)).lower()
            ):
                most = max(most, result.numel())
            return result

    total = sum(p.numel() for p in model.parameters())
    with Counting():
        fill(model, lambda name, value: None, seed=0, device=torch.device("cpu"))
    assert 0 < most < total / 4


def test_a_real_model_is_read_and_a_half_real_one_keeps_its_real_half() -> None:
    model = ConvNet()
    head = model.head.weight.detach().clone()
    found = filled(model)
    assert torch.equal(found["head.weight"], head)
    model.stem.to("meta")
    found = filled(model)
    assert torch.equal(found["head.weight"], head)
    assert torch.equal(model.head.weight, head)
    assert not found["stem.weight"].is_meta


def test_a_tensor_without_initialiser_is_named() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(3))

    with torch.device("meta"):
        model = Odd()
    with pytest.raises(CaptureError, match=r"none writes scale.*reset_parameters"):
        filled(model)


def test_the_random_state_of_the_process_is_left_alone() -> None:
    with torch.device("meta"):
        model = ConvNet()
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    filled(model)
    assert torch.equal(torch.rand(1), expected)
