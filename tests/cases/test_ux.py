"""What a user is told: in numbers, at the time of planning, with what would work."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from hpsearch.cluster import shipped
from hpsearch.cluster.find import FILE_NAME, cost_models
from hpsearch.cluster.read import read
from hpsearch.errors import ClusterError, InfeasibleError, LegalityError
from tests.cases import configs
from tests.cases.plans import graph_of, h100, search
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
        assert f"{count} micro-batches of {128 // count} rows" in str(plan)
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
        model = graph_of(configs.LLAMA_8B, num_hidden_layers=2, seq_len=seq_len)
        fix = {"dp_shard": 2, "micro_batches": 1, "recompute": recompute}
        return search(model, h100(2), global_batch=global_batch, fix=fix).file.predicted.bytes["activations"]

    once = activations(64, 4, "none")
    assert activations(64, 8, "none") == pytest.approx(2 * once, rel=0.01)
    assert activations(128, 4, "none") == pytest.approx(2 * once, rel=0.01)
    assert activations(64, 4, "full") < 0.85 * once
