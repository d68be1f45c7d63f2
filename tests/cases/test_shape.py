"""Sizes that do not divide: refused before any device is touched, left whole, or cut unevenly and still exact."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from hpsearch.capture import capture
from hpsearch.cost.storage import storages, stored_layout
from hpsearch.errors import LegalityError
from hpsearch.estimate import ModelShape, ParallelLayout
from hpsearch.estimate.pins import check_shape
from hpsearch.estimate.scaled import is_whole, padded_widths
from hpsearch.estimate.shape import transformer
from hpsearch.layout import REPLICATE, Layout, Mesh, shard
from hpsearch.lower import lower
from hpsearch.run.shards import piece
from hpsearch.space.rules import Rules
from hpsearch.strategy import enumerate_space, legal_tp
from tests.cases import configs
from tests.cases.parity import generator, planned
from tests.cases.plans import graph_of, h100, search, slow_devices, uneven_cuts
from tests.end_to_end import sequences
from tests.end_to_end.parity import reference
from tests.end_to_end.ranks import RankPool
from tests.end_to_end.test_sequences import plan as sequences_plan
from tests.search.toy import toy_model


def refusal(model: object, devices: int, **fix: object) -> str:
    with pytest.raises(LegalityError) as caught:
        search(model, h100(devices), global_batch=64, fix=fix)  # type: ignore[arg-type]
    return str(caught.value)


def test_shp_01_few_key_value_heads() -> None:
    model = graph_of(configs.LLAMA_8B, num_hidden_layers=2, num_attention_heads=16, num_key_value_heads=2)
    text = refusal(model, 8, tp=8)
    assert "tp=8: expected a divisor of num_key_value_heads = 2, but 2 % 8 = 2" in text
    assert "Legal tp for LlamaForCausalLM: [1, 2]." in text
    free = search(model, h100(8), global_batch=64)
    assert free.mesh.size("tp") in (1, 2)
    assert free.mesh.num_ranks == 8
    assert [r.reason for r in free.file.certificate.refused if r.candidate == "tp=4"] == [
        "num_key_value_heads = 2 does not divide by 4"
    ]


def test_shp_03_query_and_key_value_heads() -> None:
    model = graph_of(configs.QWEN2_7B, num_hidden_layers=2)
    text = refusal(model, 8, tp=8)
    assert "num_attention_heads = 28 and num_key_value_heads = 4, but 28 % 8 = 4 and 4 % 8 = 4" in text
    assert "[1, 2, 4]" in text
    free = search(model, h100(8), global_batch=64)
    assert free.mesh.size("tp") in (1, 2, 4)
    assert free.mesh.num_ranks == 8


def test_shp_05_three_devices() -> None:
    model = graph_of(configs.LLAMA_2_13B, num_hidden_layers=2)
    plan = search(model, h100(3), global_batch=6)
    assert plan.mesh.num_ranks == 3
    assert plan.mesh.size("tp") == 1
    assert uneven_cuts(plan, model) == []
    head = plan.parameter("lm_head.weight")
    rows = Layout.parse(head.stored).local_shape(head.shape, plan.mesh.sizes)[0]
    assert rows in (32000, 32001 // 3), "whole, or padded to 32001"
    assert "[1, 2, 4, 5, 8, 10, 20, 40]" in refusal(model, 3, tp=3)


class OddRows(nn.Module):
    """Attention and a feed-forward over a sequence, a vocabulary and a width that two ranks do not divide."""

    def __init__(self, vocab: int, width: int = 16, inner: int = 24) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(vocab, width)
        self.norm = nn.RMSNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, inner), nn.Linear(inner, width)
        self.head = nn.Linear(width, vocab, bias=False)
        self.double()

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        q, k, v = (t.unflatten(-1, (4, -1)).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, -1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        x = x + self.down(F.gelu(self.up(x)))
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def ids_and_labels(rows: int, length: int, vocab: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(0, vocab, (rows, length), generator=generator())
    return {"ids": ids, "labels": ids.roll(1, 1)}


def test_shp_06_odd_sequence_under_tp() -> None:
    model = graph_of(configs.LLAMA_8B, seq_len=2049, num_hidden_layers=2)
    plan = search(model, h100(2), global_batch=2, fix={"tp": 2})
    assert uneven_cuts(plan, model) == []
    errors, small, _ = planned(OddRows(64), [ids_and_labels(4, 9, 64)], 2, {"tp": 2})
    assert small.mesh.size("tp") == 2
    assert errors.loss <= 1e-10
    assert errors.gradient <= 1e-10


def test_shp_10_no_state_between_models() -> None:
    first = graph_of(configs.QWEN3_0_6B, num_hidden_layers=1, num_attention_heads=12, num_key_value_heads=3)
    search(first, h100(4), global_batch=8)
    second = graph_of(configs.QWEN3_0_6B, num_hidden_layers=1, num_attention_heads=12, num_key_value_heads=12)
    after = search(second, h100(4), global_batch=8, fix={"tp": 4})
    assert legal_tp(first) == [1, 3]
    assert legal_tp(second) == [1, 2, 3, 4, 6, 12]
    search(first, h100(3), global_batch=9, fix={"tp": 3})
    assert search(second, h100(4), global_batch=8, fix={"tp": 4}).content == after.content
    projection = after.parameter("model.layers.0.self_attn.q_proj.weight")
    assert Layout.parse(projection.used).local_shape(projection.shape, after.mesh.sizes)[0] in (12 * 128, 3 * 128)


def test_shp_11_odd_vocabulary_under_tp() -> None:
    model = graph_of(configs.LLAMA_8B, num_hidden_layers=1, hidden_size=1024, intermediate_size=2048, vocab_size=65535)
    plan = search(model, h100(2), global_batch=2, fix={"tp": 2})
    assert uneven_cuts(plan, model) == []
    assert plan.parameter("lm_head.weight").shape == (65535, 1024), "no padded row anywhere, so none in a checkpoint"
    for fix in ({"tp": 2}, {"dp_shard": 2}):
        errors, _, program = planned(OddRows(65), [ids_and_labels(4, 8, 65)], 2, fix)
        assert errors.loss <= 1e-10
        assert errors.gradient <= 1e-10
        assert {program.slot(n).shape for n in ("embed.weight", "head.weight")} == {(65, 16)}


def test_shp_13_local_rows_of_a_vocabulary() -> None:
    model = graph_of(configs.QWEN3_0_6B, num_hidden_layers=1)
    plan = search(model, h100(2), global_batch=2, fix={"tp": 2, "model.embed_tokens.weight": "tp:S0"})
    entry = plan.parameter("model.embed_tokens.weight")
    assert entry.shape == (151936, 1024)
    assert Layout.parse(entry.stored).local_shape(entry.shape, plan.mesh.sizes) == (75968, 1024)
    mesh = plan.mesh
    cuts = [piece(entry.shape, Layout.parse(entry.stored), mesh, mesh.coordinate(rank)) for rank in range(2)]
    assert [(c[0].start, c[0].stop) for c in cuts] == [(0, 75968), (75968, 151936)]


def test_shp_15_no_empty_shards_among_candidates() -> None:
    class Square(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.empty(63, 63, device="meta"))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x @ self.weight).square().mean()

    model = capture(Square(), (torch.empty(32, 63, device="meta"),), recipe="fp32").graph
    space = enumerate_space(model, 8)
    assert {p for node in space.nodes.values() for rule in node.rules for p in (*rule[0], *rule[1])} <= {"R", "P"}
    assert {p.dim for graph in space.followed["batch"].values() for p in graph.values.values() if p.is_shard} == {0}
    with pytest.raises(LegalityError, match="global batch 32"):
        search(model, h100(256), global_batch=32, fix={"dp_shard": 256})
    mesh = Mesh.of(dp_shard=32)
    assert stored_layout((33, 64), Layout(), mesh)["dp_shard"] == shard(1), "33 over 32 would leave 15 ranks empty"
    assert stored_layout((63, 3), Layout(), mesh)["dp_shard"] == shard(0), "31 chunks of two and one of one"
    assert {s.stored["dp_shard"] for s in storages((63, 3), REPLICATE, mesh, None, 2)} == {REPLICATE, shard(0)}
    assert Layout((("dp_shard", shard(0)),)).local_shape((63, 3), mesh.sizes) == (2, 3), "priced at two rows"


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(16, 16)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.single = nn.Parameter(torch.tensor([0.5]))
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.linear(x) * self.scale + self.single).square().mean()


def test_shp_16_scalars_are_whole() -> None:
    batch = (torch.randn(8, 16, generator=generator()).double(),)
    errors, plan, _ = planned(Scaled(), [batch], 4, {"dp_shard": 4, "linear.weight": "dp_shard:S0"})
    assert [plan.parameter(n).stored for n in ("scale", "single")] == ["R", "R"]
    assert plan.parameter("linear.weight").stored == "dp_shard:S0"
    assert errors.gradient <= 1e-12


class Ragged(nn.Module):
    """Parameters that four ranks cut into 2+2+2+0 and 3+3+3+1, flattened and gathered on the way."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.six = nn.Parameter(torch.randn(6))
        self.wide = nn.Parameter(torch.randn(6, 7))
        self.five = nn.Parameter(torch.randn(5, 10))
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x @ (self.five.t() @ self.wide.flatten()[:30].view(5, 6))
        return (y * self.six + self.wide.flatten().sum()).tanh().square().mean()


