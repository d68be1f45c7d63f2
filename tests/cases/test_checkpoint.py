"""What is saved under one layout is all there under another, and nothing less ever loads."""

from __future__ import annotations

import json
import re
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from hpsearch.capture import capture
from hpsearch.graph import ModelGraph
from tests.cases import jobs
from tests.cases.plans import search, slow_devices
from tests.end_to_end.ranks import RankPool

pytestmark = pytest.mark.dist
JOBS = jobs.__name__


@cache
def graph() -> ModelGraph:
    model, batch = jobs.saved_case()
    return capture(model, batch, recipe="fp64").graph


def plan_of(devices: int, **fix: object) -> bytes:
    return search(graph(), slow_devices(devices), global_batch=12, fix=fix).content


FSDP_4 = {"dp_shard": 4, "up.bias": "dp_shard:S0", "table.weight": "dp_shard:S1", "gain": "dp_shard:S0"}


@pytest.fixture(scope="module")
def saved(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """Three Adam steps on four ranks, written; and what every rank had then."""
    folder = tmp_path_factory.mktemp("saved") / "step3"
    return folder, ranks.run(f"{JOBS}:train", ranks=4, plan=plan_of(4, **FSDP_4), steps=3, save=folder)


def same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> bool:
    return set(found) == set(wanted) and all(torch.equal(found[n], wanted[n]) for n in wanted)


def test_ckp_01_training_goes_on_with_its_moments(ranks: RankPool, saved: tuple[Path, Any], tmp_path: Path) -> None:
    folder, _ = saved
    model, batch = jobs.saved_case()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(4):
        model(*batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    for devices in (2, 3):
        found = ranks.run(f"{JOBS}:train", ranks=devices, plan=plan_of(devices, dp_shard=devices), steps=1, load=folder)
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(found[0]["full"][name], parameter.detach(), rtol=1e-9, atol=1e-11, msg=name)
            moment = optimizer.state[parameter]["exp_avg"]
            torch.testing.assert_close(found[0]["moments"][name], moment, rtol=1e-9, atol=1e-14, msg=name)
    lost = tmp_path / "lost"
    shutil.copytree(folder, lost)
    manifest = json.loads((lost / "manifest.json").read_text())
    manifest["optimizer"]["state"]["up.weight"]["tensors"].append("second_moment")
    (lost / "manifest.json").write_text(json.dumps(manifest))
    for said in ranks.run(f"{JOBS}:loads", ranks=2, plan=plan_of(2, dp_shard=2), folder=lost):
        assert said.startswith("CheckpointError: ")
        assert re.search(r"tensors of optimizer state are missing, first optimizer\..*\.second_moment", said)


def test_ckp_03_nothing_in_a_checkpoint_counts_per_rank(ranks: RankPool, saved: tuple[Path, Any]) -> None:
    folder, was = saved
    for devices, fix in ((4, FSDP_4), (2, {"dp_replicate": 2}), (4, {"dp_replicate": 4})):
        found = ranks.run(f"{JOBS}:train", ranks=devices, plan=plan_of(devices, **fix), steps=0, load=folder)
        assert same(found[0]["full"], was[0]["full"])
        assert all(same(answer["moments"], was[0]["moments"]) for answer in found)
    manifest = json.loads((folder / "manifest.json").read_text())
    assert set(manifest["optimizer"]["state"]) == set(was[0]["full"]), "by name, whatever rank holds what"
    assert sorted(manifest) == ["files", "format", "model", "optimizer", "plan", "step"]


def test_ckp_05_the_empty_fourth_rank(ranks: RankPool, saved: tuple[Path, Any]) -> None:
    folder, was = saved
    assert [answer["local"] for answer in was] == [2, 2, 2, 0]
    for devices, local in ((1, [6]), (3, [2, 2, 2]), (4, [2, 2, 2, 0])):
        fix = {"dp_shard": devices, "up.bias": "dp_shard:S0"} if devices > 1 else {}
        found = ranks.run(f"{JOBS}:train", ranks=devices, plan=plan_of(devices, **fix), steps=0, load=folder)
        assert [answer["local"] for answer in found] == local
        assert torch.equal(found[0]["full"]["up.bias"], was[0]["full"]["up.bias"])


def test_ckp_06_layers_keep_their_numbers_under_an_uneven_cut(ranks: RankPool, tmp_path: Path) -> None:
    """Seven layers, each of a number of its own, saved by stages of three and four, loaded by one device and by two."""
    model, batch = jobs.numbered_case()
    captured = capture(model, batch, recipe="fp64").graph
    staged = search(captured, slow_devices(2), global_batch=4, fix={"pp": 2, "cut": "3+4", "micro_batches": 2})
    names = [f"layers.{i}.linear.weight" for i in range(7)]
    found = ranks.run(f"{JOBS}:numbered", ranks=2, plan=staged.content, save=tmp_path / "saved")
    kept = [{name: value for name, value in answer.items() if name in names} for answer in found]
    assert [len(answer) for answer in kept] == [3, 4]
    assert kept[0] | kept[1] == {name: float(i + 1) for i, name in enumerate(names)}
    for devices, fix in ((1, {}), (2, {"dp_shard": 2})):
        plan = search(captured, slow_devices(devices), global_batch=4, fix=fix)
        for answer in ranks.run(f"{JOBS}:numbered", ranks=devices, plan=plan.content, load=tmp_path / "saved"):
            assert {name: answer[name] for name in names} == {name: float(i + 1) for i, name in enumerate(names)}
