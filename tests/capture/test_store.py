"""A kept graph is the graph, is found again without torch, and a damaged or stale file is no file."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from hpsearch.capture import capture, capture_config
from hpsearch.graph import ModelGraph
from hpsearch.graph.store import config_key, graph_folder, graph_from_json, graph_to_json, load_graph, save_graph
from tests.capture.models import llama

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 32, "intermediate_size": 48,
    "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 3, "vocab_size": 64, "rope_theta": 5e5,
    "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                     "original_max_position_embeddings": 8192},
}  # fmt: skip


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HPSEARCH_CACHE", str(tmp_path))


@pytest.fixture(scope="module")
def graph() -> ModelGraph:
    case = llama()
    return capture(case.model, case.batch, recipe="fp32").graph


def test_json_keeps_everything(graph: ModelGraph) -> None:
    again = graph_from_json(graph_to_json(graph))
    assert again == graph
    assert graph_to_json(again) == graph_to_json(graph)


def test_a_damaged_file_is_no_file(graph: ModelGraph) -> None:
    save_graph("k", graph)
    assert load_graph("k") == graph
    path = graph_folder() / "k.json"
    for damaged in (
        path.read_bytes()[:-9],
        b"",
        b"\xff\xfe",
        path.read_bytes().replace(b'"embedding"', b'"embeddinG"'),
    ):
        path.write_bytes(damaged)
        assert load_graph("k") is None
    assert load_graph("other") is None


def test_the_key_changes_with_what_the_graph_depends_on(monkeypatch: pytest.MonkeyPatch) -> None:
    key = config_key(CONFIG, 16, "bf16")
    assert key == config_key(dict(reversed(CONFIG.items())), 16, "bf16")
    others = {config_key(CONFIG, 17, "bf16"), config_key(CONFIG, 16, "fp32"), config_key(CONFIG | {"x": 1}, 16, "bf16")}
    monkeypatch.setattr("hpsearch.graph.store.version", lambda name: "0.0")
    others.add(config_key(CONFIG, 16, "bf16"))
    assert len(others | {key}) == 5


def test_a_config_is_found_again_without_torch() -> None:
    before = json.dumps(CONFIG)
    captured = capture_config(CONFIG, seq_len=16)
    assert json.dumps(CONFIG) == before
    script = f"""
import sys
from hpsearch.graph.store import config_key, load_graph
graph = load_graph(config_key({CONFIG!r}, 16, "bf16"))
assert graph.num_params == {captured.graph.num_params}, graph
assert not {{"torch", "transformers"}} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)