def test_shp_18_uneven_and_empty_pieces() -> None:
    pins = {"six": "dp_shard:S0", "wide": "dp_shard:S0", "five": "dp_shard:S0"}
    mesh = Mesh.of(dp_shard=4)
    batch = (torch.randn(8, 10, generator=generator()).double(),)
    model = capture(Ragged(), batch, recipe="fp64")
    offered = {n: stored_layout(tuple(p.shape), Layout(), mesh)["dp_shard"].dim for n, p in Ragged().named_parameters()}
    assert offered == {"six": 0, "wide": 1, "five": 1}
    fix: dict[str, object] = {"dp_shard": 4} | {n: f"dp_shard:S{d}" for n, d in offered.items()}
    plan = search(model.graph, slow_devices(4), global_batch=8, fix=fix)
    assert {p.pattern: p.stored for p in plan.file.parameters} == {n: f"dp_shard:S{d}" for n, d in offered.items()}
    errors, _, _ = planned(Ragged(), [batch], 4, fix)
    assert errors.gradient <= 1e-12
    for name, shape in (("six", (6,)), ("wide", (6, 7)), ("five", (5, 10))):
        layout = Layout.parse(pins[name])
        full = torch.arange(torch.Size(shape).numel()).view(shape)
        pieces = [full[piece(shape, layout, mesh, mesh.coordinate(rank))] for rank in range(4)]
        assert torch.equal(torch.cat(pieces), full)


