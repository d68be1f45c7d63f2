"""What fills a device: each situation with its bytes worked out by hand."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from math import prod
from pathlib import Path

import pytest
import torch
from torch import nn

from hpsearch.cluster import Cluster
from hpsearch.estimate import LatentAttention, Memory, ModelShape, ParallelLayout, estimate, memory
from hpsearch.estimate.logits import logit_bytes
from hpsearch.estimate.memory import REMEDIES, adapter_params, rank_memory
from hpsearch.estimate.shape import transformer
from hpsearch.estimate.stages import Chunk
from hpsearch.estimate.work import attention, head, moe
from hpsearch.layout import Placement
from hpsearch.plan import Plan
from hpsearch.search.memory import RESERVE, usable_bytes
from tests.cases import configs, jobs
from tests.cases.parity import generator, planned
from tests.cases.plans import graph_of, h100, search
from tests.end_to_end.experts import deepseek_v3
from tests.end_to_end.models import OTHERS, Case
from tests.end_to_end.ranks import RankPool
from tests.end_to_end.slow import slow_devices
from tests.search.memory_truth import made, measured, planned_on

LLAMA_8B = ModelShape("Llama 3.1 8B", 4096, 32, 8, 128, 128256, transformer(32, 0, 0), ffn=14336)
QWEN_30B = ModelShape(
    "Qwen3 30B-A3B", 2048, 32, 4, 128, 151936, transformer(48, 0, 128), experts=128, top_k=8, moe_ffn=768, qk_norm=True
)
"""https://huggingface.co/Qwen/Qwen3-30B-A3B/blob/main/config.json"""
QWEN_05B = ModelShape("Qwen2.5 0.5B", 896, 14, 2, 64, 151936, transformer(24, 0, 0), ffn=4864, tied=True, qkv_bias=True)
"""https://huggingface.co/Qwen/Qwen2.5-0.5B/blob/main/config.json"""
DEEPSEEK_FOUR = ModelShape(
    "DeepSeek-V3, four layers", 7168, 128, 128, 192, 129280, transformer(4, 1, 256), ffn=18432, experts=256, top_k=8,
    moe_ffn=2048, shared_ffn=2048, mla=LatentAttention(1536, 512, 128, 64, 128),
)  # fmt: skip
"""https://huggingface.co/deepseek-ai/DeepSeek-V3/blob/main/config.json, one dense and three sparse layers of it."""
GIB = 2**30


def part(found: Memory, name: str) -> float:
    return dict(found.parts).get(name, 0.0)


def test_mem_01_bytes_of_a_parameter() -> None:
    layout = ParallelLayout(devices=8, seq_len=4096, micro_batch=1, global_batch=8, zero=0)
    params = LLAMA_8B.total_params
    assert params == 8_030_261_248
    plain = memory(LLAMA_8B, layout)
    assert (part(plain, "weights"), part(plain, "gradients"), part(plain, "optimizer")) == (
        2 * params, 4 * params, (4 + 8) * params
    )  # fmt: skip
    assert plain.persistent_bytes == pytest.approx(144.5e9, rel=1e-3)
    sharded = memory(LLAMA_8B, replace(layout, zero=1))
    assert sharded.persistent_bytes == 7.5 * params
    assert sharded.persistent_bytes == pytest.approx(60.2e9, rel=1e-3)
    for words in ("weights", "gradients", "optimizer", "activations"):
        assert words in str(sharded)


def test_mem_03_logits_come_first() -> None:
    """Adapters over a checkpointed model whose loss is written op by op: two samples of 15,000 tokens."""
    layout = ParallelLayout(
        devices=4, seq_len=15000, micro_batch=2, global_batch=8, lora=True, recompute="full", fused=False
    )
    found = memory(LLAMA_8B, layout)
    assert found.largest[0][0] == "logits"
    copy = 15000 * 128256 * 4
    assert copy / GIB == pytest.approx(7.17, abs=0.005)
    assert part(found, "logits") > 2 * 2 * copy
    assert found.peak_bytes > 45 * GIB
    for words in ("loss in chunks", "split over the vocabulary", "context parallelism"):
        assert words in REMEDIES["logits"]
        assert words in str(found)
    halves = memory(LLAMA_8B, replace(layout, cp=2))
    assert part(halves, "logits") == pytest.approx(part(found, "logits") / 2)


