"""Checkpoints move between plans with all that they hold, or do not load at all."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from tests.end_to_end.models import build
from tests.end_to_end.ranks import RankPool
from tests.run import jobs
from tests.run.plans import plan_bytes

pytestmark = pytest.mark.dist
JOBS = jobs.__name__


@pytest.fixture(scope="module")
def saved(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint after three steps under FSDP on four ranks."""
    folder = tmp_path_factory.mktemp("saved") / "step3"
    ranks.run(f"{JOBS}:train", ranks=4, plan=plan_bytes("llama", 4, dp_shard=4), steps=3, save=folder)
    return folder


def test_training_goes_on_under_another_plan_as_if_nothing_had_happened(ranks: RankPool, saved: Path) -> None:
    whole = ranks.run(f"{JOBS}:train", ranks=2, plan=plan_bytes("llama", 2, tp=2), steps=5)[0]
    for devices, fix in ((2, {"tp": 2}), (4, {"dp_shard": 2, "tp": 2}), (3, {"dp_shard": 3})):
        plan = plan_bytes("llama", devices, **fix)
        found = ranks.run(f"{JOBS}:train", ranks=devices, plan=plan, steps=2, load=saved)[0]
        for name, value in whole.items():
            torch.testing.assert_close(found[name], value, rtol=1e-9, atol=1e-11, msg=name)


def test_the_plan_travels_along(saved: Path) -> None:
    assert (saved / "plan.json").read_bytes() == plan_bytes("llama", 4, dp_shard=4)
    assert not saved.with_name(saved.name + ".partial").exists()


def test_nothing_damaged_loads(ranks: RankPool, saved: Path, tmp_path: Path) -> None:
    plan = plan_bytes("llama", 2, dp_shard=2)

    def fails(folder: Path, *parts: str, **options: bool) -> None:
        for kind, text in ranks.run(f"{JOBS}:load_fails", ranks=2, plan=plan, folder=folder, **options):
            assert kind == "CheckpointError"
            for part in parts:
                assert part in text

    fails(tmp_path / "nowhere", "has no manifest.json")
    half = tmp_path / "half"
    shutil.copytree(saved, half)
    (half / "manifest.json").unlink()
    fails(half, "has no manifest.json", "cut short")
    short = tmp_path / "short"
    shutil.copytree(saved, short)
    victim = max(short.glob("*.distcp"), key=lambda path: path.stat().st_size)
    size = victim.stat().st_size
    with victim.open("r+b") as file:
        file.truncate(size - 1)
    fails(short, f"expected {size} bytes, but found {size - 1} bytes")
    forgetful = tmp_path / "forgetful"
    shutil.copytree(saved, forgetful)
    manifest = json.loads((forgetful / "manifest.json").read_text())
    manifest["optimizer"]["state"]["model.norm.weight"]["tensors"].append("third_moment")
    (forgetful / "manifest.json").write_text(json.dumps(manifest))
    fails(forgetful, "optimizer state are missing", "third_moment")
    manifest["optimizer"] = None
    (forgetful / "manifest.json").write_text(json.dumps(manifest))
    fails(forgetful, "holds no optimizer state")


def test_an_old_checkpoint_is_replaced_whole(ranks: RankPool, tmp_path: Path) -> None:
    plan, folder = plan_bytes("llama", 2, dp_shard=2), tmp_path / "latest"
    for steps in (1, 2):
        full = ranks.run(f"{JOBS}:train", ranks=2, plan=plan, steps=steps, save=folder)[0]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest"]
    found = ranks.run(f"{JOBS}:train", ranks=2, plan=plan, steps=0, load=folder)[0]
    assert all(torch.equal(found[name], full[name]) for name in full)


def test_uneven_and_empty_pieces_come_back_bit_for_bit(ranks: RankPool, tmp_path: Path) -> None:
    folder = tmp_path / "uneven"
    expected = ranks.run(f"{JOBS}:uneven", ranks=4, plan=plan_bytes("uneven", 4, dp_shard=4), save=folder)[0]
    for devices in (1, 3, 4):
        fix = {"dp_shard": devices} if devices > 1 else {}
        plan = plan_bytes("uneven", devices, **fix)
        found = ranks.run(f"{JOBS}:uneven", ranks=devices, plan=plan, load=folder)[0]
        assert all(torch.equal(found["full"][name], value) for name, value in expected["full"].items())


@pytest.mark.parametrize("family", ["llama", "qwen2", "gpt2"])
def test_a_hugging_face_folder_goes_straight_into_shards(ranks: RankPool, family: str, tmp_path: Path) -> None:
    model = build(family, torch.float32).model
    model.save_pretrained(tmp_path, max_shard_size="40KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    plan = plan_bytes(family, 4, dp_shard=2, tp=2)
    error, full = ranks.run(f"{JOBS}:pretrained", ranks=4, plan=plan, folder=tmp_path, family=family)[0]
    assert error == ("", "")
    for name, value in model.state_dict().items():
        assert torch.equal(full[name], value.double()), name


def test_a_folder_that_does_not_fit_says_what_is_wrong(ranks: RankPool, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    build("llama", torch.float32).model.save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    tensors["model.layers.9.bias"] = tensors.pop("model.layers.0.mlp.up_proj.weight")
    tensors["model.norm.weight"] = torch.zeros(47)
    save_file(tensors, path)
    plan = plan_bytes("llama", 2, dp_shard=2)
    for (kind, text), _ in ranks.run(f"{JOBS}:pretrained", ranks=2, plan=plan, folder=tmp_path):
        assert kind == "CheckpointError"
        assert "1 missing: model.layers.0.mlp.up_proj.weight; 1 unexpected: model.layers.9.bias" in text
        assert "1 of another shape: model.norm.weight [47] for [48]" in text
    path.write_bytes(path.read_bytes()[:-10])
    (kind, text), _ = ranks.run(f"{JOBS}:pretrained", ranks=2, plan=plan, folder=tmp_path)[0]
    assert kind == "CheckpointError"
    assert "needs bytes" in text