def routed(width: int) -> ModelShape:
    """gpt-oss-120b's sizes with experts of this width: https://huggingface.co/openai/gpt-oss-120b/blob/main/config.json"""
    return ModelShape("gpt-oss", 2880, 64, 8, 64, 201088, transformer(4, 0, 128), experts=128, top_k=4, moe_ffn=width)


def expert_degrees(shape: ModelShape, precision: str, degrees: range = range(1, 65)) -> list[int]:
    """Degrees of expert-tp that are not refused."""
    legal = []
    for degree in degrees:
        layout = ParallelLayout(
            devices=degree, seq_len=4096, micro_batch=1, global_batch=64 * degree, etp=degree, precision=precision
        )
        try:
            check_shape(shape, layout)
        except LegalityError:
            continue
        legal.append(degree)
    return legal


def test_shp_20_scales_of_a_group_stay_together() -> None:
    assert not is_whole(1856, 2, block=64), "29 groups"
    assert is_whole(1856, 29, block=64)
    assert is_whole(1920, 2, block=64)
    layout = ParallelLayout(devices=4, seq_len=4096, micro_batch=1, global_batch=4, etp=4, precision="mxfp8")
    with pytest.raises(LegalityError, match=r"expert width = 1856 is 58 blocks and etp = 4 leaves 14\.5") as caught:
        check_shape(routed(1856), layout)
    assert "Legal degrees of etp in mxfp8: 1, 2, 29, 58." in str(caught.value)
    check_shape(routed(1856), replace(layout, precision="bf16"))


def test_shp_21_whole_blocks_of_2880_columns() -> None:
    shape = routed(2880)
    divisors = [d for d in range(1, 65) if 2880 % d == 0]
    assert expert_degrees(shape, "bf16") == divisors
    assert {4, 8} <= set(divisors)
    assert expert_degrees(shape, "mxfp8") == [d for d in range(1, 65) if 90 % d == 0] == [
        1, 2, 3, 5, 6, 9, 10, 15, 18, 30, 45
    ]  # fmt: skip
    assert 4 in expert_degrees(shape, "nvfp4"), "180 blocks of 16"
    for precision, degrees in (("mxfp8", [1]), ("bf16", [1, 8])):
        rules = Rules()
        assert rules.legal_etp(shape, 8, precision) == degrees
        assert (("blocks", "etp=8") in rules.refused) == (precision == "mxfp8")
    layout = ParallelLayout(devices=8, seq_len=4096, micro_batch=1, global_batch=8, etp=8)
    assert padded_widths(shape, layout) == ("etp=8 leaves 360 of expert width 2880, no multiple of 64",)
    assert padded_widths(shape, replace(layout, devices=5, global_batch=5, etp=5)) == ()


