"""The public attention that programs use off CPU equals the kernel that they use on CPU."""

from __future__ import annotations

import pytest
import torch

from hpsearch.lower import attention as room


@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("masked", [False, True])
def test_the_public_path_equals_the_cpu_kernel(kv_heads: int, masked: bool) -> None:
    torch.manual_seed(0)
    q, grad = torch.randn(2, 4, 8, 6, dtype=torch.float64), torch.randn(2, 4, 8, 6, dtype=torch.float64)
    k, v = (torch.randn(2, kv_heads, 8, 6, dtype=torch.float64) for _ in range(2))
    mask = torch.randn(2, 1, 8, 8, dtype=torch.float64) if masked else None
    out, lse = room.attention(q, k, v, 0.0, not masked, attn_mask=mask, scale=0.3)
    grads = room.attention_backward(grad, q, k, v, out, lse, 0.0, not masked, attn_mask=mask, scale=0.3)

    torch.testing.assert_close(room._public(q, k, v, not masked, mask, 0.3), out, rtol=1e-12, atol=1e-12)
    public = room.public_backward(grad, q, k, v, not masked, mask, 0.3)
    for expected, found in zip(grads, public, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
