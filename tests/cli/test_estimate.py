"""`hpsearch estimate`: what it prints, and how it refuses."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 512, "num_attention_heads": 8,
    "num_key_value_heads": 4, "intermediate_size": 1024, "vocab_size": 4096, "num_hidden_layers": 8,
}  # fmt: skip
JOB = ["--cluster", "h100-sxm-ib400", "--devices", "16", "--global-batch", "64", "--seq-len", "256"]


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("estimate") / "config.json"
    path.write_text(json.dumps(CONFIG))
    return path


def run(config: Path, *more: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "hpsearch", "estimate", "--model", str(config), *JOB, *more]
    return subprocess.run(command, capture_output=True, text=True, timeout=240)


def test_both_answers(config: Path) -> None:
    found = run(config, "--fix", "tp=2,pp=2,micro_batch=2", "--fix", "recompute=full")
    assert found.returncode == 0, found.stderr
    said = " ".join(found.stdout.split())
    assert "16 devices of h100-sxm-ib400 (H100-SXM5-80GB): tp=2 pp=2 dp=4, ZeRO-1, 8 micro-batches of 2" in said
    for word in ("matmul", "step", "optimizer", "peak", "model TFLOP/s a device", "It fits"):
        assert word in found.stdout


def test_a_degree_that_heads_forbid(config: Path) -> None:
    found = run(config, "--fix", "tp=16")
    assert found.returncode == 1
    assert "expected tp to divide attention heads = 8, but tp = 16. Legal degrees of tp: 1, 2, 4, 8." in found.stderr


def test_a_pin_without_a_value(config: Path) -> None:
    found = run(config, "--fix", "tp")
    assert found.returncode == 1
    assert "--fix tp: expected name=value" in found.stderr
