from __future__ import annotations

import pytest
import torch

from hpsearch.lower.local_ops import cut, extent, join, mask, pad, split, trim


@pytest.mark.parametrize("dim", [0, 1, 2, 3])
def test_split_is_contiguous_and_join_undoes_it(dim: int) -> None:
    for x in (torch.randn(4, 6, 8, 2), torch.randn(4, 8, 2, 6).permute(0, 3, 1, 2)):
        there = split(x, dim, 2)
        assert there.is_contiguous()
        assert torch.equal(torch.stack(x.tensor_split(2, dim)).reshape(there.shape), there)
        assert torch.equal(join(there, dim, 2), x)


@pytest.mark.parametrize("length", range(9))
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_cut_is_torch_chunk(length: int, size: int) -> None:
    x = torch.arange(length * 2.0).view(2, length)
    pieces = [cut(x, 1, i, size) for i in range(size)]
    assert torch.equal(torch.cat(pieces, 1), x)
    for i, chunk in enumerate(x.chunk(size, 1) if length else ()):
        assert torch.equal(pieces[i], chunk)
    for i in range(size):
        assert extent({"a": i}, length, {"a": size}) == pieces[i].shape[1]


def test_extent_of_nested_cuts() -> None:
    for length in range(12):
        total = sum(extent({"a": i, "b": j}, length, {"a": 3, "b": 2}) for i in range(3) for j in range(2))
        assert total == length


def test_pad_and_trim() -> None:
    x = torch.randn(3, 2).t()
    padded = pad(x, 1, 5)
    assert padded.is_contiguous()
    assert torch.equal(trim(padded, 1, 3), x)
    assert padded[:, 3:].abs().sum() == 0
    assert pad(x, 1, 3).is_contiguous()


def test_mask() -> None:
    x = torch.randn(3)
    assert torch.equal(mask(x, 0) + mask(x, 1) + mask(x, 2), x)
