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
from hpsearch.estimate import ModelShape, ParallelLayout, estimate
from hpsearch.estimate.estimate import price
from hpsearch.estimate.shape import transformer
from hpsearch.graph import ModelGraph
from hpsearch.plan import Plan
from hpsearch.space import best
from hpsearch.space.layout_file import layout_file, save
from hpsearch.space.pins import space_of
from tests.cases import configs, routed
from tests.cases.parity import generator
from tests.cases.plans import graph_of, h100, search, slow_devices
from tests.cli.conftest import Command, Ended
from tests.end_to_end.ranks import RankPool
from tests.end_to_end.test_experts import plan as experts_plan
from tests.estimate.stated import shape_of_config
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


@pytest.mark.slow
@pytest.mark.timeout(900)
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


SEARCHED = {"pp": "2", "vpp": "1", "micro_batch": "1", "recompute": "full"}
SMALL = ModelShape("small", 512, 8, 4, 64, 4096, transformer(8, 0, 0), ffn=1024)
JOB = ["--cluster", "h100-sxm-roce400", "--devices", "2", "--global-batch", "8", "--seq-len", "64"]


def searched(path: Path, pins: dict[str, str] | None = None, batch: int = 8, seq_len: int = 64) -> ParallelLayout:
    """A layout file of SMALL on two devices, and its layout."""
    space = space_of(SMALL, h100(2), pins or SEARCHED, global_batch=batch, seq_len=seq_len)
    found = best(space)
    save(layout_file(space, found), path)
    return found.best.layout


def priced(hpsearch: Command, tmp_path: Path, file: Path, layers: int = 8) -> Ended:
    """`hpsearch estimate --layout` of a Llama with the sizes of SMALL."""
    config = {"architectures": ["LlamaForCausalLM"], "hidden_size": 512, "num_attention_heads": 8,
              "num_key_value_heads": 4, "intermediate_size": 1024, "vocab_size": 4096}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": layers}))
    return hpsearch("estimate", "--model", tmp_path / "config.json", *JOB, "--layout", file)


def test_rob_01_a_layout_is_for_its_sequence_and_batch(hpsearch: Command, tmp_path: Path) -> None:
    file = tmp_path / "layout.json"
    searched(file, batch=16, seq_len=128)
    found = priced(hpsearch, tmp_path, file)
    assert (found.code, found.stdout) == (1, "")
    assert "expected global_batch = 8, but it was searched for 16. Search again." in found.stderr
    searched(file, seq_len=128)
    assert "expected seq_len = 64, but it was searched for 128." in priced(hpsearch, tmp_path, file).stderr
    layout = searched(file)
    shorter = replace(layout, seq_len=32, global_batch=16)
    assert estimate(SMALL, shorter, h100(2)).step_s != estimate(SMALL, layout, h100(2)).step_s


LAYOUT_DAMAGES: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "older schema": (edited(lambda t: t.update(schema_version=0)), "expected schema 1, but found 0"),
    "unknown key": (edited(lambda t: t.update(pipeline=2)), "pipeline: Extra inputs are not permitted"),
    "unknown field": (edited(lambda t: t["layout"].update(pipeline=2)), "'pipeline' is unknown"),
    "truncated": (lambda content: content[:300], r"is no layout file: .*Invalid JSON: EOF .* line \d+ column \d+"),
    "not a number": (
        lambda content: re.sub(rb'"step_s": [\d.e-]+', b'"step_s": NaN', content),
        r"step_s: Input should be a finite number",
    ),
    "a layer too many": (edited(lambda t: t["layout"].update(cut=[4, 5])), r"8 layers .* found 9 in cut = 4\+5"),
    "a degree of zero": (edited(lambda t: t["layout"].update(tp="two")), "layout, tp: Input should be a valid integer"),
}  # fmt: skip


@pytest.mark.parametrize("damage", list(LAYOUT_DAMAGES))
def test_rob_03_damage_of_a_layout_is_named(hpsearch: Command, tmp_path: Path, damage: str) -> None:
    change, message = LAYOUT_DAMAGES[damage]
    file = tmp_path / "layout.json"
    searched(file)
    file.write_bytes(change(file.read_bytes()))
    found = priced(hpsearch, tmp_path, file)
    assert found.code == 1
    assert re.search(message, found.stderr), found.stderr
    assert "Traceback" not in found.stderr


