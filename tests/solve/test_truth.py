"""A6: the solver against enumeration, on every route through it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from hpsearch.solve import Flow, Hinge, Problem, Row, Solution, elimination, enumerate_all, pairwise, solve
from tests.solve.problems import is_active, oracle, random_problem, shuffled

SEEDS = range(90)
INF = float("inf")


def assert_optimal(problem: Problem, found: Solution, truth: Solution) -> None:
    assert found.status == truth.status
    if truth.choice is None:
        assert found.choice is None
        return
    assert found.choice is not None
    assert found.objective == problem.evaluate(found.choice)
    assert found.objective == pytest.approx(truth.objective, rel=1e-9, abs=1e-12)
    assert found.bound <= truth.objective * (1 + 1e-12 * np.sign(truth.objective))
    assert found.gap == 0.0


@pytest.fixture(params=["as shipped", "no elimination", "no copies nodes", "neither"])
def route(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Which parts of the solver are switched off, so that each of the others is held to the truth as well."""
    if request.param in ("no elimination", "neither"):
        monkeypatch.setattr(elimination, "MOST_ENTRIES", 0)
    if request.param in ("no copies nodes", "neither"):
        monkeypatch.setattr(pairwise, "LARGEST_COPIES", 0)
    return str(request.param)


@pytest.mark.parametrize("seed", SEEDS)
def test_random_problems_reach_the_enumerated_optimum(seed: int, route: str) -> None:
    problem = random_problem(seed, memory=seed % 5 != 0)
    assert_optimal(problem, solve(problem), enumerate_all(problem))


def test_memory_is_active_in_more_than_a_third_of_them() -> None:
    active = sum(is_active(random_problem(seed, memory=seed % 5 != 0)) for seed in SEEDS)
    assert active >= len(SEEDS) / 3


def same(size: int) -> np.ndarray:
    return np.arange(size)


def fan() -> Problem:
    """One value in layout 0, three readers that each prefer layout 1 by less than a redistribution costs alone."""
    price = np.array([[0.0, 10.0], [10.0, 0.0]])
    flow = Flow("v", 0, same(1), ((1, same(2)), (2, same(2)), (3, same(2))), price)
    unary = (np.zeros(1), *(np.array([4.0, 0.0]) for _ in range(3)))
    return Problem((1, 2, 2, 2), ("v", "a", "b", "c"), unary, (flow,))


def test_a_redistribution_is_paid_once_for_all_its_readers() -> None:
    assert solve(fan()).choice == (0, 1, 1, 1)
    assert solve(fan()).objective == 10.0
    alone = replace(fan(), flows=tuple(replace(fan().flows[0], consumers=(c,)) for c in fan().flows[0].consumers))
    assert solve(alone).objective == 12.0
    assert solve(alone).choice == (0, 0, 0, 0)


def test_a_node_may_read_a_value_twice(route: str) -> None:
    price = np.array([[0.0, 1.0, 2.0]])
    flow = Flow("v", 0, same(1), ((1, np.array([0, 1])), (1, np.array([1, 2]))), price)
    problem = Problem((1, 2), ("v", "mul"), (np.zeros(1), np.array([2.5, 0.0])), (flow,))
    assert_optimal(problem, solve(problem), enumerate_all(problem))
    assert solve(problem).objective == 3.0


def test_a_value_may_be_read_by_its_own_producer(route: str) -> None:
    price = np.array([[0.0, 5.0], [1.0, 0.0]])
    flow = Flow("state", 0, same(2), ((0, np.array([1, 0])), (1, same(2))), price)
    problem = Problem((2, 2), ("a", "b"), (np.zeros(2), np.array([0.0, 9.0])), (flow,))
    assert_optimal(problem, solve(problem), enumerate_all(problem))


def test_hinge_hides_communication_up_to_its_compute(route: str) -> None:
    gathers = {n: np.array([3.0, 0.0]) for n in range(3)}
    unary = tuple(np.array([0.0, 2.0]) for _ in range(3))
    problem = Problem((2, 2, 2), ("a", "b", "c"), unary, (), (), (Hinge("overlap", gathers, -6.0),))
    found = solve(problem)
    assert_optimal(problem, found, enumerate_all(problem))
    assert found.objective == 2.0
    assert sorted(found.choice or ()) == [0, 0, 1]


def test_fractional_relaxation_is_closed_by_the_integer_program() -> None:
    """A knapsack: the relaxation takes a piece of an item, the truth may not."""
    value, weight = [7.0, 5.0, 4.0, 3.0], [5e9, 4e9, 3e9, 2e9]
    unary = tuple(np.array([v, 0.0]) for v in value)
    row = Row("memory", {n: np.array([0.0, w]) for n, w in enumerate(weight)}, 7.5e9)
    problem = Problem((2,) * 4, tuple("abcd"), unary, (), (row,))
    found = solve(problem)
    assert_optimal(problem, found, enumerate_all(problem))
    assert found.method == "presolve+lp+mip"


@pytest.mark.parametrize(
    ("unary", "price"),
    [([np.full(2, INF), np.zeros(2)], np.zeros((2, 2))), ([np.zeros(2), np.zeros(2)], np.full((2, 2), INF))],
    ids=["forbidden states", "forbidden pairs"],
)
def test_infeasible_states(unary: list[np.ndarray], price: np.ndarray, route: str) -> None:
    problem = Problem((2, 2), ("a", "b"), tuple(unary), (Flow("f", 0, same(2), ((1, same(2)),), price),))
    found = solve(problem)
    assert (found.status, found.choice, found.objective, found.bound) == ("infeasible", None, INF, INF)


def test_odd_cycle_of_inequalities_is_infeasible_although_every_pair_is_fine(route: str) -> None:
    differ = np.array([[INF, 0.0], [0.0, INF]])
    flows = tuple(Flow(f"{a}{b}", a, same(2), ((b, same(2)),), differ) for a, b in ((0, 1), (1, 2), (2, 0)))
    problem = Problem((2, 2, 2), tuple("abc"), (np.zeros(2),) * 3, flows)
    assert enumerate_all(problem).status == "infeasible"
    assert solve(problem).status == "infeasible"


@pytest.mark.parametrize("seed", range(24))
def test_renumbering_the_nodes_changes_nothing(seed: int) -> None:
    problem = random_problem(seed)
    other, place = shuffled(problem, seed)
    ours, theirs = solve(problem), solve(other)
    assert theirs.objective == pytest.approx(ours.objective, rel=1e-12)
    assert theirs.choice is not None
    assert problem.evaluate([theirs.choice[place[n]] for n in range(len(problem))]) == pytest.approx(ours.objective)


@pytest.mark.parametrize(("name", "optimum"), [("llama8b_1d", 84_350.405784), ("llama8b_2d", 37_191.814187)])
def test_oracle_problems_reach_their_optimum(name: str, optimum: float) -> None:
    problem, published = oracle(name)
    found = solve(problem)
    assert found.status == "optimal"
    assert found.objective == pytest.approx(optimum, abs=1e-6)
    assert found.objective == pytest.approx(published, abs=1e-6)
    assert published - 1e-6 <= found.bound <= published + 1e-9
