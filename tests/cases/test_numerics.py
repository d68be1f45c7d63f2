"""One number whatever the layout: losses, gradients, norms, clipping, weight decay."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from hpsearch.capture import capture
from hpsearch.errors import BatchError, LoweringError
from hpsearch.graph import Op, OpGraph, Rule
from hpsearch.layout import Mesh
from hpsearch.lower import lower
from hpsearch.plan.stage_words import pipeline_words
from hpsearch.run.stepper import check_equal_targets
from tests.cases import jobs, routed
from tests.cases.parity import generator, planned
from tests.cases.plans import search, slow_devices
from tests.cases.staged import staged
from tests.end_to_end import experts, sequences
from tests.end_to_end.parity import reference
from tests.end_to_end.ranks import RankPool
from tests.end_to_end.test_experts import plan as experts_plan
from tests.end_to_end.test_sequences import plan as sequences_plan
from tests.lower.plans import make_plan
from tests.lower.reference import compare

JOBS = jobs.__name__


class Priced(nn.Module):
    """A token costs what the table says, so that losses are round numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.cost = nn.Embedding(8, 1)
        self.cost.weight = nn.Parameter(torch.arange(8.0).double().view(8, 1))

    def forward(self, ids: torch.Tensor, labels: torch.Tensor, num_items_in_batch: torch.Tensor) -> torch.Tensor:
        return (self.cost(ids).squeeze(-1) * labels.ne(-100)).sum() / num_items_in_batch


def test_num_01_every_valid_token_counts_once() -> None:
    ids = torch.tensor([[1, 2, 3], [5, 7, 7]])
    labels = torch.tensor([[1, 2, 3], [5, -100, -100]])
    batch = {"ids": ids, "labels": labels, "num_items_in_batch": torch.tensor(4)}
    assert Priced()(**batch).item() == 11 / 4
    errors, plan, _ = planned(Priced(), [batch], 2, {"dp_shard": 2})
    assert plan.mesh.num_data_ranks == 2
    assert (errors.loss, errors.gradient) == (0.0, 0.0)
    more = batch | {"num_items_in_batch": torch.tensor(6)}
    fewer = {"ids": ids.flip(0), "labels": labels.roll(1, 1).flip(0), "num_items_in_batch": torch.tensor(6)}
    errors, _, program = planned(Priced(), [more, fewer], 2, {"dp_replicate": 2})
    assert program.loss_reduction == "sum_over_count"
    assert errors.loss <= 1e-15
    assert errors.gradient <= 1e-15


def test_num_01_a_mean_of_unequal_means_is_refused() -> None:
    with pytest.raises(BatchError, match=r"averages over valid targets itself, but the micro-batches have \[3, 1\]"):
        check_equal_targets((3, 1))