def test_rob_03_a_layout_of_another_model_is_refused(hpsearch: Command, tmp_path: Path) -> None:
    searched(tmp_path / "layout.json")
    assert priced(hpsearch, tmp_path, tmp_path / "layout.json").code == 0
    found = priced(hpsearch, tmp_path, tmp_path / "layout.json", layers=9)
    assert f"expected {SMALL.total_params} parameters, those of small, but LlamaForCausalLM has" in found.stderr


def test_rob_06_a_searched_pin_and_a_limit_that_do_not_go_together() -> None:
    """States whole on every one of 8 devices of 16 GiB: 8.03e9 parameters of 18 bytes."""
    shape = shape_of_config(configs.LLAMA_8B | {"model_type": "llama"})
    pins = {"zero": "0", "tp": "1", "pp": "1", "cp": "1"}
    with pytest.raises(InfeasibleError) as caught:
        best(space_of(shape, h100(8, memory_gib=16), pins, global_batch=8, seq_len=2048))
    text = str(caught.value)
    assert caught.value.exit_code == 3
    least = re.search(r"fits in 17.18 GB, but the leanest found with the pins zero = 0, [^()]* needs ([\d.]+) GB", text)
    assert least
    assert 18 * 8.03 < float(least[1]) < 20 * 8.03
    assert "of which optimizer 96.36 GB" in text
    assert "Without the pins the leanest found needs" in text
    assert "at least 8 such devices have room for them" in text
    with pytest.raises(InfeasibleError, match=r"Without the pins it fits\."):
        best(space_of(shape, h100(8, memory_gib=40), pins, global_batch=8, seq_len=2048))
    assert best(space_of(shape, h100(8, memory_gib=40), {"micro_batch": "1"}, global_batch=8, seq_len=2048), gap=0.01)


def test_rob_10_a_search_for_one_device() -> None:
    found = best(space_of(SMALL, h100(1), {}, global_batch=4, seq_len=64)).best.layout
    assert {getattr(found, name) for name in ("tp", "cp", "pp", "ep", "etp", "dp", "vpp", "devices")} == {1}
    made = price(SMALL, found, h100(1))
    assert (made.reduce_s, made.gather_s, made.hop_s) == (0.0, 0.0, 0.0)


def test_rob_11_a_search_asks_for_its_cluster_by_name(hpsearch: Command, tmp_path: Path) -> None:
    found = hpsearch("search", "--model", tmp_path / "config.json")
    assert found.code == 2
    assert "Missing option '--cluster'" in found.stderr
    assert "Traceback" not in found.stderr


def test_rob_13_a_layout_is_bound_to_its_cluster(hpsearch: Command, tmp_path: Path) -> None:
    there = Cluster.load("a100-sxm-selene", devices=2)
    space = space_of(SMALL, there, SEARCHED, global_batch=8, seq_len=64)
    save(layout_file(space, best(space)), tmp_path / "layout.json")
    found = priced(hpsearch, tmp_path, tmp_path / "layout.json")
    assert "expected cluster = h100-sxm-roce400, but it was searched for a100-sxm-selene." in found.stderr
    same_name = replace(h100(2), device=replace(h100(2).device, memory_bytes=24 * 2**30))
    space = space_of(SMALL, same_name, SEARCHED, global_batch=8, seq_len=64)
    save(layout_file(space, best(space)), tmp_path / "layout.json")
    found = priced(hpsearch, tmp_path, tmp_path / "layout.json")
    said = " ".join(found.stderr.split())
    assert f"({h100(2).digest[:12]}), but it was searched with others ({same_name.digest[:12]})" in said


@pytest.mark.dist
def test_rob_05_stages_with_experts_start_collectives_in_one_order(ranks: RankPool) -> None:
    made = experts_plan("mixtral", "fp64", "pp-2 x ep-2")
    found = ranks.run(f"{routed.__name__}:step", ranks=4, family="mixtral", plan=made.content)
    queues = [launches for launches, _ in found]
    groups = {group for queue in queues for group, _ in queue}
    assert {(0, 1), (2, 3)} <= groups, "experts' groups lie inside a stage"
    for group in groups:
        own = [[name for other, name in queues[rank] if other == group] for rank in group]
        assert own[0]
        assert all(sequence == own[0] for sequence in own)
    assert routed.drained(queues)
