"""Ranks agree or all refuse; batches are checked by all; norms, groups and names do not depend on the layout."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.end_to_end.models import LENGTH, VOCAB, build
from tests.end_to_end.ranks import RankPool
from tests.run import jobs
from tests.run.plans import plan_bytes

pytestmark = pytest.mark.dist
JOBS = jobs.__name__


def test_a_rank_with_another_plan_is_refused_by_all_in_seconds(ranks: RankPool) -> None:
    right, wrong = plan_bytes("llama", 4, dp_shard=4), plan_bytes("llama", 4, dp_replicate=4)
    for plans in ([right, right, wrong, right], [right, None, right, right]):
        for kind, text, seconds in ranks.run(f"{JOBS}:disagree", ranks=4, plans=plans):
            assert kind == "LaunchError"
            assert "expected the same plan on all 4 ranks, but found rank(s) 0, " in text
            assert seconds < 10


def test_a_search_that_fails_on_rank_0_fails_everywhere(ranks: RankPool) -> None:
    found = ranks.run(f"{JOBS}:search_fails", ranks=2)
    assert found[0][0] == "ClusterError"
    assert found[1][0] == "LaunchError"
    assert "no-such-cluster" in found[1][1]


def test_a_rank_with_another_model_is_refused_by_all(ranks: RankPool) -> None:
    found = ranks.run(f"{JOBS}:another_model", ranks=2, plan=plan_bytes("llama", 2, dp_shard=2))
    assert [kind for kind, _ in found] == ["LaunchError", "PlanError"]
    assert "rank 1" in found[0][1]


def test_too_few_ranks_are_told_how_to_launch(ranks: RankPool) -> None:
    found = ranks.run(f"{JOBS}:disagree", ranks=2, plans=[plan_bytes("llama", 4, dp_shard=4)] * 2)
    for kind, text, _ in found:
        assert kind == "LaunchError"
        assert "expected 4 ranks as in the plan, but found 2" in text
        assert "torchrun --nproc-per-node 4" in text


def test_bad_batches_are_refused_by_every_rank(ranks: RankPool) -> None:
    plan = plan_bytes("llama", 4, dp_shard=2, tp=2)
    found = ranks.run(f"{JOBS}:bad_batches", ranks=4, plan=plan)
    for rank, cases in enumerate(found):
        assert cases.pop("good") == ("", "")
        assert {kind for kind, _ in cases.values()} == {"BatchError"}
        text = cases["a row too few"][1]
        assert text == (
            f"batch leaf input_ids: expected local shape [6, {LENGTH}] (12 global rows over 2 data ranks), but found "
            f"[5, {LENGTH}]. Cut the global batch [12, {LENGTH}] by parallel.local_rows(batch), or draw rows by "
            "parallel.sampler(…)."
        )
        own = "batch leaf input_ids" if rank == 1 else "rank(s) [1] found one that does not"
        assert own in cases["a row too few on rank 1"][1]
        assert "expected dtype torch.int64, but found torch.float64" in cases["floats"][1]
        assert "position is not one of them" in cases["another leaf"][1]
        assert "rank(s) [1] differ from rank 0" in cases["longer on rank 1"][1]
        assert "different batches of the global shape" in cases["global batches that differ"][1]
        assert "ranks 0 and 1 share one data rank" in cases["other rows on rank 1"][1]


def test_a_mean_over_unequal_targets_is_refused(ranks: RankPool) -> None:
    plan = plan_bytes("t5", 2, dp_shard=2, micro_batches=3)
    for kind, text in ranks.run(f"{JOBS}:uneven_targets", ranks=2, plan=plan):
        assert kind == "BatchError"
        assert "averages over valid targets itself" in text


def test_batches_of_other_lengths_run_under_the_same_plan(ranks: RankPool) -> None:
    generator = torch.Generator().manual_seed(4)
    batches: list[dict[str, Any]] = []
    for length in (LENGTH, 2 * LENGTH):
        ids = torch.randint(0, VOCAB, (12, length), generator=generator)
        batches.append({"input_ids": ids, "labels": ids, "use_cache": False})
    model = build("llama", torch.float64).model
    expected = [model(**batch).loss.item() for batch in (*batches, batches[0]) for _ in range(2)]
    for found in ranks.run(
        f"{JOBS}:several_shapes", ranks=4, plan=plan_bytes("llama", 4, dp_shard=2, tp=2), batches=batches
    ):
        assert found == pytest.approx(expected, rel=1e-6)


def test_names_are_the_plain_models(ranks: RankPool) -> None:
    found = ranks.run(f"{JOBS}:names", ranks=4, plan=plan_bytes("qwen2", 4, dp_shard=2, tp=2))
    model = build("qwen2", torch.float64).model
    for answer in found:
        assert answer["sharded"] == list(model.state_dict())
        assert answer["parameters"] == [name for name, _ in model.named_parameters()]
        assert answer["tied"]
        assert answer["same after loading"]
        kind, text = answer["errors"]
        assert kind == "CheckpointError"
        assert "missing: model.embed_tokens.weight" in text
    full = found[0]["full"]
    assert found[1]["full"] == {}
    assert all(torch.equal(full[name], value) for name, value in model.state_dict().items())
    model.load_state_dict(full)


def test_norm_and_clipping_do_not_depend_on_the_layout(ranks: RankPool) -> None:
    for fix in ({"dp_shard": 2, "tp": 2}, {"dp_replicate": 2, "dp_shard": 2}, {"tp": 4}):
        for found in ranks.run(f"{JOBS}:norms", ranks=4, plan=plan_bytes("llama", 4, **fix)):
            assert found["ours"] == pytest.approx(found["plain"], rel=1e-12)
            assert found["torch"] == pytest.approx(found["plain"], rel=1e-12)
            assert found["infinite"] == found["plain infinite"]
            assert found["clipped"] == pytest.approx(0.1, rel=1e-4)


def test_optimizer_groups_go_by_the_original_parameters(ranks: RankPool) -> None:
    found = ranks.run(f"{JOBS}:decay_groups", ranks=2, plan=plan_bytes("llama", 2, dp_shard=2))
    model = build("llama", torch.float64).model
    assert set(found[0]) == {name for name, p in model.named_parameters() if p.ndim >= 2}


def test_sizes_that_do_not_divide(ranks: RankPool) -> None:
    model, (x, target) = jobs.uneven_case()
    loss = model(x, target)
    loss.backward()
    found = ranks.run(f"{JOBS}:uneven", ranks=4, plan=plan_bytes("uneven", 4, dp_shard=4))
    assert found[3]["shapes"]["narrow.bias"] in {(0,), (6,)}
    assert found[0]["shapes"]["scale"] == ()
    for answer in found:
        assert answer["loss"] == pytest.approx(loss.item(), rel=1e-12)
        assert set(answer["grads"]) == {n for n, p in model.named_parameters() if p.requires_grad}
        for name, grad in answer["grads"].items():
            torch.testing.assert_close(grad, model.get_parameter(name).grad, rtol=1e-10, atol=1e-14)
