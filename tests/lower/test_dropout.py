"""Numbers for dropout: the generator's published answers, and masks that do not depend on who draws."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch

from hpsearch.lower.dropout import Draws, dropout, number_of, philox
from hpsearch.lower.local_ops import cut_rows

ANSWERS = (
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
)
"""https://github.com/DEShawResearch/random123/blob/main/tests/kat_vectors, philox4x32 with 10 rounds."""


@pytest.mark.parametrize(("counter", "key", "answer"), ANSWERS)
def test_the_generator_gives_its_published_answers(
    counter: tuple[int, ...], key: tuple[int, int], answer: tuple[int, ...]
) -> None:
    words = [torch.tensor(word) for word in (*counter, *key)]
    assert tuple(int(word) for word in philox(words[:4], (words[4], words[5]))) == answer


OP = number_of("op")


def one(seed: int = 0, step: int = 0, block: str = "") -> Draws:
    """One rank that takes the batch at once."""
    draws = Draws({}, {}, 1, 1)
    draws.at(seed, step, 0, block)
    return draws


def one_of(axes: dict[str, tuple[int, int]], data_ranks: int, micro_batch: int, micro_batches: int) -> Draws:
    """One of several ranks; `axes`: place and size."""
    places, sizes = ({name: pair[i] for name, pair in axes.items()} for i in (0, 1))
    draws = Draws(places, sizes, data_ranks, micro_batches)
    draws.at(0, 0, micro_batch, "")
    return draws


def whole(rows: int, tokens: int, width: int, p: float = 0.3, op: int = OP, **more: Any) -> torch.Tensor:
    dims = ((rows, 1, ()), (tokens, 0, ()), (width, 0, ()))
    return dropout(torch.ones(rows, tokens, width), p, one(**more), op, dims)[1]


@pytest.mark.parametrize(("dp", "tp", "micro_batches"), [(1, 1, 4), (2, 1, 1), (2, 2, 2), (4, 3, 1), (1, 6, 2)])
@pytest.mark.parametrize("cut", [1, 2])
def test_pieces_have_the_mask_of_the_whole(dp: int, tp: int, micro_batches: int, cut: int) -> None:
    rows, tokens, width = 8, 6, 18
    expected = whole(rows, tokens, width)
    mine = rows // dp // micro_batches
    shape = [mine, tokens, width]
    shape[cut] //= tp
    dims = [(rows // micro_batches, 1, ("dp",)), (tokens, 0, ()), (width, 0, ())]
    dims[cut] = (dims[cut][0], 0, ("tp",))
    for d, t, m in product(range(dp), range(tp), range(micro_batches)):
        draws = one_of({"dp": (d, dp), "tp": (t, tp)}, dp, m, micro_batches)
        mask = dropout(torch.ones(shape), 0.3, draws, OP, dims)[1]
        first = d * rows // dp + m * mine
        piece = expected[first : first + mine].narrow(cut, t * shape[cut], shape[cut])
        assert torch.equal(mask, piece), (d, t, m)


@pytest.mark.parametrize("head_tail", [False, True])
@pytest.mark.parametrize("folded", [False, True])
def test_pieces_of_cut_sequences_have_the_mask_of_the_whole(head_tail: bool, folded: bool) -> None:
    rows, tokens, width = 4, 8, 6
    expected = whole(rows, tokens, width)
    for d, c in product(range(2), range(2)):
        draws = Draws({"dp_shard": d, "cp": c}, {"dp_shard": 2, "cp": 2}, 2, 1, head_tail=head_tail)
        draws.at(0, 0, 0, "")
        piece = cut_rows(expected.narrow(0, 2 * d, 2), 1, c, 2, tokens, head_tail)
        dims = ((rows, 1, ("dp_shard",)), (tokens, 0, ("cp",)), (width, 0, ()))
        if folded:
            dims = ((rows * tokens, tokens, ()), dims[-1])
            all_tokens = dropout(torch.ones(rows * tokens, width), 0.3, one(), OP, dims)[1]
            piece = cut_rows(all_tokens.narrow(0, 2 * d * tokens, 2 * tokens), 0, c, 2, tokens, head_tail)
            dims = ((rows * tokens, tokens, ("cp", "dp_shard")), dims[-1])
        assert torch.equal(dropout(torch.ones(piece.shape), 0.3, draws, OP, dims)[1], piece), (d, c)


def test_rows_folded_with_tokens_in_the_middle_or_last() -> None:
    rows, tokens, width = 4, 6, 9
    dims = ((rows * tokens, tokens, ()), (width, 0, ()))
    folded = dropout(torch.ones(rows * tokens, width), 0.3, one(), OP, dims)[1]
    dims3 = ((tokens, 0, ()), (rows, 1, ()), (width, 0, ()))
    middle = dropout(torch.ones(tokens, rows, width), 0.3, one(), OP, dims3)[1]
    last = dropout(torch.ones(width, rows), 0.3, one(), OP, ((width, 0, ()), (rows, 1, ())))[1]
    for d, t, m in product(range(2), range(3), range(2)):
        draws = one_of({"dp": (d, 2), "tp": (t, 3)}, 2, m, 2)
        mask = dropout(torch.ones(2, width), 0.3, draws, OP, ((2 * tokens, tokens, ("dp", "tp")), (width, 0, ())))[1]
        first = (d * 2 + m) * tokens + t * 2
        assert torch.equal(mask, folded[first : first + 2])
        cut = ((tokens, 0, ("tp",)), (2, 1, ("dp",)), (width, 0, ()))
        mask = dropout(torch.ones(2, 1, width), 0.3, draws, OP, cut)[1]
        assert torch.equal(mask, middle[t * 2 : t * 2 + 2, d * 2 + m : d * 2 + m + 1])
        mask = dropout(torch.ones(3, 1), 0.3, draws, OP, ((width, 0, ("tp",)), (2, 1, ("dp",))))[1]
        assert torch.equal(mask, last[t * 3 : t * 3 + 3, d * 2 + m : d * 2 + m + 1])


def test_steps_ops_blocks_and_seeds_have_masks_of_their_own() -> None:
    told: list[dict[str, Any]] = [
        {}, {"step": 1}, {"seed": 1}, {"seed": 1 << 32}, {"op": number_of("other")}, {"block": "layers.0"},
        {"block": "layers.1"},
    ]  # fmt: skip
    masks = [whole(4, 8, 32, **more) for more in told]
    for i, mask in enumerate(masks):
        for other in masks[:i]:
            # Independent masks agree on 0.3² + 0.7² = 0.58 of 1,024 elements, give or take 0.015.
            assert abs((mask == other).double().mean().item() - 0.58) < 0.08


@pytest.mark.parametrize("p", [0.0, 0.1, 0.5, 1.0])
def test_share_and_scale(p: float) -> None:
    mask = whole(16, 32, 64, p)
    deviation = (p * (1 - p) / mask.numel()) ** 0.5
    assert abs((~mask).double().mean().item() - p) <= 4 * deviation
    x = torch.randn(16, 32, 64, dtype=torch.float64)
    made, again = dropout(x, p, one(), OP, ((16, 1, ()), (32, 0, ()), (64, 0, ())))
    assert torch.equal(mask, again)
    torch.testing.assert_close(made, x * mask / (1 - p) if p < 1 else torch.zeros_like(x))


def test_a_scalar_has_a_mask_too() -> None:
    assert dropout(torch.ones(()), 0.5, one(), OP, ())[1].shape == ()
