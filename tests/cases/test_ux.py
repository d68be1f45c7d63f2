"""What a user is told: in numbers, at the time of planning, with what would work."""

from __future__ import annotations

import re
from dataclasses import replace
from math import ceil
from pathlib import Path

import pytest

from hpsearch.cli.model import load_graph
from hpsearch.cluster import shipped
from hpsearch.cluster.find import FILE_NAME, cost_models
from hpsearch.cluster.read import read
from hpsearch.errors import CaptureError, ClusterError, InfeasibleError, LegalityError
from hpsearch.estimate import ModelShape
from hpsearch.estimate.pins import check_shape, layout_of
from hpsearch.estimate.shape import transformer
from hpsearch.space import Found, best
from hpsearch.space.pins import space_of
from tests.cases import configs
from tests.cases.plans import graph_of, h100, search
from tests.estimate.stated import shape_of_config
from tests.search.toy import toy_cluster, toy_model


def test_ux_01_rows_ranks_and_micro_batches_fit() -> None:
    with pytest.raises(LegalityError) as caught:
        search(toy_model(), toy_cluster(devices=8), global_batch=128, fix={"dp_shard": 8, "micro_batches": 32})
    text = str(caught.value)
    assert "global batch 128: expected a multiple of micro_batches x data ranks = 32 x 8 = 256, but 128 % 256" in text
    assert "Legal micro_batches on 8 data ranks: [1, 2, 4, 8, 16]" in text
    assert "the next legal global batch is 256" in text
    for count in (1, 16):
        fix = {"dp_shard": 8, "micro_batches": count}
        plan = search(toy_model(), toy_cluster(devices=8), global_batch=128, fix=fix)
        assert plan.file.job.global_batch == 128
        assert plan.micro_batch_rows * plan.file.job.micro_batches == 128
        assert f"{count} micro-batch{'es' if count > 1 else ''} of {128 // count} rows" in str(plan)
        assert plan.file.inputs[0].shape[0] == 128 // count


def test_ux_03_heads_that_a_floor_division_would_hide() -> None:
    model = graph_of(configs.LLAMA_8B, num_hidden_layers=1, hidden_size=960, num_attention_heads=30,
                     num_key_value_heads=30)  # fmt: skip
    with pytest.raises(LegalityError) as caught:
        search(model, h100(4), global_batch=8, fix={"tp": 4})
    assert str(caught.value) == (
        "tp=4: expected a divisor of num_attention_heads = 30, but 30 % 4 = 2. "
        "Legal tp for LlamaForCausalLM: [1, 2, 3, 5, 6, 10, 15, 30]."
    )


def test_ux_05_nothing_fits_and_what_would() -> None:
    model = graph_of(configs.LLAMA_405B, seq_len=4096)
    cluster = h100(8)
    cluster = replace(cluster, device=replace(cluster.device, memory_bytes=80_000_000_000))
    with pytest.raises(InfeasibleError) as caught:
        search(model, cluster, global_batch=8)
    text = str(caught.value)
    assert "405.85e9 parameters" in text
    assert "Weights alone are 811.7 GB in bfloat16" in text
    assert "parameters, gradients and optimizer state are 6494 GB together" in text
    assert "within 72.0 GB a device (90% of its memory)" in text
    assert "At least 91 such devices (96 in whole nodes of 8)" in text


def test_ux_05_the_memory_that_is_said_to_be_enough_is_enough() -> None:
    model = graph_of(configs.LLAMA_8B, num_hidden_layers=2)
    with pytest.raises(InfeasibleError) as caught:
        search(model, h100(8, memory_gib=2.0), global_batch=8)
    found = re.search(r"a device memory of ([\d.]+) GiB would be enough", str(caught.value))
    assert found
    assert search(model, h100(8, memory_gib=float(found[1])), global_batch=8).file.predicted.peak_bytes > 0


def test_ux_06_every_number_says_where_it_is_from() -> None:
    for name in shipped():
        path = cost_models() / name / FILE_NAME
        if not path.exists():
            continue
        text = path.read_text(encoding="utf-8")
        facts = read(text, str(path)).facts
        assert len(facts) > 5
        assert all(fact.unit and fact.kind and fact.source for fact in facts)
        nameless = re.sub(r', source = "[^"]*"', "", text, count=1)
        assert nameless != text
        with pytest.raises(ClusterError, match="source"):
            read(nameless, str(path))