def test_mem_03_only_adapters_have_gradients() -> None:
    one = ParallelLayout(devices=1, seq_len=15000, micro_batch=2, global_batch=2, lora=True)
    adapters = 32 * (adapter_params(LLAMA_8B, one, "attention") + adapter_params(LLAMA_8B, one, "mlp"))
    assert adapters == 41_943_040
    found = memory(LLAMA_8B, one)
    assert part(found, "gradients") == 4 * adapters
    assert part(found, "optimizer") == 12 * adapters


def test_mem_05_the_heaviest_stage() -> None:
    shape = replace(LLAMA_8B, pattern=transformer(8, 0, 0))
    layout = ParallelLayout(devices=4, seq_len=4096, micro_batch=1, global_batch=8, pp=4)
    cut = tuple(
        Chunk(Counter({"attention": n, "mlp": n}), n, embedding=i == 0, heads=int(i == 3))
        for i, n in enumerate((1, 2, 2, 3))
    )
    layer = shape.block_params("attention") + shape.block_params("mlp")
    table = 128256 * 4096
    held = [part(rank_memory(shape, layout, rank, cut), "weights") / 2 for rank in range(4)]
    assert held == [layer + table, 2 * layer, 2 * layer, 3 * layer + table + 4096]
    found = memory(shape, layout, cut)
    assert found.rank == 3
    assert found.peak_bytes == max(rank_memory(shape, layout, rank, cut).peak_bytes for rank in range(4))


def test_mem_06_experts_have_their_own_divisor() -> None:
    layout = ParallelLayout(devices=8, seq_len=4096, micro_batch=1, global_batch=8, tp=4, ep=2, etp=1)
    whole = moe(QWEN_30B, replace(layout, devices=1, tp=1, ep=1, global_batch=1))
    assert 48 * whole.expert_params == 28_991_029_248
    block = moe(QWEN_30B, layout)
    assert 48 * block.expert_params == 14_495_514_624
    router, norm = 2048 * 128, 2048
    assert block.params == router + norm
    rest = QWEN_30B.block_params("attention") - norm
    assert attention(QWEN_30B, layout).params == rest / 4 + norm
    assert part(memory(QWEN_30B, layout), "weights") > 2 * 14_495_514_624


@pytest.mark.parametrize(
    ("tokens", "vocab", "gib"), [(8192, 151936, 4.637), (8192, 262208, 8.0), (11600, 248320, 10.73)]
)
def test_mem_08_logits_of_a_large_vocabulary(tokens: int, vocab: int, gib: float) -> None:
    shape = replace(QWEN_30B, vocab=vocab)
    layout = ParallelLayout(devices=1, seq_len=tokens, micro_batch=1, global_batch=1)
    logits = head(shape, layout).saved - 2 * tokens * 2048
    assert 4 * logits / logit_bytes(layout) / GIB == pytest.approx(gib, abs=0.005)
    assert logit_bytes(layout) >= 4 + 2


def test_mem_08_where_the_head_is_and_divided_only_with_the_loss() -> None:
    layout = ParallelLayout(devices=8, seq_len=8192, micro_batch=1, global_batch=8, tp=2, pp=4)
    assert [part(rank_memory(QWEN_30B, layout, rank), "logits") > 0 for rank in range(4)] == [False] * 3 + [True]
    rows = 2 * 8192 * 2048
    split = (head(QWEN_30B, layout).saved - rows) / logit_bytes(layout)
    gathered = replace(layout, fused=False)
    whole = (head(QWEN_30B, gathered).saved - rows) / logit_bytes(gathered)
    assert (split, whole) == (8192 * 151936 / 2, 8192 * 151936)


