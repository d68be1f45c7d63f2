"""`hpsearch plan` from a config to a file, and what can go wrong on the way."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hpsearch.cli import plan as plan_module
from hpsearch.plan import Plan
from tests.cli.conftest import Command
from tests.plan.sample import model

TINY = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
    "max_position_embeddings": 64,
}
JOB = ["--cluster", "h100-sxm-roce400", "--devices", 4, "--global-batch", 8, "--seq-len", 16]


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.json"
    path.write_text(json.dumps(TINY))
    return path


def test_a_config_becomes_a_plan_file(hpsearch: Command, config: Path, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    found = hpsearch("plan", "--model", config, *JOB, "--fix", "dp_shard=4", "-o", path)
    assert found.code == 0, found.stderr
    assert found.stdout.startswith("LlamaForCausalLM (")
    assert f"Written to {path}." in found.stdout
    plan = Plan.load(path)
    assert plan.file.model.source == "tiny.json"
    assert not plan.is_edited
    assert plan.file.job.fix == {"dp_shard": "4"}
    assert str(plan.mesh) == "dp_shard=4"
    printed = hpsearch("plan", "--model", config, *JOB, "--fix", "dp_shard=4", "-o", "-")
    assert printed.stdout.encode() == path.read_bytes()


def test_a_pipeline_is_planned_and_explained(hpsearch: Command, config: Path, tmp_path: Path) -> None:
    pipelined, flat = tmp_path / "pp.json", tmp_path / "flat.json"
    found = hpsearch("plan", "--model", config, *JOB, "--fix", "pp=2,schedule=zb-h1,cut=1+1", "-o", pipelined)
    assert found.code == 0, found.stderr
    assert "4 devices of h100-sxm-roce400 (H100-SXM5-80GB): pp=2 x " in found.stdout
    assert "2 stages, schedule zb-h1; the first rank does 0F0 0F1 0I0 0W0" in found.stdout
    assert "1: model.layers.0" in found.stdout
    assert Plan.load(pipelined).num_ranks == 4
    assert hpsearch("plan", "--model", config, *JOB, "-o", flat).code == 0
    said = hpsearch("explain", pipelined, "--diff", flat)
    assert "blocks of stage 0" in said.stdout
    wrong = hpsearch("plan", "--model", config, *JOB, "--fix", "pp=2,cut=3")
    assert wrong.code == 1
    assert "expected 2 numbers for 2 ranks with 1 stage each" in wrong.stderr
    assert hpsearch("plan", "--model", config, *JOB, "--fix", "vpp=2").code == 2


def test_a_tied_weight_is_explained_under_either_name(hpsearch: Command, config: Path, tmp_path: Path) -> None:
    config.write_text(json.dumps(TINY | {"tie_word_embeddings": True}))
    path = tmp_path / "plan.json"
    found = hpsearch("plan", "--model", config, *JOB, "--fix", "dp_shard=4", "-o", path)
    assert found.code == 0, found.stderr
    for name, other in (("lm_head", "model.embed_tokens"), ("model.embed_tokens", "lm_head")):
        said = hpsearch("explain", path, "--why", f"{name}.weight")
        assert said.code == 0, said.stderr
        assert said.stdout.startswith(f"{name}.weight (the same tensor as {other}.weight): [128, 64]")


def test_a_function_becomes_a_plan(hpsearch: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_model.py").write_text(
        "import torch\n"
        "def build(seq_len):\n"
        "    assert torch.empty(0).device.type == 'meta'\n"
        "    net = torch.nn.Sequential(torch.nn.Linear(seq_len, 32), torch.nn.ReLU(), torch.nn.Linear(32, 8))\n"
        "    return net, (torch.empty(4, seq_len),), lambda outputs, batch: outputs.square().mean()\n"
        "def nothing():\n"
        "    return 3\n"
    )
    monkeypatch.chdir(tmp_path)
    found = hpsearch("plan", "--model", "my_model:build", *JOB)
    assert found.code == 0, found.stderr
    assert found.stdout.startswith("Sequential (808 parameters) on 4 devices")
    wrong = hpsearch("plan", "--model", "my_model:nothing", *JOB)
    assert wrong.code == 1
    assert wrong.stderr.startswith(
        "hpsearch: my_model:nothing: expected a function of no argument, or of seq_len, that"
    )
    assert wrong.stderr.endswith("but it returned int. Return such a tuple.\n")


def test_what_cannot_fit_ends_with_3_and_says_why(hpsearch: Command, tmp_path: Path) -> None:
    huge = {**TINY, "hidden_size": 16384, "intermediate_size": 53248, "num_hidden_layers": 126, "vocab_size": 128256}
    path = tmp_path / "huge.json"
    path.write_text(json.dumps(huge | {"num_attention_heads": 128, "num_key_value_heads": 8}))
    found = hpsearch("plan", "--model", path, *JOB)
    assert found.code == 3
    assert found.stdout == ""
    assert found.stderr.splitlines()[-1].startswith("hpsearch: LlamaForCausalLM (405.")
    assert "expected a plan within" in found.stderr
    assert "the least found is" in found.stderr


BAD_CONFIGS = [
    ({"architectures": ["NoSuchModel"]}, "architecture NoSuchModel: transformers"),
    ({}, "config: expected `architectures` with a class name, but found none"),
    ({**TINY, "architectures": 5}, "config: expected `architectures` as a list of class names, but found 5"),
    ({**TINY, "num_hidden_layers": -1}, "config: expected num_hidden_layers of at least 1, but found -1. Correct it."),
    ({**TINY, "architectures": ["LlamaModel"]}, "architecture LlamaModel: expected a class with a loss"),
]


@pytest.mark.parametrize(("contents", "message"), BAD_CONFIGS)
def test_an_unknown_architecture_is_one_line(
    hpsearch: Command, tmp_path: Path, contents: dict[str, object], message: str
) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(contents))
    found = hpsearch("plan", "--model", path, *JOB)
    assert found.code == 1
    assert message in found.stderr
    assert found.stderr.splitlines()[-1].startswith("hpsearch: ")


def test_an_interrupt_leaves_the_old_plan(
    hpsearch: Command, config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    old = tmp_path / "plan.json"
    old.write_text("old")
    monkeypatch.setattr(plan_module, "load_graph", lambda *_: model())
    monkeypatch.setattr(plan_module, "search", interrupted)
    found = hpsearch("plan", "--model", config, *JOB, "-o", old)
    assert found.code != 0
    assert "Traceback" not in found.stderr
    assert old.read_text() == "old"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["plan.json", "tiny.json"]


@pytest.mark.slow
def test_the_bytes_do_not_depend_on_hash_seeds(config: Path) -> None:
    command = [sys.executable, "-m", "hpsearch", "plan", "--model", str(config), *map(str, JOB), "-o", "-"]
    found = []
    for seed in range(5):
        environment = {**os.environ, "PYTHONHASHSEED": str(seed)}
        ended = subprocess.run(command, env=environment, capture_output=True, timeout=240)
        assert ended.returncode == 0, ended.stderr.decode()
        found.append(ended.stdout)
    assert Plan.from_bytes(found[0])
    assert found == [found[0]] * 5


def test_a_second_plan_needs_no_torch(config: Path, tmp_path: Path) -> None:
    code = (
        "import sys\nfrom hpsearch.cli import main\n"
        "try:\n    main()\nexcept SystemExit as end:\n    assert end.code == 0\n"
        "print('torch' in sys.modules, 'transformers' in sys.modules, file=sys.stderr)"
    )
    environment = {**os.environ, "HPSEARCH_CACHE": str(tmp_path / "cache")}
    command = [sys.executable, "-c", code, "plan", "--model", str(config), *map(str, JOB), "-o", "-"]
    found = [subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240) for _ in range(2)]
    assert [ended.returncode for ended in found] == [0, 0], found[0].stderr
    assert [ended.stderr.splitlines()[-1] for ended in found] == ["True True", "False False"]
    assert found[0].stdout == found[1].stdout
