"""Presolve keeps an optimum: what it leaves is enumerated, and the way back is priced by the definition."""

from __future__ import annotations

import numpy as np
import pytest

from hpsearch.solve import Flow, Hinge, Problem, Row, enumerate_all, solve
from hpsearch.solve.core import floor_by_elimination, floor_from_duals
from hpsearch.solve.elimination import eliminate, least_with, sweep
from hpsearch.solve.intra_op import write
from hpsearch.solve.mathopt import minimise
from hpsearch.solve.pairwise import Pairwise, layout_sets, pairwise_form
from hpsearch.solve.presolve import dominate, presolve, support
from tests.solve.problems import layered, random_problem


def as_problem(form: Pairwise) -> tuple[Problem, list[int]]:
    """A form as a problem of its own, to enumerate; and the form's node at each of its positions."""
    nodes = sorted(form.near)
    at = {node: position for position, node in enumerate(nodes)}
    flows = tuple(
        Flow(f"{a}-{b}", at[a], np.arange(t.shape[0]), ((at[b], np.arange(t.shape[1])),), t - t.min())
        for (a, b), t in form.tables.items()
    )
    offset = form.constant + sum(float(t.min()) for t in form.tables.values())
    amounts = {at[n]: a for n, a in form.coupling.items()}
    count = len(form.limits)
    rows = tuple(Row(f"r{i}", {n: a[i] for n, a in amounts.items()}, float(b)) for i, b in enumerate(form.limits))
    hinges = tuple(
        Hinge(f"h{i}", {n: a[count + i] for n, a in amounts.items()}, float(d), float(w))
        for i, (d, w) in enumerate(zip(form.offsets, form.weights, strict=True))
    )
    unary = tuple(form.unary[n] for n in nodes)
    return Problem(tuple(map(len, unary)), tuple(map(str, nodes)), unary, flows, rows, hinges, offset), nodes


@pytest.mark.parametrize("seed", range(100, 160))
def test_presolve_never_changes_the_optimum(seed: int) -> None:
    problem = random_problem(seed)
    truth = enumerate_all(problem)
    form = pairwise_form(problem)
    if not presolve(form):
        assert truth.choice is None
        return
    rest, nodes = as_problem(form)
    left = enumerate_all(rest)
    assert left.objective == pytest.approx(truth.objective, rel=1e-9, abs=1e-9)
    assert (left.choice is None) == (truth.choice is None)
    if left.choice is None:
        return
    choice = form.restore(dict(zip(nodes, left.choice, strict=True)), len(problem))
    assert problem.evaluate(choice) == pytest.approx(truth.objective, rel=1e-9, abs=1e-9)


def test_a_chain_disappears_entirely() -> None:
    problem = random_problem(0, memory=False)
    form = pairwise_form(Problem(problem.sizes, problem.names, problem.unary, problem.flows))
    assert presolve(form)
    assert not form.near


def test_equal_states_keep_the_first() -> None:
    problem = Problem((3,), ("a",), (np.array([1.0, 1.0, 1.0]),))
    form = pairwise_form(problem)
    assert dominate(form, 0)
    assert form.labels[0].tolist() == [0]


def test_a_state_that_needs_less_memory_is_not_dominated() -> None:
    problem = Problem((2, 2), ("a", "b"), (np.array([1.0, 2.0]),) * 2, (), (Row("m", {0: np.array([2.0, 1.0])}, 9.0),))
    form = pairwise_form(problem)
    assert not dominate(form, 0)
    assert dominate(form, 1)


def test_a_row_that_cannot_bind_is_forgotten() -> None:
    row = Row("memory", {0: np.array([1e9, 2e9]), 1: np.array([3e9, 1e9])}, 5e9)
    problem = Problem((2, 2), ("a", "b"), (np.array([0.0, 1.0]), np.array([0.0, 1.0])), (), (row,))
    assert solve(problem).method == "presolve"
    assert solve(problem).objective == 0.0


@pytest.mark.parametrize("seed", range(30))
def test_least_with_is_the_least_cost_with_each_state(seed: int) -> None:
    drawn = random_problem(seed, memory=False)
    problem = Problem(drawn.sizes, drawn.names, drawn.unary, drawn.flows)
    form = pairwise_form(problem)
    cliques = sweep(form)
    assert cliques is not None
    least = least_with(cliques)
    for node, size in enumerate(problem.sizes):
        for state in range(size):
            unary = [
                np.where(np.arange(len(u)) == state, u, np.inf) if n == node else u for n, u in enumerate(problem.unary)
            ]
            truth = enumerate_all(Problem(problem.sizes, problem.names, tuple(unary), problem.flows)).objective
            assert least[node][state] + form.constant == pytest.approx(truth, rel=1e-9)


@pytest.mark.parametrize("seed", range(40))
def test_floors_hold_for_any_multipliers_and_duals(seed: int) -> None:
    """Bound and extra costs are proofs whatever the solver says: checked with duals that are off by a half."""
    problem = random_problem(seed)
    truth = enumerate_all(problem)
    form = pairwise_form(problem)
    assert support(form, form.near) is not None
    written = write(form)
    duals = minimise(written.program, integral=False, time_limit_s=10).row_duals
    assert duals is not None
    duals = duals * np.random.default_rng(seed).uniform(0.5, 1.5, len(duals))
    for floor in (floor_from_duals(written, duals), floor_by_elimination(form, written.multipliers(duals))):
        assert floor is not None
        assert truth.choice is not None
        assert floor.bound <= truth.objective + 1e-9
        for node, state in enumerate(truth.choice):
            position = form.labels[node].tolist().index(state)
            assert floor.bound + floor.extra[node][position] <= truth.objective + 1e-9


def test_elimination_equals_the_relaxation_on_a_large_graph() -> None:
    problem = layered(8, 1, memory=None, hinges=0)
    form = pairwise_form(problem)
    least = eliminate(form)
    assert least is not None
    assert presolve(form)
    written = write(form)
    relaxed = minimise(written.program, integral=False, time_limit_s=60)
    assert written.cost(relaxed.objective) == pytest.approx(least[0], rel=1e-9)


def test_layout_sets_are_all_small_sets_once() -> None:
    sets = layout_sets(4, 2)
    assert sets is not None
    assert sets.sum(axis=1).tolist() == [1] * 4 + [2] * 6
    assert len({tuple(s) for s in sets.tolist()}) == 10
    assert layout_sets(60, 12) is None
