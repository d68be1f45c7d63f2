"""LoRA as peft writes it: around a frozen linear, two small trainable ones whose product is added to its result."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn


class LoraLinear(nn.Module):
    """`base(x) + B(A(dropout(x))) * alpha / rank`, with peft's names."""

    def __init__(self, base: nn.Linear, rank: int, alpha: float) -> None:
        super().__init__()
        self.base_layer = base
        like = {"device": base.weight.device, "dtype": base.weight.dtype, "bias": False}
        self.lora_A = nn.ModuleDict({"default": nn.Linear(base.in_features, rank, **like)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(rank, base.out_features, **like)})
        self.scaling = alpha / rank
        self.base_layer.requires_grad_(False)
        with torch.no_grad():  # peft starts B at zero, where half of the gradients are zero
            nn.init.normal_(self.lora_A["default"].weight, std=1 / math.sqrt(base.in_features))
            nn.init.normal_(self.lora_B["default"].weight, std=0.05)

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x) + self.lora_B["default"](self.lora_A["default"](x)) * self.scaling


def adapted(model: nn.Module, targets: Iterable[str] = ("q_proj", "v_proj"), rank: int = 4) -> nn.Module:
    """`model` frozen, with adapters around the linears whose name ends in one of `targets`."""
    torch.manual_seed(3)
    model.requires_grad_(False)
    wanted = tuple(targets)
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.Linear) and name.rpartition(".")[2] in wanted:
            parent, _, last = name.rpartition(".")
            setattr(model.get_submodule(parent), last, LoraLinear(module, rank, alpha=8))
    return model
