"""One question has one answer, to the last bit, whatever the hash seed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from hpsearch.aim import front, ranked, steadiness
from hpsearch.aim.answer_file import content
from hpsearch.aim.together import together
from tests.aim.test_reach import CASES
from tests.aim.test_together import JOBS, clusters

REPO = Path(__file__).parents[2]


def answers() -> bytes:
    space = CASES["experts"].space()
    every = front(space, step=0.1), ranked(space, 3)
    layout = every[1][0].choice.layout
    told = repr((every, steadiness(space, layout))).encode()
    job = JOBS["encoder, decoder"]
    return told + content(job, clusters(10**10)[4], together(job, clusters(10**10), 4))


def test_hash_seeds_do_not_matter() -> None:
    code = "import sys; from tests.aim.test_determinism import answers; sys.stdout.buffer.write(answers())"
    found = set()
    for seed in ("0", "7"):
        environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(REPO)}
        made = subprocess.run([sys.executable, "-c", code], cwd=REPO, env=environment, capture_output=True, timeout=240)
        assert made.returncode == 0, made.stderr.decode()
        found.add(made.stdout)
    assert len(found) == 1
    assert len(found.pop()) > 1000
