"""The five examples, one after the other in one folder, as a reader runs them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
TORCHRUN = ["-m", "torch.distributed.run", "--nproc-per-node", "2"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("examples")


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.parametrize(
    ("launcher", "name", "said"),
    [
        ([], "01_search_on_a_laptop.py", "Wrote plan.json and program.py"),
        ([], "02_read_a_plan.py", "nothing in this space is faster"),
        ([], "03_edit_a_plan.py", "edited by hand"),
        (TORCHRUN, "03_edit_a_plan.py", "(Shard(dim=0),): (128, 128) on each rank"),
        (TORCHRUN, "04_train.py", "Saved."),
        (TORCHRUN, "05_resume_under_another_plan.py", "The plain model has all 21 tensors."),
    ],
)
def test_example(launcher: list[str], name: str, said: str, folder: Path) -> None:
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "HPSEARCH_CACHE": str(folder / "cache"),
        "PYTHONPATH": os.pathsep.join([str(EXAMPLES.parent), os.environ.get("PYTHONPATH", "")]),
    }
    found = subprocess.run(
        [sys.executable, *launcher, str(EXAMPLES / name)],
        capture_output=True,
        text=True,
        timeout=280,
        cwd=folder,
        env=environment,
    )
    assert found.returncode == 0, found.stderr
    assert said in found.stdout
