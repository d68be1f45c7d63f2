"""Saving replaces a file or leaves it; there is no third outcome, and nothing is left beside it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from hpsearch import files
from hpsearch.errors import PlanError
from hpsearch.files import atomic_write
from hpsearch.plan import Plan


@pytest.mark.parametrize("failure", [OSError(28, "No space left on device"), KeyboardInterrupt()])
@pytest.mark.parametrize("at", ["fsync", "replace"])
def test_a_failure_leaves_the_old_file_and_no_other(
    plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failure: BaseException, at: str
) -> None:
    path = tmp_path / "plan.json"
    path.write_text("old")

    def fail(*_: object) -> None:
        assert len(list(tmp_path.iterdir())) == 2
        raise failure

    monkeypatch.setattr(files.os, at, fail)
    expected = KeyboardInterrupt if isinstance(failure, KeyboardInterrupt) else PlanError
    with pytest.raises(expected):
        plan.save(path)
    assert [p.name for p in tmp_path.iterdir()] == ["plan.json"]
    assert path.read_text() == "old"


CHILD = """
import resource, signal, sys
from hpsearch.files import atomic_write
{setup}
try:
    atomic_write(sys.argv[1], b"x" * 1_000_000)
except OSError as error:
    print(error.strerror)
except KeyboardInterrupt:
    print("interrupted")
"""


def in_child(setup: str, path: Path) -> str:
    code = CHILD.format(setup=textwrap.dedent(setup))
    found = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, timeout=60)
    assert found.returncode == 0, found.stderr
    return found.stdout.strip()


def test_a_real_write_beyond_the_limit_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text("old")
    setup = """
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
    """
    assert in_child(setup, path) == "File too large"
    assert [p.name for p in tmp_path.iterdir()] == ["plan.json"]
    assert path.read_text() == "old"


def test_a_real_interrupt_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text("old")
    setup = """
    import os
    from hpsearch import files
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs start with it ignored
    files.os.fsync = lambda handle: os.kill(os.getpid(), signal.SIGINT)
    """
    assert in_child(setup, path) == "interrupted"
    assert [p.name for p in tmp_path.iterdir()] == ["plan.json"]
    assert path.read_text() == "old"


def test_the_message_says_what_stays(plan: Plan, tmp_path: Path) -> None:
    path = tmp_path / "no" / "plan.json"
    with pytest.raises(PlanError) as error:
        plan.save(path)
    remedy = "What was there before is unchanged; choose another -o."
    assert str(error.value) == f"{path}: cannot be written: No such file or directory. {remedy}"


def test_a_missing_or_unreadable_file_is_one_error(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"nowhere.json: cannot be read: No such file or directory"):
        Plan.load(tmp_path / "nowhere.json")
    with pytest.raises(PlanError, match="cannot be read: Is a directory"):
        Plan.load(tmp_path)


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    target, link = tmp_path / "target", tmp_path / "link"
    target.write_text("old")
    link.symlink_to(target)
    atomic_write(link, b"new")
    assert link.is_symlink()
    assert target.read_text() == "new"


def test_a_pipe_is_written_to_and_not_replaced(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = subprocess.Popen(["cat", str(pipe)], stdout=subprocess.PIPE)
    try:
        atomic_write(pipe, b"through")
        assert reader.communicate(timeout=30)[0] == b"through"
    finally:
        if reader.poll() is None:
            reader.send_signal(signal.SIGKILL)
            reader.wait()
    assert [p.name for p in tmp_path.iterdir()] == ["pipe"]
    assert pipe.is_fifo()