class Normed(nn.Module):
    """A block with norms before, inside (query and key) and after attention."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.before, self.after = nn.RMSNorm(16), nn.RMSNorm(16)
        self.query_norm, self.key_norm = nn.RMSNorm(4), nn.RMSNorm(4)
        self.qkv, self.out = nn.Linear(16, 48, bias=False), nn.Linear(16, 16, bias=False)
        with torch.no_grad():
            for norm in (self.before, self.after, self.query_norm, self.key_norm):
                norm.weight.add_(torch.randn(norm.weight.shape), alpha=0.1)
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (t.unflatten(-1, (4, 4)) for t in self.qkv(self.before(x)).chunk(3, -1))
        q, k, v = (t.transpose(1, 2) for t in (self.query_norm(q), self.key_norm(k), v))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return self.after(x).tanh().square().mean()


SEQUENCE = 8
"""A size that no other dim of `Normed` has."""


def prefer_sequence(graph: OpGraph, op: Op, rules: list[Rule]) -> Rule:
    """The rule that cuts the most sequence dims among what the op takes and makes; sums are left pending."""

    def cuts(rule: Rule) -> int:
        pairs = zip(op.inputs + op.outputs, rule[0] + rule[1], strict=True)
        return sum(text[0] == "S" and graph.values[v].fixed[int(text[1:])] == SEQUENCE for v, text in pairs)

    return max(rules, key=lambda rule: (cuts(rule), rule[1].count("P"), rule))


def test_num_03_norm_gradients_under_a_cut_sequence() -> None:
    model, batch = Normed(), (torch.randn(4, SEQUENCE, 16, generator=generator()).double(),)
    captured = capture(model, batch, recipe="fp64")
    plan = make_plan(captured.graph, Mesh.of(tp=2), 4, choose=prefer_sequence)
    assert sum("->S1" in by_axis.get("tp", "") for by_axis in plan.file.placements["outer"].values()) > 5
    partial = {p.pattern for p in plan.file.parameters if p.gradient == "tp:P"}
    assert {"before.weight", "after.weight", "query_norm.weight", "key_norm.weight"} <= partial, "parts of the tokens"
    errors = compare(model, [batch], captured, lower(captured, plan))
    assert errors.gradient <= 1e-12


@pytest.mark.dist
def test_num_05_gradients_of_experts_are_averaged_over_all_tokens_once(ranks: RankPool, tmp_path: Path) -> None:
    """Four data ranks, two ranks of experts: gradients, and parameters after three steps, are those of one process."""
    reference("mixtral", "fp64", tmp_path / "trace.pt")
    made = experts_plan("mixtral", "fp64", "ep-2 x fsdp-2")
    work = f"{experts.__name__}:{experts.compare.__name__}"
    told = {"family": "mixtral", "recipe": "fp64", "plan": made.content, "path": str(tmp_path / "trace.pt")}
    for errors in ranks.run(work, ranks=4, **told):
        assert errors["gradient"] <= 1e-10
        assert errors["parameter"] <= 1e-10


@pytest.mark.dist
def test_num_06_gradient_norm_counts_every_element_once(ranks: RankPool) -> None:
    for found in ranks.run(f"{JOBS}:norms", ranks=2):
        assert found["two"] == pytest.approx(math.sqrt(9 + 16 + 16), rel=1e-12)
        assert found["infinite"] == 4.0
        assert found["clipped"] == pytest.approx(1.0, rel=1e-6)


class Noisy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = self.linear(x)
        return (made + torch.rand_like(made) if self.training else made).square().mean()


def test_num_08_dropout_and_initial_values_are_the_same_under_every_layout(ranks: RankPool) -> None:
    losses = [ranks.run(f"{JOBS}:dropped", ranks=4, fix={axis: 4})[0] for axis in ("dp_shard", "dp_replicate", "tp")]
    losses += ranks.run(f"{JOBS}:dropped", ranks=1, fix={})
    for found in losses:
        assert found == pytest.approx(losses[0], rel=1e-12)
    assert len(set(losses[0])) == 3, "each step has masks of its own"


def test_num_08_other_random_numbers_are_refused_on_several_ranks() -> None:
    captured = capture(Noisy(), (torch.empty(4, 8),), recipe="fp32")
    for fix in ({"dp_shard": 2}, {"tp": 2}):
        plan = search(captured.graph, slow_devices(2), global_batch=4, fix=fix)
        with pytest.raises(LoweringError, match=r"test_numerics.py:\d+\): draws random numbers"):
            lower(captured, plan)
    alone = search(captured.graph, slow_devices(1), global_batch=4, fix={"micro_batches": 1})
    assert lower(captured, alone).mesh.num_ranks == 1
    quiet = capture(Noisy().eval(), (torch.empty(4, 8),), recipe="fp32")
    assert lower(quiet, search(quiet.graph, slow_devices(2), global_batch=4)).mesh.num_ranks == 2


def test_num_10_gradients_are_reduced_in_fp32() -> None:
    captured = capture(Normed(), (torch.empty(8, 8, 16),), recipe="bf16")
    for fix in ({"dp_replicate": 4}, {"dp_shard": 4}, {"dp_shard": 2, "tp": 2}):
        plan = search(captured.graph, slow_devices(4), global_batch=8, fix=fix)
        reduced = [c for c in plan.file.collectives if c.phase == "reduce"]
        assert reduced
        assert {c.dtype for c in reduced} == {"float32"}
    weight = next(c for c in reduced if c.what == "qkv.weight")
    assert weight.nbytes % 4 == 0


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(24, 8), nn.Linear(8, 24, bias=False)
        self.head.weight = self.embed.weight
        self.double()

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.head(self.embed(ids).tanh()).flatten(0, 1), ids.flatten())


def test_num_11_a_tied_weight_is_one_weight() -> None:
    batch = (torch.randint(0, 24, (8, 6), generator=generator()),)
    for devices, fix in ((4, {"dp_shard": 4}), (2, {"tp": 2}), (2, {"dp_replicate": 2})):
        errors, plan, program = planned(Tied(), [batch], devices, fix)
        assert errors.gradient <= 1e-12, "both uses are in the gradient"
        assert [p.pattern for p in plan.file.parameters] == ["embed.weight"]
        assert plan.file.model.parameters == 24 * 8
        assert [(slot.fqn, slot.aliases) for slot in program.params] == [("embed.weight", ("head.weight",))]


class TiedStages(nn.Module):
    """Embedding and head are one tensor, with blocks in between."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(24, 8)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4))
        self.head = nn.Linear(8, 24, bias=False)
        self.head.weight = self.embed.weight
        self.double()

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = x + layer(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_num_11_a_tied_weight_of_two_stages_is_one_weight(schedule: str) -> None:
    ids = torch.randint(0, 24, (8, 6), generator=generator())
    found = staged(TiedStages(), (ids,), {"pp": 2, "micro_batches": 4, "schedule": schedule})
    assert found.worst <= 1e-12, "both uses, each on a stage of its own"
    assert found.program.holders["embed.weight"] == (0, 1)
    assert [p.pattern for p in found.plan.file.parameters if p.graph == "outer"] == ["embed.weight"]
    assert found.plan.file.pipeline is not None
    told = "embed.weight stands on stages 0 and 1; its gradient is summed over them once a step."
    assert pipeline_words(found.plan.file.pipeline).endswith(told)


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(8, 8)
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(self.linear(x).tanh()).square().mean()


def test_num_13_a_weight_used_twice_is_counted_twice_and_no_more() -> None:
    batch = (torch.randn(8, 8, generator=generator()).double(),)
    for fix in ({"dp_shard": 2}, {"tp": 2}):
        errors, _, _ = planned(Twice(), [batch, (batch[0] + 1,)], 2, fix)
        assert errors.gradient <= 1e-12


class TwiceInStages(nn.Module):
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.linear(self.linear(x).tanh()).tanh()

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(self.Block() for _ in range(5))
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", "zbv"])
def test_num_13_a_split_backward_counts_both_uses_once(schedule: str) -> None:
    batch = (torch.randn(8, 8, generator=generator()).double(),)
    found = staged(TwiceInStages(), batch, {"pp": 2, "micro_batches": 4, "schedule": schedule})
    assert found.worst <= 1e-12


@pytest.mark.dist
def test_num_15_weight_decay_goes_by_the_original_shapes(ranks: RankPool) -> None:
    model, batch = jobs.decayed_case()
    graph = capture(model, batch, recipe="fp64").graph
    plan = search(graph, slow_devices(2), global_batch=8, fix={"dp_shard": 2, "linear.bias": "dp_shard:S0"})
    assert plan.parameter("linear.bias").stored == "dp_shard:S0"
    for changed in ranks.run(f"{JOBS}:decay", ranks=2, plan=plan.content):
        assert changed == ["linear.weight"]


@pytest.mark.dist
def test_num_16_routers_learn_and_unused_experts_have_zeros(ranks: RankPool, tmp_path: Path) -> None:
    """Every token goes to expert 0 and none to expert 1; updates of both are those of one process."""
    family = "qwen3_moe_skewed"
    reference(family, "fp64", tmp_path / "trace.pt")
    made = experts_plan(family, "fp64", "ep-2")
    told = {"family": family, "plan": made.content}
    work = f"{experts.__name__}:{experts.compare.__name__}"
    for errors in ranks.run(work, ranks=2, recipe="fp64", path=str(tmp_path / "trace.pt"), **told):
        assert errors["gradient"] <= 1e-10
        assert errors["parameter"] <= 1e-10
    even = experts_plan("qwen3_moe", "fp64", "ep-2")
    for _, largest in ranks.run(f"{routed.__name__}:step", ranks=2, family="qwen3_moe", plan=even.content):
        assert all(value for name, value in largest.items() if name.endswith("mlp.gate.weight")), "what experts did"
    for _, largest in ranks.run(f"{routed.__name__}:step", ranks=2, **told):
        assert None not in largest.values(), "zero, not absent"


@pytest.mark.dist
@pytest.mark.parametrize("kind", ["ring", "ulysses"])
def test_num_18_windows_and_positions_survive_a_cut_sequence(kind: str, ranks: RankPool, tmp_path: Path) -> None:
    """Layers with a window of five and one without, rotary positions in both, on two ranks of sequences."""
    reference("mixed_windows", "fp64", tmp_path / "trace.pt")
    made = sequences_plan("mixed_windows", kind, "cp-2")
    told = {"family": "mixed_windows", "recipe": "fp64", "plan": made.content, "path": str(tmp_path / "trace.pt")}
    for errors in ranks.run(f"{sequences.__name__}:{sequences.compare.__name__}", ranks=2, **told):
        assert errors["gradient"] <= 1e-10


class Frozen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.base, self.adapter = nn.Linear(8, 8), nn.Linear(8, 8)
        self.base.requires_grad_(False)
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.base(x) + self.adapter(x)).tanh().square().mean()


def test_frozen_parameters_get_no_gradient_and_no_reduction() -> None:
    """Not a case of the list; the other half of NUM-06 and NUM-15: what is frozen is in no norm and no group."""
    batch = (torch.randn(8, 8, generator=generator()).double(),)
    errors, plan, program = planned(Frozen(), [batch], 2, {"dp_shard": 2})
    assert errors.gradient <= 1e-12
    assert {slot.fqn for slot in program.params if slot.trainable} == {"adapter.weight", "adapter.bias"}
    assert not [c for c in plan.file.collectives if c.phase == "reduce" and c.what.startswith("base.")]
    thawed = replace(capture(Frozen().requires_grad_(True), batch, recipe="fp64").graph)
    free = search(thawed, slow_devices(2), global_batch=8, fix={"dp_shard": 2})
    assert free.file.predicted.bytes["optimizer"] > plan.file.predicted.bytes["optimizer"]
