"""Plans used again, damaged, for other machines; one device; inputs in nested dicts; infeasible pins."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import hpsearch as package
from hpsearch.capture import capture
from hpsearch.cluster import Cluster
from hpsearch.errors import BatchError, InfeasibleError, PlanError
from hpsearch.graph import ModelGraph
from hpsearch.plan import Plan
from tests.cases import configs
from tests.cases.parity import generator
from tests.cases.plans import graph_of, h100, search, slow_devices
from tests.cli.conftest import Command
from tests.search.toy import toy_cluster, toy_model


class Tokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(24, 8), nn.Linear(8, 24)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.head(self.embed(ids).tanh()).flatten(0, 1), ids.flatten())


def ids(rows: int, length: int) -> torch.Tensor:
    return torch.randint(0, 24, (rows, length), generator=generator())


def graph(rows: int, length: int) -> ModelGraph:
    return capture(Tokens(), (ids(rows, length),), recipe="fp32").graph


def test_rob_01_a_plan_is_for_its_sequence_and_batch(tmp_path: Path) -> None:
    plan = search(graph(16, 32), slow_devices(1), global_batch=16)
    plan.save(tmp_path / "plan.json")
    with pytest.raises(
        PlanError, match=r"input arg0 is \[16, 32\] int64 in the plan and \[16, 4\] int64 for the model"
    ):
        Plan.load(tmp_path / "plan.json", model=graph(16, 4))
    with pytest.raises(PlanError, match=r"input arg0 is \[16, 32\] int64 in the plan and \[16, 4\]"):
        package.compile(Tokens(), plan=plan, recipe="fp32", example=(ids(16, 4),))
    with pytest.raises(BatchError, match="expected the global batch of 16 rows, but found 32"):
        package.compile(Tokens(), plan=plan, recipe="fp32", example=(ids(32, 32),))
    again = search(graph(32, 4), slow_devices(1), global_batch=32)
    assert again.file.predicted.step_s != plan.file.predicted.step_s


def renamed(model: ModelGraph) -> ModelGraph:
    block = model.blocks["Block"]
    params = {("gate" if k == "w1" else k): v for k, v in block.params.items()}
    grads = {("gate" if k == "w1" else k): v for k, v in block.param_grads.items()}
    return replace(model, blocks={"Block": replace(block, params=params, param_grads=grads)})


def edited(change: Callable[[dict[str, Any]], object]) -> Callable[[bytes], bytes]:
    def edit(content: bytes) -> bytes:
        tree = json.loads(content)
        change(tree)
        return json.dumps(tree, indent=1).encode()

    return edit


DAMAGES: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "older schema": (edited(lambda t: t.update(schema_version="hpsearch.plan/0")), "the older hpsearch.plan/0"),
    "unknown key": (edited(lambda t: t["job"].update(pipeline=2)), "unknown key job.pipeline"),
    "truncated": (lambda content: content[:700], r"expected JSON, but .* at line \d+, column \d+"),
    "not a number": (
        lambda content: re.sub(rb'"step_s": [^,]*', b'"step_s": NaN', content),
        r"expected finite numbers, but found NaN at line \d+, column \d+",
    ),
    "the same parameter twice": (edited(lambda t: t["parameters"].append(t["parameters"][0])), "stands twice"),
}


@pytest.mark.parametrize("damage", list(DAMAGES))
def test_rob_03_damage_is_named(tmp_path: Path, damage: str) -> None:
    change, message = DAMAGES[damage]
    content = search(toy_model(), toy_cluster(), global_batch=8).content
    (tmp_path / "plan.json").write_bytes(change(content))
    with pytest.raises(PlanError, match=message):
        Plan.load(tmp_path / "plan.json")


def test_rob_03_another_model_is_named_by_its_first_difference() -> None:
    content = search(toy_model(2), toy_cluster(), global_batch=8).content
    assert Plan.from_bytes(content, model=toy_model(2))
    with pytest.raises(PlanError, match=r"layers\.\*\.w1 stands for 2 tensors in the plan and 3 in the model"):
        Plan.from_bytes(content, model=toy_model(3))
    with pytest.raises(PlanError, match=r"parameter layers\.\*\.w1 \[32, 16\] is in the plan and not in the model"):
        Plan.from_bytes(content, model=renamed(toy_model(2)))


def test_rob_06_a_pin_and_a_limit_that_do_not_go_together() -> None:
    model = graph_of(configs.LLAMA_8B, num_hidden_layers=2)
    pin = {"lm_head": "R"}
    with pytest.raises(InfeasibleError) as caught:
        search(model, h100(8, memory_gib=8), global_batch=8, fix=pin)
    text = str(caught.value)
    assert caught.value.exit_code == 3
    assert "expected a plan within 7.7 GB a device" in text
    assert "the least found with the pins lm_head=R is" in text
    assert "Without the pins it fits." in text
    assert search(model, h100(8, memory_gib=8), global_batch=8).file.predicted.peak_bytes <= 0.9 * 8 * 2**30
    enough = re.search(r"a device memory of ([\d.]+) GiB would be enough", text)
    assert enough
    kept = search(model, h100(8, memory_gib=float(enough[1])), global_batch=8, fix=pin)
    assert kept.parameter("lm_head.weight").stored == "R"
    with pytest.raises(InfeasibleError, match="Without the pins it does not fit either"):
        search(model, h100(8, memory_gib=1), global_batch=8, fix=pin)


class Nested(nn.Module):
    """Takes a dict, gives a dict."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(24, 8), nn.Linear(8, 24)

    def forward(self, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        logits = self.head(self.embed(batch["ids"]))
        each = F.cross_entropy(logits.flatten(0, 1), batch["ids"].flatten(), reduction="none")
        return {"loss": (each * batch["mask"].flatten()).mean(), "logits": logits}


def test_rob_08_every_leaf_has_its_layout_and_its_name() -> None:
    batch = ({"ids": ids(8, 4), "mask": torch.rand(8, 4, generator=generator())},)
    model = capture(Nested(), batch, recipe="fp32").graph
    plan = search(model, slow_devices(2), global_batch=8, fix={"dp_shard": 2})
    found = {entry.name: (entry.shape, entry.layout) for entry in plan.file.inputs}
    assert found == {"arg0.ids": ((8, 4), "dp_shard:S0"), "arg0.mask": ((8, 4), "dp_shard:S0")}
    alone = search(model, slow_devices(1), global_batch=8)
    parallel = package.compile(Nested(), plan=alone, recipe="fp32", example=batch)
    expected = Nested()(*batch)["loss"].item()
    assert parallel.step(batch).item() == pytest.approx(expected, rel=1e-6)
    with pytest.raises(BatchError, match=r"batch leaf arg0.mask: expected local shape \[8, 4\].*found \[7, 4\]"):
        parallel.step(({"ids": batch[0]["ids"], "mask": batch[0]["mask"][:7]},))


def test_rob_10_one_device() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    small = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(**small, num_hidden_layers=2, vocab_size=64))
    tokens = torch.randint(0, 64, (4, 8), generator=generator())
    batch = {"input_ids": tokens, "labels": tokens}
    captured = capture(model, batch, recipe="fp32")
    plan = search(captured.graph, slow_devices(1), global_batch=4, fix={"micro_batches": 1, "recompute": "none"})
    assert plan.file.mesh == ()
    assert plan.file.collectives == ()
    parallel = package.compile(model, plan=plan, recipe="fp32", example=batch)
    assert "c10d" not in parallel.program.code.partition("def ")[2]
    expected = model(**batch, num_items_in_batch=torch.tensor(28)).loss
    expected.backward()
    loss = parallel.step(batch)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    for name, parameter in parallel.named_parameters():
        wanted = model.get_parameter(name).grad
        assert parameter.grad is not None
        assert wanted is not None
        torch.testing.assert_close(parameter.grad.full_tensor(), wanted, rtol=1e-5, atol=1e-7, msg=name)


