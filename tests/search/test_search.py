"""The outer search against solving every candidate, and what it refuses."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hpsearch.errors import HpsearchError, InfeasibleError, LegalityError
from hpsearch.layout import Mesh
from hpsearch.search import search
from hpsearch.search.candidates import Branch, meshes, micro_batch_counts, recompute_sets
from hpsearch.search.fix import Fix, parse_fix
from hpsearch.search.memory import usable_bytes
from hpsearch.search.one_mesh import OneMesh
from hpsearch.search.spaces import Spaces
from hpsearch.search.step_memory import fullest
from hpsearch.search.tally import Tally
from hpsearch.solve import solve
from tests.search.toy import toy_cluster, toy_model


def every_candidate(memory_bytes: int, global_batch: int) -> dict[str, float]:
    """Optimum of each candidate by itself, where it fits; nothing is pruned."""
    model, cluster = toy_model(), toy_cluster(memory_bytes=memory_bytes)
    state = OneMesh(model, cluster, global_batch, "adamw", Fix(), float("inf"), Tally(), Spaces(model))
    found = {}
    for degrees in meshes(model, cluster.devices, Fix()):
        for recompute in recompute_sets(model, Fix()):
            branch = Branch(Mesh.of(**degrees), recompute)
            for count in micro_batch_counts(model, global_batch, branch.mesh, Fix()):
                table = state.table(branch, count)
                solution = solve(table.problem)
                if solution.choice is None:
                    continue
                if sum(fullest(table, solution.choice).values()) <= usable_bytes(cluster):
                    found[branch.label(count)] = solution.objective
    return found


@pytest.mark.parametrize("memory_bytes", [10**9, 36_000, 30_000, 24_000])
def test_the_plan_is_the_best_of_all_candidates(memory_bytes: int) -> None:
    alone = every_candidate(memory_bytes, 8)
    plan = search(toy_model(), toy_cluster(memory_bytes=memory_bytes), global_batch=8)
    certificate = plan.file.certificate
    assert certificate.objective_s <= min(alone.values()) * (1 + 1e-9)
    assert certificate.bound_s <= certificate.objective_s
    if certificate.status == "optimal":
        assert certificate.gap == 0.0
    assert plan.file.predicted.peak_bytes <= usable_bytes(toy_cluster(memory_bytes=memory_bytes))


def test_memory_is_active_in_the_small_case() -> None:
    roomy = search(toy_model(), toy_cluster(memory_bytes=10**9), global_batch=8)
    tight = search(toy_model(), toy_cluster(memory_bytes=30_000), global_batch=8)
    assert roomy.file.predicted.peak_bytes > usable_bytes(toy_cluster(memory_bytes=30_000))
    assert tight.file.certificate.objective_s > roomy.file.certificate.objective_s


def test_nothing_fits_says_what_would() -> None:
    with pytest.raises(InfeasibleError) as caught:
        search(toy_model(), toy_cluster(memory_bytes=5_000), global_batch=8)
    text = str(caught.value)
    assert "the least found is" in text
    assert "such devices hold that state" in text
    assert caught.value.exit_code == 3


def test_a_pinned_layout_is_kept_and_priced() -> None:
    plan = search(toy_model(), toy_cluster(), global_batch=8, fix={"tp": 4, "layers.*.w1": "tp:S0"})
    assert plan.parameter("layers.0.w1").stored == "tp:S0"
    assert plan.mesh.sizes == {"tp": 4}


def test_a_pin_on_nothing_is_refused() -> None:
    with pytest.raises(LegalityError, match=r"fix layers\.9\.nothing=R: expected the name of a parameter"):
        search(toy_model(), toy_cluster(), global_batch=8, fix={"layers.9.nothing": "R"})


def test_a_pin_may_name_its_axes_in_any_order() -> None:
    pins = {"tp": 2, "dp_shard": 2, "layers.*.w1": "dp_shard:S0 tp:S0"}
    plan = search(toy_model(), toy_cluster(), global_batch=8, fix=pins)
    assert plan.parameter("layers.0.w1").stored == "tp:S0 dp_shard:S0"


def test_a_pin_on_one_instance_names_the_pattern() -> None:
    with pytest.raises(LegalityError, match=r"all instances of its block.*Pin layers\.\*\.w1"):
        search(toy_model(), toy_cluster(), global_batch=8, fix={"layers.0.w1": "R"})


def test_an_indivisible_batch_is_refused_with_the_identity() -> None:
    with pytest.raises(LegalityError, match=r"global batch 9.*micro_batches x data ranks = 1 x 4 = 4, but 9 % 4 = 1"):
        search(toy_model(), toy_cluster(), global_batch=9, fix={"dp_shard": 4})


@pytest.mark.parametrize(
    ("pins", "message"),
    [
        ({"tp": 3}, "expected degrees whose product divides the 4 devices"),
        ({"tp": "x"}, "expected a whole number"),
        (
            {"speed": 1},
            "expected one of dp_replicate, dp_shard, ep, cp, tp, cp_kind, ep_kind, ep_over, capacity, pp, vpp, "
            "schedule, cut, micro_batches, recompute, offload",
        ),
        ({"recompute": "some"}, "expected none or full"),
    ],
)
def test_bad_pins(pins: dict[str, object], message: str) -> None:
    with pytest.raises(LegalityError, match=message):
        search(toy_model(), toy_cluster(), global_batch=8, fix=pins)


def test_one_device_has_no_collective() -> None:
    plan = search(toy_model(), toy_cluster(devices=1), global_batch=8)
    assert plan.file.mesh == ()
    assert plan.file.collectives == ()
    assert plan.file.predicted.exposed_s == pytest.approx(0.0, abs=1e-12)


def test_plan_bytes_do_not_depend_on_the_hash_seed() -> None:
    program = (
        "from tests.search.toy import toy_cluster, toy_model\n"
        "from hpsearch.search import search\n"
        "print(search(toy_model(), toy_cluster(memory_bytes=36_000), global_batch=8).digest)"
    )
    root = Path(__file__).parents[1]
    digests = set()
    for seed in range(5):
        env = {**os.environ, "PYTHONHASHSEED": str(seed), "PYTHONPATH": str(root.parent)}
        run = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, timeout=120)
        assert run.returncode == 0, run.stderr
        digests.add(run.stdout)
    assert len(digests) == 1


def test_two_searches_in_one_process_give_what_fresh_ones_give() -> None:
    def digest(devices: int, depth: int) -> str:
        return search(toy_model(depth), toy_cluster(devices=devices), global_batch=8).digest

    first = (digest(4, 2), digest(2, 3))
    assert (digest(2, 3), digest(4, 2)) == (first[1], first[0])


def test_pins_are_parsed_into_kinds() -> None:
    fix = parse_fix({"tp": "2", "micro_batches": 4, "recompute": "full", "lm_head.weight": "R"})
    assert (fix.degrees, fix.micro_batches, fix.recompute) == ({"tp": 2}, 4, "full")
    assert str(fix.stored["lm_head.weight"]) == "R"


def test_a_time_limit_never_claims_what_it_did_not_look_at() -> None:
    whole = search(toy_model(), toy_cluster(), global_batch=8).file.certificate
    cut = search(toy_model(), toy_cluster(), global_batch=8, time_limit_s=0.0).file.certificate
    assert cut.status == "feasible"
    assert cut.bound_s <= whole.objective_s
    assert any("not looked at" in refusal.reason for refusal in cut.refused)


def test_the_update_is_priced_by_the_optimizers_states() -> None:
    adamw = search(toy_model(), toy_cluster(devices=1), global_batch=8).file.predicted
    sgd = search(toy_model(), toy_cluster(devices=1), global_batch=8, optimizer="sgd").file.predicted
    moved = 2 * 2 * 16 * 32 * 4  # bytes of all parameters, at 1 MB/s: AdamW moves them 7 times, SGD 3 times
    assert adamw.compute_s - sgd.compute_s == pytest.approx(4 * moved / 1e6, rel=1e-3)


@pytest.mark.parametrize(
    ("pins", "message"),
    [
        ({"layers.*.w1": "xx:S0"}, "expected axes out of dp_replicate, dp_shard, ep, cp, tp, but got 'xx'"),
        ({"layers.*.w1": "tp:S0 tp:S1"}, "expected each axis once, but got tp twice"),
        ({"tp": "²"}, "expected a whole number"),
    ],
)
def test_pins_that_cannot_be_read(pins: dict[str, object], message: str) -> None:
    with pytest.raises(HpsearchError, match=message):
        search(toy_model(), toy_cluster(), global_batch=8, fix=pins)


def test_a_layout_that_no_mesh_offers_says_which_there_are() -> None:
    with pytest.raises(InfeasibleError, match=r"layers\.\*\.w1 can rest as R"):
        search(toy_model(), toy_cluster(devices=1), global_batch=8, fix={"layers.*.w1": "tp:S0"})