def pieces_of(plan: Plan, graph: str, step: str, output: int) -> int:
    """Into how many pieces the ranks cut one result of a step."""
    pieces = 1
    for axis, text in plan.file.placements.get(graph, {}).get(step, {}).items():
        placement = Placement.parse(text.partition("->")[2].split(",")[output])
        pieces *= plan.mesh.size(axis) if placement.is_shard else 1
    return pieces


@pytest.mark.slow
def test_mem_10_no_replicated_embedding_output() -> None:
    model = graph_of(configs.LLAMA_8B, seq_len=8192, num_hidden_layers=1)
    plan = search(model, h100(64), global_batch=128)
    ids = next(entry for entry in plan.file.inputs if entry.name == "input_ids")
    assert "S0" in ids.layout
    largest, seen = 128 * 8192 * 4096, 0
    for graph, _ in model.pieces():
        for step in graph.steps:
            for output, value in enumerate(step.outputs):
                if prod(graph.values[value].shape(plan.micro_batch_rows)) >= largest:
                    assert pieces_of(plan, graph.name, step.name, output) > 1, f"{graph.name}.{value} is on every rank"
                    seen += 1
    assert seen
    assert plan.file.predicted.peak_bytes <= usable_bytes(h100(64))


@pytest.mark.dist
def test_mem_11_a_point_too_large_to_measure_has_no_price(ranks: RankPool, tmp_path: Path) -> None:
    """One rank of two lacks the memory; both leave the point out, measure the others, and the profile lists it."""
    (without, priced), _ = ranks.run(f"{jobs.__name__}:short_of_memory", ranks=2, folder=tmp_path)
    large = f"{2**20}x64x64"
    assert without == {"out of memory": [f"matmul {large} {dtype}" for dtype in ("float32", "bfloat16")]}
    assert {f"matmul 16x64x64 {dtype}" for dtype in ("float32", "bfloat16")} < set(priced)
    assert {"launch", "overlap", "all_reduce 2x1 512B"} < set(priced)
    assert json.loads((tmp_path / "fit.json").read_text())["not_measured"] == without
    cluster = Cluster.load(tmp_path, devices=2)
    assert cluster.device.peak


def test_mem_13_a_reserve_is_kept_and_shown() -> None:
    card = h100(8, memory_gib=79.2)
    assert RESERVE >= 0.05
    assert usable_bytes(card) <= 0.95 * 79.2 * GIB < 77 * GIB
    found = memory(LLAMA_8B, ParallelLayout(devices=8, seq_len=4096, micro_batch=1, global_batch=8))
    held_back = part(found, "reserve") + part(found, "context")
    assert held_back >= 0.03 * found.tensor_bytes
    assert "reserve" in str(found)
    fixed = replace(ParallelLayout(devices=8, seq_len=4096, micro_batch=1, global_batch=8), expandable=False)
    assert part(memory(LLAMA_8B, fixed), "reserve") > part(found, "reserve")