def test_rob_11_no_cluster_is_asked_for_by_name(hpsearch: Command, tmp_path: Path) -> None:
    path = tmp_path / "gpt2.json"
    path.write_text(json.dumps(configs.GPT2))
    found = hpsearch("plan", "--model", path)
    assert found.code == 2
    assert "Missing option '--cluster'" in found.stderr
    assert not set("{}") & set(found.stdout + found.stderr)
    assert "Traceback" not in found.stderr


def test_rob_13_a_plan_is_bound_to_its_cluster(tmp_path: Path) -> None:
    there = Cluster.load("a100-sxm-selene", devices=8)
    plan = search(toy_model(), there, global_batch=8)
    plan.save(tmp_path / "plan.json")
    entry = plan.file.cluster
    assert (entry.device, entry.devices, entry.digest) == (there.device.name, 8, there.digest)
    here = toy_cluster(devices=8, memory_bytes=24 * 2**30)
    with pytest.raises(PlanError) as caught:
        Plan.load(tmp_path / "plan.json", cluster=here)
    text = str(caught.value)
    assert "made for another cluster: name is 'a100-sxm-selene' in the plan and 'toy' here" in text
    assert f"memory_bytes is {there.device.memory_bytes} in the plan and {24 * 2**30} here" in text
    assert f"device is {there.device.name!r} in the plan and 'toy' here" in text
    assert "Search again for this cluster" in text
