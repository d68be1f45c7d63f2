"""Problems small enough to enumerate, random and hand-made, and the two oracle problems."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from hpsearch.solve import Flow, Hinge, Problem, Row, enumerate_all
from hpsearch.solve.solver import only_row

ORACLE = Path(__file__).parent / "oracle"
SHAPES = ("chain", "tree", "diamonds", "residual", "readers", "tangle")


def oracle(name: str) -> tuple[Problem, float]:
    """An oracle problem and its optimum; every edge is a flow with one reader whose layouts are states."""
    arrays = np.load(ORACLE / f"{name}.npz")
    sizes = arrays["sizes"].tolist()
    starts = np.concatenate([[0], np.cumsum(sizes)])
    unary = tuple(arrays["unary"][starts[n] : starts[n + 1]] for n in range(len(sizes)))
    states = {size: np.arange(size) for size in set(sizes)}
    offset, flat = arrays["table_offset"], arrays["tables"]
    flows = []
    for edge, ((a, b), k) in enumerate(zip(arrays["edges"].tolist(), arrays["table_of_edge"].tolist(), strict=True)):
        table = flat[offset[k] : offset[k + 1]].reshape(sizes[a], sizes[b])
        flows.append(Flow(f"edge{edge}", a, states[sizes[a]], ((b, states[sizes[b]]),), table))
    names = tuple(f"node{n}" for n in range(len(sizes)))
    return Problem(tuple(sizes), names, unary, tuple(flows)), float(arrays["optimum"])


def readers_of(shape: str, nodes: int, rng: np.random.Generator) -> list[tuple[int, list[int]]]:
    """(producer, readers) of each flow."""
    if shape == "chain":
        return [(n, [n + 1]) for n in range(nodes - 1)]
    if shape == "tree":
        return [(int(rng.integers(0, n)), [n]) for n in range(1, nodes)]
    if shape == "diamonds":
        pairs = [(n, [n + 1, n + 2]) for n in range(0, nodes - 3, 3)]
        closes = [(m, [n + 3]) for n in range(0, nodes - 3, 3) for m in (n + 1, n + 2)]
        return pairs + closes + [(n, [n + 1]) for n in range((nodes - 1) // 3 * 3, nodes - 1)]
    if shape == "residual":
        return [(n, [n + 1] + ([n + 3] if n % 2 == 0 and n + 3 < nodes else [])) for n in range(nodes - 1)]
    if shape == "readers":
        return [
            (n, [int(m) for m in rng.integers(n + 1, nodes, size=min(4, nodes - n))]) for n in range(0, nodes - 1, 2)
        ]
    count = int(rng.integers(nodes, 2 * nodes))
    flows = [(int(rng.integers(0, nodes)), rng.integers(0, nodes, size=int(rng.integers(1, 4)))) for _ in range(count)]
    return [(p, [int(m) for m in readers]) for p, readers in flows]


def random_problem(seed: int, *, memory: bool = True) -> Problem:
    """At most 10^5 assignments, one of which (planted) is allowed by every table; ties in every third.

    With `memory`, a row whose limit lies below what the unconstrained optimum takes, where there is room for that.
    """
    rng = np.random.default_rng(seed)
    shape = SHAPES[seed % len(SHAPES)]
    nodes = int(rng.integers(4, 10))
    sizes = [int(s) for s in rng.integers(1, 4 if nodes > 7 else 5, size=nodes)]
    planted = [int(rng.integers(0, s)) for s in sizes]

    def costs(*of: int) -> np.ndarray:
        return rng.integers(0, 4, size=of).astype(float) if seed % 3 == 0 else rng.gamma(1.0, 1.0, size=of)

    unary = [np.where(rng.random(s) < 0.1, np.inf, costs(s)) for s in sizes]
    for node, state in enumerate(planted):
        unary[node][state] = costs(1)[0]
    flows = []
    for position, (producer, readers) in enumerate(readers_of(shape, nodes, rng)):
        made, read = (int(n) for n in rng.integers(1, 5, size=2))
        price = np.where(rng.random((made, read)) < 0.2, np.inf, costs(made, read))
        classes = rng.integers(0, made, size=sizes[producer])
        consumers = tuple((m, rng.integers(0, read, size=sizes[m])) for m in readers)
        for m, layouts in consumers:
            at = (classes[planted[producer]], layouts[planted[m]])
            price[at] = 1.0 if np.isinf(price[at]) else price[at]
        flows.append(Flow(f"flow{position}", producer, classes, consumers, price, float(rng.choice([1.0, 1.0, 3.0]))))
    hinges = tuple(random_hinge(rng, sizes, h) for h in range(int(rng.integers(0, 3))))
    names = tuple(f"{shape}{n}" for n in range(nodes))
    problem = Problem(tuple(sizes), names, tuple(unary), tuple(flows), (), hinges, float(rng.normal()))
    return with_memory(problem, rng) if memory else problem


def random_hinge(rng: np.random.Generator, sizes: list[int], position: int) -> Hinge:
    some = sorted(int(n) for n in rng.choice(len(sizes), size=int(rng.integers(1, len(sizes) + 1)), replace=False))
    coefficients = {n: rng.normal(size=sizes[n]) for n in some}
    return Hinge(f"hinge{position}", coefficients, float(rng.normal()), float(rng.choice([0.5, 1.0, 2.0])))


def with_memory(problem: Problem, rng: np.random.Generator) -> Problem:
    """A memory row in bytes over some nodes, its limit between the least possible and what the optimum takes."""
    best = enumerate_all(problem)
    assert best.choice is not None, "the planted choice is feasible"
    some = sorted(int(n) for n in rng.choice(len(problem), size=int(rng.integers(2, len(problem))), replace=False))
    amounts = {n: rng.integers(0, 10**9, size=problem.sizes[n]).astype(float) * 16 for n in some}
    row = Row("memory", amounts, float("inf"))
    least = enumerate_all(only_row(problem, row)).objective
    limit = least + float(rng.uniform(0.3, 0.99)) * (row.total(best.choice) - least)
    limited = replace(problem, rows=(replace(row, limit=limit),))
    # A second moment of the step, sometimes: some of the same nodes, other amounts.
    again = {n: a[::-1].copy() for n, a in amounts.items() if n % 2}
    moment = Row("workspace", again, 0.6 * sum(float(a.max()) for a in again.values()))
    both = replace(limited, rows=(*limited.rows, moment))
    return both if again and enumerate_all(both).choice is not None else limited


def is_active(problem: Problem) -> bool:
    """Whether the rows matter: the optimum without them breaks one."""
    free = enumerate_all(replace(problem, rows=()))
    return free.choice is not None and problem.evaluate(free.choice) == float("inf")


def shuffled(problem: Problem, seed: int) -> tuple[Problem, list[int]]:
    """The same problem with its nodes renumbered: place[old] = new."""
    place = [int(n) for n in np.random.default_rng(seed).permutation(len(problem))]
    old = [place.index(n) for n in range(len(problem))]
    flows = tuple(
        replace(f, producer=place[f.producer], consumers=tuple((place[m], c) for m, c in f.consumers))
        for f in reversed(problem.flows)
    )
    rows = tuple(replace(r, coefficients={place[n]: a for n, a in r.coefficients.items()}) for r in problem.rows)
    hinges = tuple(replace(h, coefficients={place[n]: a for n, a in h.coefficients.items()}) for h in problem.hinges)
    return Problem(
        tuple(problem.sizes[n] for n in old),
        tuple(problem.names[n] for n in old),
        tuple(problem.unary[n] for n in old),
        flows,
        rows,
        hinges,
        problem.offset,
    ), place


def layered(layers: int, seed: int, *, memory: float | None = 0.3, hinges: int = 6) -> Problem:
    """A joint graph in outline, for speed and larger truths: a residual stream, three branches a layer, a mirror.

    Each forward op is read by the next, by its own backward op and across the residual; layouts R, S0, S1, S2, P.
    """
    rng = np.random.default_rng(seed)
    ops = 12 * layers
    states = [np.array([0, 1, 2, 3]) if n % 3 else np.array([0, 1, 2, 3, 4]) for n in range(2 * ops)]
    work = rng.gamma(2.0, 2e-4, size=2 * ops)
    unary = tuple(
        w * np.where(s == 0, 1.0, 0.125) * rng.uniform(0.8, 1.2, len(s)) for w, s in zip(work, states, strict=True)
    )
    flows = []
    for n in range(2 * ops - 1):
        readers = (
            [n + 1] + ([n + 4] if n % 4 == 0 and n + 4 < 2 * ops else []) + ([2 * ops - 1 - n] if n < ops - 1 else [])
        )
        flows.append(
            Flow(f"v{n}", n, states[n], tuple((m, accepted(states[m])) for m in sorted(set(readers))), prices(rng))
        )
    stored = {n: rng.uniform(1e8, 4e9) * rng.uniform(0.1, 1.0, len(states[n])) for n in range(ops)}
    low, high = (sum(float(f(a)) for a in stored.values()) for f in (np.min, np.max))
    rows = () if memory is None else (Row("memory", stored, low + memory * (high - low)),)
    overlap = tuple(
        Hinge(f"gather{h}", {n: rng.uniform(0, 2e-4) - 0.3 * unary[n] for n in range(h, ops, max(hinges, 1))}, 2e-4)
        for h in range(hinges)
    )
    names = tuple(f"op{n}" for n in range(2 * ops))
    return Problem(tuple(len(s) for s in states), names, unary, tuple(flows), rows, overlap)


def accepted(states: np.ndarray) -> np.ndarray:
    """The layout a reader wants in each state: its own, whole where its result is partial."""
    return np.where(states == 4, 3, states)


def prices(rng: np.random.Generator) -> np.ndarray:
    """Redistribution among R, S0, S1, S2, P in seconds: slices almost free, gathers dear, reductions dearer."""
    gather = float(rng.uniform(2e-5, 4e-4))
    price = np.full((5, 5), gather / 4 + 8e-6)
    price[0] = 2e-7
    price[1:4, 0] = gather
    price[4, :4] = gather
    price[4, 0] = 2 * gather
    price[:4, 4] = np.inf
    np.fill_diagonal(price, 0.0)
    return price