def test_shp_23_speech_model_heads() -> None:
    model = graph_of(configs.WHISPER, encoder_layers=1, decoder_layers=1)
    assert "= 20, but 20 % 8 = 4. Legal tp for WhisperForConditionalGeneration: [1, 2, 4, 5, 10, 20]" in refusal(
        model, 8, tp=8
    )
    small = replace(toy_model(), limits={"encoder_attention_heads": 6, "decoder_attention_heads": 6})
    assert legal_tp(small) == [1, 2, 3, 6]
    with pytest.raises(LegalityError, match=r"tp=4: expected a divisor of encoder_attention_heads = 6"):
        search(small, h100(4), global_batch=8, fix={"tp": 4})


def test_shp_25_fused_query_key_value_of_gpt2() -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(n_layer=1, n_embd=48, n_head=4, vocab_size=96, n_positions=16, attn_pdrop=0.0,
                        resid_pdrop=0.0, embd_pdrop=0.0, bos_token_id=0, eos_token_id=0)  # fmt: skip
    model = GPT2LMHeadModel(config).double()
    ids = torch.randint(0, 96, (4, 8), generator=generator())
    batch = {"input_ids": ids, "labels": ids, "num_items_in_batch": torch.tensor(28)}
    for used in ({"transformer.h.*.attn.c_attn.weight": "tp:S1"}, {"transformer.h.*.attn.c_attn.weight": "tp:S0"}):
        errors, plan, program = planned(model, [batch], 4, {"tp": 4} | used)
        assert plan.parameter("transformer.h.0.attn.c_attn.weight").stored in used.values()
        assert program.slot("transformer.h.0.attn.c_attn.weight").shape == (48, 144), "in, out: as GPT-2 has it"
        assert errors.gradient <= 1e-10
        assert errors.loss <= 1e-6


class Segments(nn.Module):
    """A projection whose output is split into unequal segments that go different ways."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.fused = nn.Linear(64, 64)
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a, b, c = self.fused(x).split([16, 16, 32], -1)
        return (torch.cat([a.tanh() * b.sigmoid(), b.exp() * a], -1) * c.relu()).square().mean()


def test_shp_26_unequal_segments_of_a_fused_projection() -> None:
    batch = (torch.randn(4, 6, 64, generator=generator()).double(),)
    for devices in (2, 4):
        errors, plan, _ = planned(Segments(), [batch], devices, {"tp": devices})
        assert plan.mesh.size("tp") == devices
        assert errors.gradient <= 1e-10
        assert errors.loss <= 1e-10


def test_shp_28_image_encoder_with_197_tokens() -> None:
    model = graph_of(configs.VIT, num_hidden_layers=1)
    assert any(197 in value.fixed for value in model.outer.values.values())
    with pytest.raises(LegalityError, match=r"fix cp"):
        search(model, h100(2), global_batch=64, fix={"cp": 2})
    split = search(model, h100(2), global_batch=64, fix={"tp": 2})
    assert uneven_cuts(split, model) == []
    free = search(model, h100(2), global_batch=64)
    assert (free.mesh.size("tp"), free.mesh.num_data_ranks) == (1, 2)


def test_shp_29_lossless_slices() -> None:
    mesh, shape = Mesh.of(tp=5), (49155, 2)
    full = torch.arange(49155 * 2).view(shape)
    pieces = [full[piece(shape, Layout.parse("tp:S0"), mesh, mesh.coordinate(rank))] for rank in range(5)]
    assert [len(p) for p in pieces] == [9831] * 5
    assert torch.equal(torch.cat(pieces), full)


def test_heads_without_a_config() -> None:
    """The legal degrees of a module that has no config come from its attention."""
    batch = ids_and_labels(4, 8, 64)
    captured = capture(OddRows(64), batch, recipe="fp64")
    assert legal_tp(captured.graph) == [1, 2, 4]
    text = refusal(captured.graph, 8, tp=8)
    assert "expected a divisor of query heads of the attention at test_shape.py:" in text
    assert "= 4, but 4 % 8 = 4. Legal tp for OddRows: [1, 2, 4]." in text
    assert lower(captured, search(captured.graph, slow_devices(1), global_batch=4)).mesh.num_ranks == 1


@pytest.mark.dist
def test_shp_08_documents_need_no_padding_where_a_sequence_is_cut(ranks: RankPool, tmp_path: Path) -> None:
    """5 + 11 and 3 + 4 + 9 tokens in rows of 16 over two ranks: none has a multiple of four, and none is padded."""
    reference("packed", "fp64", tmp_path / "trace.pt")
    made = sequences_plan("packed", "gathered", "cp-2")
    told = {"family": "packed", "recipe": "fp64", "plan": made.content, "path": str(tmp_path / "trace.pt")}
    for errors in ranks.run(f"{sequences.__name__}:{sequences.compare.__name__}", ranks=2, **told):
        assert errors["loss"] <= 1e-6
        assert errors["gradient"] <= 1e-10
