"""Small models that compute in the dtype they are given, so that fp64 parity is exact to rounding."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Block(nn.Module):
    """Pre-norm attention with fewer key heads than query heads, and a gated MLP."""

    def __init__(self, width: int, heads: int, kv_heads: int, inner: int, bias: bool) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, width // heads
        self.norm1 = nn.LayerNorm(width)
        self.q = nn.Linear(width, width, bias=bias)
        self.k = nn.Linear(width, kv_heads * self.head_dim, bias=False)  # its bias has no gradient but noise
        self.v = nn.Linear(width, kv_heads * self.head_dim, bias=bias)
        self.o = nn.Linear(width, width, bias=bias)
        self.norm2 = nn.LayerNorm(width)
        self.gate = nn.Linear(width, inner, bias=bias)
        self.up = nn.Linear(width, inner, bias=bias)
        self.down = nn.Linear(inner, width, bias=bias)

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        b, s, _ = x.shape
        y = self.norm1(x) * scale
        q = self.q(y).view(b, s, self.heads, self.head_dim).transpose(1, 2)
        k = self.k(y).view(b, s, self.kv_heads, self.head_dim).transpose(1, 2)
        v = self.v(y).view(b, s, self.kv_heads, self.head_dim).transpose(1, 2)
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.o(a.transpose(1, 2).reshape(b, s, -1))
        z = self.norm2(x)
        return x + self.down(F.silu(self.gate(z)) * self.up(z))


class Transformer(nn.Module):
    """Embedding, blocks, norm, head, mean cross-entropy. `scale` is a value that all blocks share, made from a buffer
    and a parameter of the outer graph."""

    def __init__(self, depth: int = 2, width: int = 32, tied: bool = False, bias: bool = True, vocab: int = 64) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.embed = nn.Embedding(vocab, width)
        self.gain = nn.Parameter(torch.rand(width) + 0.5)
        self.register_buffer("base", torch.rand(width) + 0.5)
        self.blocks = nn.ModuleList(Block(width, 4, 2, 48, bias) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        self.double()

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        x = self.embed(ids)
        scale = self.gain * self.base
        for block in self.blocks:
            x = block(x, scale)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def batch(rows: int, seed: int = 0, seq: int = 8, vocab: int = 64) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "ids": torch.randint(0, vocab, (rows, seq), generator=generator),
        "targets": torch.randint(0, vocab, (rows, seq), generator=generator),
    }
