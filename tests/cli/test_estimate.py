"""`hpsearch estimate`: what it prints, and how it refuses."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.conftest import Command

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


@pytest.fixture(scope="module")
def written(config: Path) -> Path:
    file = config.parent / "layout.json"
    command = [sys.executable, "-m", "hpsearch", "search", "--model", str(config), *JOB, "--fix", "cp=1,pp=1"]
    subprocess.run([*command, "-o", str(file)], check=True, capture_output=True, timeout=240)
    return file


@pytest.mark.parametrize(
    ("part", "change", "words"),
    [
        ("layout", {"tp": 0}, "layout, tp: expected a whole number of 1 or more, but found 0. Legal: tp of 1 and more"),
        ("layout", {"tp": True}, "layout, tp: Input should be a valid integer, but found True. Search again with -o."),
        ("layout", {"offload_share": 1.5}, "layout, offload_share: expected a share of 0 to 1, but found 1.5"),
        ("layout", {"banana": 1}, "but 'banana' is unknown. Search again with -o"),
        ("layout", {"tp": None}, "but 'tp' is missing. Search again with -o"),
        ("", {"step_s": 1.0}, "which its layout takes here, but the file states 1. It was changed, or prices were"),
        ("", {"peak_bytes": 1e9}, "which its layout takes here, but the file states 1e+09. It was changed"),
        ("question", {"devices": 8, "cluster_digest": "x"}, "expected devices = 16, but it was searched for 8."),
        (
            "question",
            {"cluster_digest": "abc"},
            "but it was searched with others (abc). `aim robust` takes dearer ones",
        ),
        ("", {}, ""),
    ],
)
def test_a_layout_file_that_was_changed_is_refused(
    hpsearch: Command, config: Path, written: Path, tmp_path: Path, part: str, change: dict[str, object], words: str
) -> None:
    told = json.loads(written.read_text())
    where = told[part] if part else told
    where.update(change)
    for name in [name for name, value in change.items() if value is None]:
        del where[name]
    file = tmp_path / "layout.json"
    file.write_text(json.dumps(told))
    found = hpsearch("estimate", "--model", config, *JOB, "--layout", file)
    assert found.code == (1 if words else 0)
    assert words in " ".join(found.stderr.split())