class Small(nn.Module):
    """Two layers and a mean over all outputs."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(8, 32, bias=False), nn.Linear(32, 8, bias=False)
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x).tanh()).square().mean()


def test_mem_15_accumulation_needs_no_more() -> None:
    batches = [(torch.randn(4, 8, generator=generator(i)).double(),) for i in range(8)]
    errors, eight, _ = planned(Small(), batches, 2, {"dp_shard": 2})
    assert errors.gradient <= 1e-12
    _, one, _ = planned(Small(), batches[:1], 2, {"dp_shard": 2})
    assert eight.file.job.micro_batches == 8
    assert eight.file.predicted.bytes["activations"] == one.file.predicted.bytes["activations"]
    layout = ParallelLayout(devices=8, seq_len=4096, micro_batch=1, global_batch=8)
    assert memory(LLAMA_8B, replace(layout, global_batch=64)) == memory(LLAMA_8B, layout)


def test_mem_16_tied_parameters_count_once() -> None:
    assert QWEN_05B.total_params == 494_032_768
    assert replace(QWEN_05B, tied=False).total_params == 630_167_424
    one = ParallelLayout(devices=1, seq_len=512, micro_batch=1, global_batch=1)
    assert part(memory(QWEN_05B, one), "weights") == 2 * 494_032_768
    two = ParallelLayout(devices=2, seq_len=512, micro_batch=1, global_batch=2, pp=2)
    both = sum(part(rank_memory(QWEN_05B, two, rank), "weights") for rank in range(2))
    assert both == 2 * 630_167_424


class Buffered(nn.Module):
    """A buffer that is saved and one that is not."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Linear(8, 32, bias=False)
        self.register_buffer("scale", torch.full((32,), 0.5))
        self.register_buffer("table", torch.rand(4, 32), persistent=False)
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return ((self.inner(x) * self.scale).unsqueeze(1) + self.table).square().mean()


def test_mem_16_buffers_count_on_every_device() -> None:
    batch = (torch.randn(4, 8, generator=generator()).double(),)
    for devices in (1, 2):
        errors, plan, _ = planned(Buffered(), [batch], devices, {"dp_shard": devices})
        assert errors.gradient <= 1e-12
        assert plan.file.predicted.bytes["buffers"] == 8 * (32 + 4 * 32)
        assert plan.file.predicted.peak_bytes == sum(plan.file.predicted.bytes.values())


def test_mem_18_nothing_is_computed_again_for_free() -> None:
    """What is recomputed takes its time, attention and collectives too; the widest layer decides the buffer."""
    cluster = h100(8)
    layout = ParallelLayout(devices=8, seq_len=4096, micro_batch=1, global_batch=4, tp=2, ep=8)
    keep = estimate(DEEPSEEK_FOUR, layout, cluster)
    again = estimate(DEEPSEEK_FOUR, replace(layout, recompute="full"), cluster)
    for name in ("core", "tp", "ep", "moved"):
        assert 0 < dict(keep.parts)[name] < dict(again.parts)[name], name
    assert again.step_s > keep.step_s
    assert again.memory.peak_bytes < keep.memory.peak_bytes
    shards = ParallelLayout(devices=8, seq_len=512, micro_batch=1, global_batch=8, fsdp=True, zero=3, recompute="full")
    widest = DEEPSEEK_FOUR.block_params("attention") + DEEPSEEK_FOUR.block_params("moe")
    assert part(memory(DEEPSEEK_FOUR, shards), "buffers") >= 2 * widest


def deepseek_four() -> Case:
    """One dense and three sparse layers, sequences of 64."""
    from transformers import DeepseekV3ForCausalLM

    case = deepseek_v3()
    config = case.model.config
    config.num_hidden_layers = 4
    batch = {name: leaf.repeat(1, 8) if isinstance(leaf, torch.Tensor) else leaf for name, leaf in case.batch.items()}
    return Case(DeepseekV3ForCausalLM(config), batch)


OTHERS["deepseek_four"] = deepseek_four


def test_mem_18_recompute_keeps_to_a_budget() -> None:
    """60 % of what keeping everything takes: what is recomputed fits, by measure (routing is a little uneven)."""
    graph = made("deepseek_four", "fp32", 12)[1].graph
    fix = {"ep": 2, "micro_batches": 1}
    keep = search(graph, slow_devices(2), global_batch=12, fix={**fix, "recompute": "none"}).file.predicted
    budget = 0.6 * keep.peak_bytes
    small = slow_devices(2)
    small = replace(small, device=replace(small.device, memory_bytes=int(budget / (1 - RESERVE))))
    plan, program = planned_on("deepseek_four", "fp32", small, **fix)
    assert list(plan.file.job.recompute.values()) == ["full"]
    assert plan.file.predicted.step_s > keep.step_s
    assert measured("deepseek_four", "fp32", plan, program) <= 1.05 * budget
