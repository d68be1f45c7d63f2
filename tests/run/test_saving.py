"""Checkpoints written while training goes on hold the moment they were asked for, or are not there at all."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.end_to_end.ranks import RankPool, RanksFailed
from tests.run import jobs
from tests.run.plans import plan_bytes

pytestmark = pytest.mark.dist
JOBS = jobs.__name__


def test_it_holds_the_moment_it_was_asked_for(ranks: RankPool, tmp_path: Path) -> None:
    folder = tmp_path / "step2"
    plan = plan_bytes("llama", 4, dp_shard=2, tp=2)
    before, after, is_whole = ranks.run(f"{JOBS}:saved_behind", ranks=4, plan=plan, save=folder)[0]
    assert is_whole
    found = ranks.run(f"{JOBS}:train", ranks=2, plan=plan_bytes("llama", 2, dp_shard=2), steps=0, load=folder)[0]
    assert all(torch.equal(found[name], value) for name, value in before.items())
    again = ranks.run(f"{JOBS}:train", ranks=2, plan=plan_bytes("llama", 2, tp=2), steps=3, load=folder)[0]
    for name, value in after.items():
        torch.testing.assert_close(again[name], value, rtol=1e-9, atol=1e-11, msg=name)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step2"]


def test_a_saving_waits_for_the_one_before_it(ranks: RankPool, tmp_path: Path) -> None:
    plan = plan_bytes("llama", 2, dp_shard=2)
    off = ranks.run(f"{JOBS}:saves_in_a_row", ranks=2, plan=plan, save=tmp_path / "latest")[0]
    assert max(off.values()) == 0.0


def test_ranks_killed_while_saving_leave_the_last_good_one(ranks: RankPool, tmp_path: Path) -> None:
    folder, plan = tmp_path / "latest", plan_bytes("llama", 2, dp_shard=2)
    with pytest.raises(RanksFailed):
        ranks.run(f"{JOBS}:killed_while_saving", ranks=2, plan=plan, save=folder)
    assert folder.with_name("latest.partial").exists()
    found = ranks.run(f"{JOBS}:train", ranks=2, plan=plan, steps=0, load=folder)[0]
    wanted = ranks.run(f"{JOBS}:train", ranks=2, plan=plan, steps=1, save=folder)[0]
    assert all(torch.equal(found[name], value) for name, value in wanted.items())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest"]


def test_a_full_disk_is_told_to_every_rank(ranks: RankPool, tmp_path: Path) -> None:
    folder, plan = tmp_path / "latest", plan_bytes("llama", 2, dp_shard=2)
    ranks.run(f"{JOBS}:train", ranks=2, plan=plan, steps=1, save=folder)
    for kind, text in ranks.run(f"{JOBS}:no_room", ranks=2, plan=plan, save=folder):
        assert kind == "CheckpointError"
        assert "No space left on device" in text
        assert "The old checkpoint is unchanged." in text
    ranks.run(f"{JOBS}:train", ranks=2, plan=plan, steps=0, load=folder)