def test_ux_06_memory_follows_sequence_rows_and_recompute() -> None:
    def activations(seq_len: int, global_batch: int, recompute: str) -> int:
        model = graph_of(configs.LLAMA_8B, num_hidden_layers=4, seq_len=seq_len)
        fix = {"dp_shard": 2, "micro_batches": 1, "recompute": recompute}
        return search(model, h100(2), global_batch=global_batch, fix=fix).file.predicted.bytes["activations"]

    once = activations(2048, 8, "none")  # with less the fullest moment is that of gradients
    assert activations(2048, 16, "none") == pytest.approx(2 * once, rel=0.01)
    assert activations(4096, 8, "none") == pytest.approx(2 * once, rel=0.01)
    assert activations(2048, 8, "full") < 0.85 * once


def asked(shape: ModelShape, devices: int, batch: int, pins: dict[str, str], gib: float = 0.0) -> Found:
    return best(space_of(shape, h100(devices, gib), pins, global_batch=batch, seq_len=2048), gap=0.01)


def test_ux_01_a_search_says_which_rows_fit() -> None:
    shape = shape_of_config(configs.LLAMA_8B | {"model_type": "llama"})
    with pytest.raises(LegalityError) as caught:
        asked(shape, 8, 128, {"dp": "8", "micro_batch": "32"})
    assert str(caught.value) == (
        "pin micro_batch: expected a legal value for 8 devices and 128 sequences of 2048 beside dp = 8, but got 32. "
        "Legal: 1, 2, 4, 8, 16."
    )
    for batch in (128, 120):
        layout = asked(shape, 8, batch, {"dp": "8", "micro_batch": "1", "cp": "1"}).best.layout
        assert layout.micro_batch * layout.micro_batches * layout.dp == layout.global_batch == batch
    with pytest.raises(LegalityError, match=r"128 sequences are not a multiple of 32 a micro-batch on 8 data ranks"):
        layout_of({"micro_batch": "32"}, devices=8, global_batch=128, seq_len=2048)


def test_ux_03_a_search_and_an_estimate_name_the_legal_degrees() -> None:
    shape = ModelShape("thirty", 960, 30, 30, 32, 32000, transformer(4, 0, 0), ffn=4800)
    with pytest.raises(LegalityError, match=r"pin tp: .* for 4 devices .* but got 4\. Legal: 1, 2\."):
        asked(shape, 4, 8, {"tp": "4"})
    pinned = layout_of({"tp": "4"}, devices=4, global_batch=8, seq_len=2048)
    told = r"expected tp to divide attention heads = 30, but tp = 4\. Legal degrees of tp: 1, 2, 3, 5, 6, 10, 15, 30\."
    with pytest.raises(LegalityError, match=told):
        check_shape(shape, pinned.layout)


def test_ux_05_a_search_says_why_nothing_fits_and_what_would() -> None:
    """405.85e9 parameters of 16 bytes are 6,494 GB; 80 GB hold 77.4 GB of tensors beside context and reserve."""
    shape = shape_of_config(configs.LLAMA_405B | {"model_type": "llama"})
    with pytest.raises(InfeasibleError) as caught:
        asked(shape, 8, 8, {})
    text = str(caught.value)
    assert "405.85e9 parameters are 6494 GB together" in text
    assert "at least 84 such devices (88 in whole nodes of 8) have room for them" in text
    assert ceil(16 * 405.8534e9 / ((80e9 - 0.6e9) / 1.02)) == 84
    assert "expected a layout that fits in 80 GB, but the leanest found needs" in text


BROKEN_MODELS = {
    "called": ("def build():\n    raise ZeroDivisionError('no heads')\n", "ZeroDivisionError: no heads (", "line 2)"),
    "imported": ("import json\njson.loads('{')\n", "JSONDecodeError: Expecting property name", "when it was imported"),
    "in need": ("import hpsearch_absent\n", "ModuleNotFoundError: No module named 'hpsearch_absent' (", "imported"),
}


@pytest.mark.parametrize("what", BROKEN_MODELS)
def test_a_broken_model_function_is_one_message_with_its_cause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    content, said, where = BROKEN_MODELS[what]
    name = f"broken_{what.replace(' ', '_')}"
    (tmp_path / f"{name}.py").write_text(content)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CaptureError) as caught:
        load_graph(f"{name}:build", 8, "bf16")
    assert str(caught.value).startswith(f"{name}:build: expected a function of no argument, or of seq_len,")
    assert said in str(caught.value)
    assert where in str(caught.value)
    assert isinstance(caught.value.__cause__, (ZeroDivisionError, ValueError, ModuleNotFoundError))
