"""Pipelines that nobody pinned: bounds against solved candidates, and the plan against all pins, one by one."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest

from hpsearch.cluster import Cluster
from hpsearch.errors import HpsearchError, InfeasibleError
from hpsearch.graph import ModelGraph
from hpsearch.schedule import KINDS
from hpsearch.search import search
from hpsearch.search.candidates import Entry
from hpsearch.search.fix import Fix, parse_fix
from hpsearch.search.memory import usable_bytes
from hpsearch.search.pipelines import VIRTUAL, Pipelines, Waiting
from hpsearch.search.spaces import Spaces
from hpsearch.search.stage_bound import passing, rank_bound_s, schedule_bound_s, with_passing_s
from hpsearch.search.tally import Tally
from hpsearch.solve import solve
from tests.search.toy import toy_cluster, toy_model


def cluster_with(bytes_per_s: float, devices: int = 4, memory_bytes: int = 10**9, overlap: float = 0.5) -> Cluster:
    """The toy cluster with other links."""
    cluster = toy_cluster(devices, memory_bytes)
    tiers = tuple(replace(tier, bytes_per_s=bytes_per_s) for tier in cluster.tiers)
    return Cluster("toy", devices, replace(cluster.device, overlap_efficiency=overlap), tiers)


def pipelines_of(model: ModelGraph, cluster: Cluster, rows: int, fix: Fix | None = None) -> Pipelines:
    return Pipelines(model, cluster, rows, "adamw", fix or Fix(), float("inf"), Tally(), Spaces(model))


def solved(state: Pipelines, one: Waiting) -> Iterator[tuple[float, float, float]]:
    """(bound by ranks and by chains, bound with what passes, simulated step) of each cut."""
    table = state.table(one.branch, one.micro_batches)
    shape = one.form.kind, one.form.pp, one.form.virtual, one.micro_batches
    for frame, times in state.times(one.branch, one.micro_batches, one.form.pp * one.form.virtual):
        found, _ = state.search_of(one.form).solve(Entry(one.bound_s, one.order, table, one.label), frame.cut)
        assert found is not None, one.label
        early = max(rank_bound_s(*shape, times), schedule_bound_s(*shape, times))
        yield early, with_passing_s(*shape, times, solve(passing(table)).bound), found.objective_s


@pytest.mark.parametrize(("depth", "bytes_per_s"), [(4, 1e6), pytest.param(5, 1e5, marks=pytest.mark.exhaustive)])
def test_no_bound_is_above_the_simulated_step(depth: int, bytes_per_s: float) -> None:
    model = toy_model(depth)
    state = pipelines_of(model, cluster_with(bytes_per_s, devices=8), 16)
    every = list(state.candidates())
    seen, tight = set(), []
    for one in islice(every, 0, None, 11):
        for early_s, late_s, step_s in solved(state, one):
            assert early_s <= late_s * (1 + 1e-9)
            assert late_s <= step_s * (1 + 1e-9), one.label
            tight.append(late_s / step_s)
            seen.add(one.form.kind)
    assert seen == set(KINDS)
    assert max(tight) > 0.9


def test_least_memory_is_below_that_of_stages_that_are_priced() -> None:
    model = toy_model(4)
    state = pipelines_of(model, cluster_with(1e6), 16)
    for one in islice(state.candidates(), 0, None, 9):
        table, search_of = state.table(one.branch, one.micro_batches), state.search_of(one.form)
        frame = one.cuts[0][1]
        choice = [0] * len(table.keys)
        priced, nbytes = search_of.priced(table, frame.cut), state.stage_bytes(one.branch, one.micro_batches)
        for rank, moments in enumerate(state.kept(one.form, one.micro_batches)):
            for moment, whole in zip(moments, priced.rows(rank), strict=True):
                row = nbytes.row(frame, moment)
                assert sum(row[n][choice[n]] for n in row) <= sum(whole[n][choice[n]] for n in whole) * (1 + 1e-9)


def pinned(model: ModelGraph, cluster: Cluster, rows: int) -> dict[str, float]:
    """Steps of the plans that each pin gives, of all pins of a pipeline, and of none."""
    found = {}
    for pp in (1, 2, 4):
        kinds = [
            (kind, v) for kind in KINDS.values() for v in ((kind.least_virtual,) if kind.most_virtual else VIRTUAL)
        ]
        for kind, virtual in kinds if pp > 1 else [(None, 1)]:
            pins: dict[str, object] = {"pp": pp}
            if kind is not None:
                pins |= {"schedule": kind.name, "vpp": virtual}
            try:
                plan = search(model, cluster, global_batch=rows, fix=pins)
            except HpsearchError:
                continue
            found[f"{pins}"] = plan.file.certificate.objective_s
    return found


@pytest.mark.parametrize(
    ("bytes_per_s", "memory_bytes", "is_pipeline"),
    [
        (1e5, 60_000, True),
        pytest.param(1e5, 10**9, True, marks=pytest.mark.exhaustive),
        pytest.param(1e8, 10**9, False, marks=pytest.mark.exhaustive),
        pytest.param(3e5, 45_000, None, marks=pytest.mark.exhaustive),
    ],
)
def test_the_plan_is_the_best_of_all_pins(bytes_per_s: float, memory_bytes: int, is_pipeline: bool | None) -> None:
    model, cluster = toy_model(4), cluster_with(bytes_per_s, memory_bytes=memory_bytes)
    steps = pinned(model, cluster, 8)
    plan = search(model, cluster, global_batch=8)
    certificate = plan.file.certificate
    assert certificate.objective_s == pytest.approx(min(steps.values()), rel=1e-9), min(steps, key=steps.__getitem__)
    assert certificate.bound_s <= certificate.objective_s
    assert plan.file.predicted.peak_bytes <= usable_bytes(cluster)
    assert plan.file.job.fix == {}
    if is_pipeline is not None:
        assert (plan.file.pipeline is not None) == is_pipeline
    assert "or pipelines" in certificate.space


def test_a_pinned_degree_of_one_stays_one_mesh() -> None:
    plan = search(toy_model(4), cluster_with(1e5), global_batch=8, fix={"pp": 1})
    assert plan.file.pipeline is None
    assert "or pipelines" not in plan.file.certificate.space


def test_pins_of_the_mesh_hold_inside_stages() -> None:
    plan = search(toy_model(4), cluster_with(1e5), global_batch=8, fix={"tp": 2})
    assert plan.file.pipeline is not None
    assert plan.mesh.sizes == {"tp": 2}


def test_a_model_that_fits_only_in_stages_gets_them() -> None:
    model, cluster = toy_model(4), cluster_with(1e5, memory_bytes=37_000)
    pins: dict[str, object] = {"tp": 1, "cp": 1, "offload": "none"}
    with pytest.raises(InfeasibleError):
        search(model, cluster, global_batch=8, fix=pins | {"pp": 1})
    assert search(model, cluster, global_batch=8, fix=pins).file.pipeline is not None


def test_what_fits_only_with_something_on_the_host_says_so() -> None:
    model, cluster = toy_model(4), cluster_with(1e5, memory_bytes=20_500)
    with pytest.raises(InfeasibleError, match="Tried as well, and none fits: pipelines; sequences cut over cp"):
        search(model, cluster, global_batch=8, fix={"offload": "none"})
    plan = search(model, cluster, global_batch=8)
    assert plan.file.job.offload is not None
    assert plan.file.job.fix == {}
    assert "in host memory" in plan.file.certificate.space


def test_bytes_do_not_depend_on_the_hash_seed() -> None:
    program = (
        "from tests.search.test_pipelines import cluster_with\n"
        "from tests.search.toy import toy_model\n"
        "from hpsearch.search import search\n"
        "plan = search(toy_model(4), cluster_with(1e5), global_batch=8)\n"
        "print(plan.file.pipeline is not None, plan.digest)"
    )
    root, said = Path(__file__).parents[2], set()
    for seed in range(2):
        env = {**os.environ, "PYTHONHASHSEED": str(seed), "PYTHONPATH": str(root)}
        run = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, timeout=120)
        assert run.returncode == 0, run.stderr
        said.add(run.stdout)
    assert len(said) == 1
    assert said.pop().startswith("True")


def test_parsed_pins_tell_one_mesh_from_no_pin() -> None:
    assert "pp" in parse_fix({"pp": 1}).text
    assert "pp" not in parse_fix({"tp": 2}).text
