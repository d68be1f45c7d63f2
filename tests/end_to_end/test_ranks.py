"""The pool that other tests run on: a rank that hangs, fails or dies spoils its own job and no later one."""

from __future__ import annotations

import os
import signal
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.end_to_end import ranks as pool_module
from tests.end_to_end.ranks import RankPool, RanksFailed


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch) -> Iterator[RankPool]:
    monkeypatch.setattr(pool_module, "GRACE_S", 2.0)
    pool = RankPool(2)
    yield pool
    pool.close()


JOB = "tests.end_to_end.test_ranks:odd_one_out"


@pytest.mark.parametrize(
    ("what", "told"),
    [("sleep", "in odd_one_out"), ("die", "rank 1:\ndied"), ("raise", "rank 1 has had enough")],
)
def test_a_broken_job_is_told_and_the_next_one_runs(pool: RankPool, what: str, told: str) -> None:
    with pytest.raises(RanksFailed) as error:
        pool.run(JOB, ranks=2, timeout_s=8, what=what)
    assert told in str(error.value)
    assert pool.run(JOB, ranks=2, what="nothing") == [0, 1]


def test_a_rank_ended_by_a_signal_has_its_job_run_once_more(pool: RankPool, tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match=r"rank 1 was ended by signal 6(.|\n)*odd_one_out"):
        assert pool.run(JOB, ranks=2, what="abort once", folder=str(tmp_path)) == [0, 1]
    with pytest.warns(UserWarning, match="signal 6"), pytest.raises(RanksFailed, match="signal 6"):
        pool.run(JOB, ranks=2, what="abort")


def test_only_what_spoilt_memory_ends_in_is_run_again(pool: RankPool) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(RanksFailed, match="rank 1 was ended by signal 9"):
            pool.run(JOB, ranks=2, what="killed")


def test_a_rank_whose_parent_is_gone_ends_by_itself(pool: RankPool) -> None:
    for left in pool.run("tests.end_to_end.test_ranks:seconds_left", ranks=2, timeout_s=8):
        assert 8 < left < 60


def seconds_left() -> float:
    return signal.getitimer(signal.ITIMER_REAL)[0]


def odd_one_out(what: str, folder: str = "") -> int:
    """Rank 1 does `what`; rank 0 is done at once."""
    rank = dist.get_rank()
    dist.barrier()
    if rank == 1 and what == "sleep":
        time.sleep(1000)
    if rank == 1 and what == "die":
        os._exit(3)
    if rank == 1 and what == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 1 and (what == "abort" or (what == "abort once" and not list(Path(folder).iterdir()))):
        if folder:
            Path(folder, "aborted").touch()
        os.abort()
    if rank == 1 and what == "raise":
        raise ValueError("rank 1 has had enough")
    return rank


def test_ranks_have_the_environment_of_the_moment(pool: RankPool, monkeypatch: pytest.MonkeyPatch) -> None:
    for value in ("first", "second"):
        monkeypatch.setenv("HPSEARCH_TEST_OF_RANKS", value)
        assert pool.run("os:getenv", ranks=2, key="HPSEARCH_TEST_OF_RANKS") == [value, value]
