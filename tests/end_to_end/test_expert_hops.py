"""Tokens go to experts in the form that the plan says: by the prices of two nodes, or as pinned; and give the same."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from hpsearch.capture import CapturedGraph, capture
from hpsearch.cluster import Cluster, Tier
from hpsearch.errors import LegalityError
from hpsearch.lower import lower
from hpsearch.lower.executor import Bound
from hpsearch.plan import Plan
from hpsearch.plan.explain import explain
from hpsearch.search import search
from tests.end_to_end import experts
from tests.end_to_end.models import ROWS, Case, build
from tests.end_to_end.parity import DTYPES, double_throughout, reference
from tests.end_to_end.ranks import RankPool
from tests.end_to_end.slow import slow_devices
from tests.end_to_end.test_parity import LIMITS
from tests.lower.reference import cut, plain_step
from tests.lower.simulate import run_ranks

FAMILY, RECIPE = "qwen3_moe_skewed", "fp64"
"""Three of eight experts a token; one expert that every token meets and one that none does."""


def two_nodes() -> Cluster:
    """Of two devices each, links of 1 TB/s inside and 10 GB/s between."""
    alone = slow_devices(4)
    tiers = Tier("node", 2, "wire", 1e12, 1e-9), Tier("fabric", 4, "wire", 1e10, 1e-8)
    return Cluster("two slow nodes", 4, alone.device, tiers, "for tests")


@cache
def case(family: str = FAMILY) -> Case:
    """With the number of targets, so that its loss is the same over any rows."""
    found = build(family, DTYPES[RECIPE])
    return replace(found, batch={**found.batch, "num_items_in_batch": (found.batch["labels"][:, 1:] != -100).sum()})


@cache
def captured(family: str = FAMILY) -> CapturedGraph:
    with double_throughout(family, RECIPE):
        return capture(case(family).model, case(family).batch, recipe=RECIPE, rows=ROWS)


@cache
def plan(family: str = FAMILY, **pins: object) -> Plan:
    fix = {"ep": 4, "micro_batches": 1, "recompute": "none", **pins}
    return search(captured(family).graph, two_nodes(), global_batch=ROWS, fix=fix)


def test_both_forms_are_the_plain_model() -> None:
    """The chosen one, hop by hop over nodes and inside, and each copy on its own; ranks are threads."""
    together, apart = plan(), plan(ep_kind="apart")
    assert together.mesh.axis("ep").hops == (2, 2)
    assert apart.mesh.axis("ep").hops == ()
    for made in (together, apart):
        hold_to_plain(made)


def test_experts_over_cut_sequences_are_the_plain_model() -> None:
    """Experts on ranks that have pieces of the same sequences, and other sequences; at rest each has its own."""
    made = plan(ep=2, cp=2, ep_over="cp")
    assert made.parameter("model.layers.0.mlp.experts.down_proj").stored == "cp:S0 ep:S0"
    assert made.parameter("model.layers.0.mlp.experts.down_proj").gradient == "cp:S0 ep:S0"
    assert {c.axis for c in made.file.collectives if c.kind == "all_to_all" and "Layer/" in c.what} >= {"cp/0", "ep/0"}
    hold_to_plain(made)


def test_latent_attention_over_cut_sequences_is_the_plain_models() -> None:
    """Heads of queries and keys are wider than those of values; keys are written in two parts into one tensor."""
    hold_to_plain(plan("deepseek_v3_skewed", ep=2, cp=2), "deepseek_v3_skewed")


def hold_to_plain(made: Plan, family: str = FAMILY) -> None:
    """Loss and every gradient of each rank."""
    with double_throughout(family, RECIPE):
        model, batch = case(family).model, case(family).batch
        wanted_loss, wanted = plain_step(model, [batch], sums=False)
        program, mesh = lower(captured(family), made), made.mesh
        state, slots = dict(model.named_parameters()), {slot.fqn: slot for slot in program.params}
        inputs, buffers = captured(family).batch.flatten(batch), dict(model.named_buffers())

        def work(rank: int, bound: Bound) -> Any:
            params = {n: cut(state[n].detach(), s.stored, mesh, rank) for n, s in slots.items()}
            mine = [cut(t, s.layout, mesh, rank) for t, s in zip(inputs, program.inputs, strict=True)]
            return bound.step(params, buffers, [mine])

        for rank, (loss, gradients) in enumerate(run_ranks(program, work)):
            torch.testing.assert_close(loss, wanted_loss, rtol=1e-12, atol=0)
            for name, gradient in gradients.items():
                whole = wanted[name]
                assert whole is not None
                limit = 1e-10 * float(whole.abs().max())
                torch.testing.assert_close(gradient, cut(whole, slots[name].stored, mesh, rank), rtol=0, atol=limit)


@pytest.mark.dist
@pytest.mark.exhaustive
def test_both_forms_run(ranks: RankPool, tmp_path: Path) -> None:
    """The same on gloo ranks."""
    path = tmp_path / "trace.pt"
    reference(FAMILY, RECIPE, path)
    for made in (plan(), plan(ep_kind="apart")):
        results = ranks.run(
            f"{experts.__name__}:compare", ranks=4, family=FAMILY, recipe=RECIPE, plan=made.content, path=str(path)
        )
        worst = {what: max(result[what] for result in results) for what in LIMITS[RECIPE]}
        assert all(worst[what] <= limit for what, limit in LIMITS[RECIPE].items()), worst


def test_the_plan_says_which_form() -> None:
    """In its list of collectives and in words; copies that travel together are fewer bytes between nodes."""
    together, apart = plan(), plan(ep_kind="apart")
    outside = {}
    for made, axes in ((together, {"ep/0", "ep/1"}), (apart, {"ep"})):
        moves = [c for c in made.file.collectives if c.kind == "all_to_all"]
        assert {c.axis for c in moves} == axes
        outside[made] = sum(c.nbytes * c.calls for c in moves if c.axis in ("ep", "ep/0"))
    # 3 of 8 experts meet 2 (1 - 4 / 56) of two nodes, so 1.86 copies cross where 3 did
    assert outside[together] / outside[apart] == pytest.approx(2 * (1 - 4 / 56) / 3, rel=1e-3)
    assert "in hops of 2 x 2" in words(together)
    assert "each copy of a token on its own" in words(apart)


def test_hops_that_join_no_copies_are_refused() -> None:
    with pytest.raises(LegalityError, match=r"exchange relayed .*: expected a form that saves bytes, but it takes"):
        plan(ep_kind="relayed")
    with pytest.raises(LegalityError, match=r"fix ep_kind=apart: expected ep of at least 2 beside it, but found ep=1"):
        search(captured().graph, two_nodes(), global_batch=ROWS, fix={"ep_kind": "apart"})


def words(made: Plan) -> str:
    from rich.console import Console

    console = Console(width=200)
    with console.capture() as shown:
        console.print(explain(made))
    return shown.get()
