"""Tokens to experts and back: values and gradients equal those of one process that holds every expert."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from hpsearch.errors import LoweringError
from hpsearch.lower.exchange import collect, collect_adjoint, hop_ranks, route, send, send_adjoint
from tests.lower.mixture import Mixture, mixture
from tests.lower.simulate import Collectives, on_ranks

WIDTH = 6
FORMS: list[tuple[int, tuple[int, ...] | None]] = [
    (1, None), (2, None), (4, None), (4, (4,)), (4, (2, 2)), (6, (3, 2)), (8, (2, 4)), (8, (2, 2, 2)),
]  # fmt: skip
ROUTINGS: dict[str, Callable[[Tensor], Tensor]] = {
    "drawn": lambda index: index,
    "one expert": lambda index: torch.full_like(index, 3),
    "none with one": lambda index: torch.where(index == 5, 4, index),
    "unused slots": lambda index: torch.where(index % 3 == 0, -1, index),
    "no token anywhere": lambda index: index[:0],
}


def exchanged(case: Mixture, ranks: int, sizes: tuple[int, ...] | None) -> Mixture:
    """Forward and backward of the layer over simulated ranks, put together again."""
    experts = len(case.matrices)
    own = experts // ranks
    names = tuple(10 + 3 * r for r in range(ranks))  # a group is any ranks

    def work(rank: int, collectives: Collectives) -> tuple[Tensor, ...]:
        collectives.rank = names[rank]
        hops = None if sizes is None else hop_ranks(names, sizes, names[rank])
        index, x, weight, grad = (t[rank] for t in (case.index, case.x, case.weight, case.grad))
        flow = route(index, experts, names, hops)
        rows, counts = send(flow, x)
        matrices = case.matrices[rank * own : (rank + 1) * own]
        pieces = rows.split(counts.tolist())
        made = torch.cat([piece @ m for piece, m in zip(pieces, matrices, strict=True)])
        out = collect(flow, made, weight)
        grad_made, grad_weight = collect_adjoint(flow, made, weight, grad)
        parts = grad_made.split(counts.tolist())
        grad_rows = torch.cat([part @ m.T for part, m in zip(parts, matrices, strict=True)])
        grad_matrices = torch.stack([piece.T @ part for piece, part in zip(pieces, parts, strict=True)])
        return out, send_adjoint(flow, grad_rows), grad_weight, grad_matrices

    out, x, weight, matrices = zip(*on_ranks(ranks, work), strict=True)
    return Mixture(case.index, list(x), list(weight), list(out), torch.cat(matrices))


@pytest.mark.parametrize("kind", list(ROUTINGS))
@pytest.mark.parametrize(("ranks", "sizes"), FORMS)
@pytest.mark.parametrize("top_k", [1, 5])
def test_layer_and_gradients(ranks: int, sizes: tuple[int, ...] | None, kind: str, top_k: int) -> None:
    """24 experts, so that top 5 is more than the 3 or 4 of a rank; rank 0 has no token, the others 3, 6, 9, …"""
    case = mixture(ranks, 24, top_k, WIDTH, lambda rank: 3 * rank or (7 if ranks == 1 else 0), ROUTINGS[kind])
    found = exchanged(case, ranks, sizes)
    wanted = case.alone()
    for name in ("x", "weight", "grad"):
        for a, b in zip(getattr(found, name), getattr(wanted, name), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(found.matrices, wanted.matrices, rtol=1e-12, atol=1e-12)


def test_an_expert_asked_for_twice_is_counted_twice() -> None:
    case = mixture(4, 8, 3, WIDTH, lambda rank: 4, lambda index: torch.where(index > 3, 2, index))
    for sizes in (None, (2, 2)):
        found, wanted = exchanged(case, 4, sizes), case.alone()
        torch.testing.assert_close(found.grad, wanted.grad)
        torch.testing.assert_close(found.weight, wanted.weight)


@pytest.mark.parametrize("sizes", [None, (2, 2)])
def test_sixteen_bit_sums_are_wide(sizes: tuple[int, ...] | None) -> None:
    """256 + eight times 1/2 in bf16: one by one, every half is lost."""
    index = torch.arange(9)[None]
    rows_of = {0: 256.0}

    def work(rank: int, collectives: Collectives) -> Tensor:
        hops = None if sizes is None else hop_ranks(range(4), sizes, rank)
        flow = route(index[: 1 if rank == 0 else 0], 12, (0, 1, 2, 3), hops)
        rows, counts = send(flow, torch.ones(flow.tokens, 2, dtype=torch.bfloat16))
        first = rank * 3
        values = [torch.full((n, 2), rows_of.get(first + i, 0.5)) for i, n in enumerate(counts.tolist())]
        assert sum(counts.tolist()) == len(rows)
        return send_adjoint(flow, torch.cat(values).bfloat16())

    assert on_ranks(4, work)[0].tolist() == [[260.0, 260.0]]


def refusal(index: Tensor, experts: int, sizes: tuple[int, ...] | None = None, tokens: int | None = None) -> str:
    def work(rank: int, collectives: Collectives) -> None:
        flow = route(index, experts, (0, 1, 2, 3), None if sizes is None else [tuple(range(n)) for n in sizes])
        send(flow, torch.zeros(len(index) if tokens is None else tokens, 2))

    with pytest.raises(LoweringError) as error:
        on_ranks(4, work)
    return str(error.value)


def test_what_does_not_fit_is_refused() -> None:
    index = torch.tensor([[0, 1]])
    assert refusal(index, 10) == (
        "10 experts over 4 ranks: expected an equal number on each, but 10 / 4 is 2.5. "
        "Use a divisor of the number of experts as the degree."
    )
    assert refusal(index, 8, (2, 3)) == (
        "exchange over 4 ranks: expected hops whose sizes multiply to 4, but found 2 x 3. "
        "Give one group for each level, from the outermost in."
    )
    assert refusal(torch.tensor([[0, 8]]), 8).startswith("index of experts: expected at most 7, but found 8.")
    assert refusal(index, 8, tokens=5).startswith("exchange of tokens: expected 1, as in the route, but found 5.")
