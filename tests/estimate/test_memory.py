"""Peak bytes: every category worked out by hand, and what must hold for any layout."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpsearch.estimate import LatentAttention, Memory, ModelShape, ParallelLayout, memory
from hpsearch.estimate.logits import logit_bytes
from hpsearch.estimate.memory import adapter_params, in_flight, rank_memory, states
from hpsearch.estimate.shape import transformer
from hpsearch.estimate.stages import Chunk
from hpsearch.estimate.work import attention, head, mlp, moe

LLAMA = ModelShape("Llama 3.1 8B", 4096, 32, 8, 128, 128256, transformer(32, 0, 0), ffn=14336)
"""https://huggingface.co/meta-llama/Llama-3.1-8B/blob/main/config.json"""
EXPERTS = ModelShape(
    "Qwen3 30B-A3B", 2048, 32, 4, 128, 151936, transformer(48, 0, 128), experts=128, top_k=8, moe_ffn=768, qk_norm=True
)
"""https://huggingface.co/Qwen/Qwen3-30B-A3B/blob/main/config.json"""
ONE = ParallelLayout(devices=1, seq_len=4096, micro_batch=1, global_batch=1)
EIGHT = ParallelLayout(devices=8, seq_len=4096, micro_batch=1, global_batch=8)
TOKENS, H, F, A, G, S = 4096, 4096, 14336, 32, 8, 4096
BLOCK = H * (12 + 4 * G / A) + 6 * F + 4 * A
"""Bytes a Llama block keeps of one token in 16 bit with fused attention: inputs of both norms, of the projections and
of the MLP 8h; queries and attention's output 4h; keys and values 4hg/a; gate, up and their product 6f; the
log-sum-exp of each head 4a."""


def part(found: Memory, name: str) -> float:
    return dict(found.parts).get(name, 0.0)


# States.


@pytest.mark.parametrize(
    ("zero", "per_param"), [(0, (2, 4, 12)), (1, (2, 4, 1.5)), (2, (2, 0.5, 1.5)), (3, (0.25, 0.5, 1.5))]
)
def test_states_by_zero_stage(zero: int, per_param: tuple[float, ...]) -> None:
    """18 bytes: weight 2, gradient 4, master 4, moments 8; eight ranks share what the stage says (arXiv 1910.02054)."""
    assert states(replace(EIGHT, zero=zero), 1.0, 0.0) == per_param


def test_states_of_hybrid_sharding() -> None:
    """Shards among two of eight ranks: four copies of everything, each in halves."""
    assert states(replace(EIGHT, zero=3, shard_ranks=2), 8.0, 0.0) == (8, 16, 48)
    assert states(replace(EIGHT, zero=1, shard_ranks=2), 8.0, 0.0) == (16, 32, 48)


def test_states_of_full_sharding() -> None:
    """The shard is the master copy; 16-bit weights exist while gathered, or all the time if backward does not gather
    again."""
    assert states(replace(EIGHT, zero=3, fsdp=True), 8.0, 0.0) == (0, 4, 12)
    assert states(replace(EIGHT, zero=2, fsdp=True), 8.0, 0.0) == (16, 4, 12)
    assert states(replace(EIGHT, zero=3, fsdp=True, grad_bytes=2), 8.0, 0.0) == (0, 4, 12)


def test_states_of_experts_are_shared_by_fewer_ranks() -> None:
    """ep = 4 leaves two ranks with the same experts, eight with the same rest."""
    assert states(replace(EIGHT, ep=4), 8.0, 8.0) == (32, 64, 8 * 12 / 8 + 8 * 12 / 2)


def test_adapters_of_rank_16() -> None:
    """A layer: q and o 2·16·8192, k and v 2·16·5120, gate, up and down 3·16·18432; only these have gradients."""
    layer = adapter_params(LLAMA, ONE, "attention") + adapter_params(LLAMA, ONE, "mlp")
    assert 32 * layer == 41_943_040
    assert states(replace(ONE, lora=True), 1000.0, 0.0, 10.0) == (2 * 1000 + 2 * 10, 4 * 10, 12 * 10)
    assert states(replace(ONE, lora=True, precision="fp8"), 1000.0, 0.0, 10.0)[0] == 1000 + 2 * 10


def test_adapters_of_experts_and_latent_attention() -> None:
    assert adapter_params(EXPERTS, replace(EIGHT, ep=8), "moe") == 16 * 16 * 3 * (2048 + 768)
    latent = replace(LLAMA, mla=LatentAttention(0, 512, 128, 64, 128))
    sides = (H + 32 * 192) + (H + 512 + 64) + (512 + 32 * 256) + (32 * 128 + H)
    assert adapter_params(latent, ONE, "attention") == 16 * sides
    assert adapter_params(LLAMA, ONE, "mamba") == 0


# Activations.


def test_activations_of_a_block() -> None:
    kept = attention(LLAMA, ONE).saved + mlp(LLAMA, ONE).saved
    assert kept == TOKENS * BLOCK
    assert part(memory(LLAMA, ONE), "activations") == 32 * TOKENS * BLOCK


def test_tensor_parallelism_leaves_norms_and_inputs_whole() -> None:
    """tp = 8: the four h-wide tensors of 2 bytes stay, the rest is an eighth; with sequence sharding all is."""
    layout = replace(EIGHT, tp=8, global_batch=1)
    rest = BLOCK - 8 * H
    assert part(memory(LLAMA, layout), "activations") == 32 * TOKENS * (8 * H + rest / 8)
    assert part(memory(LLAMA, replace(layout, sp=True)), "activations") == 32 * TOKENS * BLOCK / 8


def test_full_recompute_keeps_the_input_of_each_layer() -> None:
    found = memory(LLAMA, replace(ONE, recompute="full"))
    assert part(found, "activations") == 32 * TOKENS * 2 * H
    half = memory(LLAMA, replace(ONE, recompute="full", recompute_share=0.5))
    assert part(half, "activations") == 16 * TOKENS * 2 * H + 16 * TOKENS * BLOCK


def test_selective_recompute_drops_its_part() -> None:
    """The MLP's 6f; or of a written score matrix its 2·a·s (Korthikanti 2022, equation 2 without dropout)."""
    found = memory(LLAMA, replace(ONE, recompute="selective", recompute_parts=frozenset({"mlp"})))
    assert part(found, "activations") == 32 * TOKENS * (BLOCK - 6 * F)
    written = replace(ONE, flash=False)
    assert attention(LLAMA, written).saved_parts["attention"] == 2 * A * S * TOKENS
    assert attention(LLAMA, replace(written, dropout=True)).saved_parts["attention"] == 5 * A * S * TOKENS
    kept = part(memory(LLAMA, replace(written, recompute="selective")), "activations")
    assert kept == 32 * TOKENS * (BLOCK - 4 * A)


def test_recompute_by_op_keeps_every_second_product() -> None:
    """The layer's input, queries, values, attention's output and log-sum-exp; of the MLP one half of f and the result:
    of seven products the first, third, fifth and last (torchtitan's selective checkpointing by op)."""
    found = memory(LLAMA, replace(ONE, recompute="selective", recompute_parts=frozenset({"ops"})))
    kept = 2 * H + 2 * H + 2 * H * G / A + 2 * H + 4 * A + 2 * F + 2 * H
    assert part(found, "activations") == 32 * TOKENS * kept


def test_recomputed_experts_keep_norm_and_input() -> None:
    layout = replace(ONE, recompute="selective", recompute_parts=frozenset({"moe"}))
    kept = part(memory(EXPERTS, layout), "activations") / 48
    assert kept == attention(EXPERTS, ONE).saved + 2 * 2 * 2048 * TOKENS
    assert moe(EXPERTS, ONE).saved - 2 * 2 * 2048 * TOKENS == moe(EXPERTS, ONE).saved_parts["moe"]


def test_views_that_keep_a_whole_projection_alive() -> None:
    """Rotated queries and keys beside the tensor that values are a view of: 2(h + hg/a) bytes a token more; learned
    positions rotate nothing."""
    old = replace(ONE, qkv_views=True)
    assert attention(LLAMA, old).copies == TOKENS * 2 * (H + H * G / A)
    assert attention(replace(LLAMA, positions=S), old).copies == 0
    assert part(memory(LLAMA, old), "activations") == 32 * TOKENS * (BLOCK + 2 * (H + H * G / A))


def test_eight_bit_keeps_inputs_in_one_byte() -> None:
    """Inputs of the projections, the MLP and its last linear: one byte less each; the attention's output is kept for
    its backward in 16 bit and for the next product in 8."""
    found = memory(LLAMA, replace(ONE, precision="fp8"))
    assert part(found, "activations") == 32 * TOKENS * (BLOCK - 2 * H - F + H)


def test_activations_in_flight() -> None:
    """1F1B: p - r micro-batches. Interleaved: 2(p - r - 1) + (v - 1)p + 1 chunks. Never more than there are: m·v."""
    layout = ParallelLayout(devices=4, seq_len=1, micro_batch=1, global_batch=16, pp=4)
    assert [in_flight(layout, rank) for rank in range(4)] == [4, 3, 2, 1]
    assert in_flight(replace(layout, global_batch=2), 0) == 2
    interleaved = replace(layout, vpp=2)
    assert [in_flight(interleaved, rank) for rank in range(4)] == [11, 9, 7, 5]
    assert in_flight(replace(interleaved, global_batch=4), 0) == 4 * 2
    assert in_flight(replace(interleaved, global_batch=1), 0) == 2


def test_first_stage_of_1f1b_keeps_all_layers_whatever_the_depth() -> None:
    """p micro-batches of L/p layers (Korthikanti 2022, 4.2.3)."""
    for pp in (2, 4, 8):
        layout = ParallelLayout(devices=pp, seq_len=S, micro_batch=1, global_batch=2 * pp, pp=pp)
        assert part(rank_memory(LLAMA, layout, 0), "activations") == 32 * TOKENS * BLOCK


def test_offloaded_activations_but_those_under_way() -> None:
    """One stage: the last layers stay, or two at work and two leaving of 32; in a pipeline two come back and two are at
    work in backward, beside what stays."""
    found = part(memory(LLAMA, replace(ONE, offload_share=1.0)), "activations")
    assert found == 4 * TOKENS * BLOCK
    half = part(memory(LLAMA, replace(ONE, offload_share=0.5)), "activations")
    assert half == 16 * TOKENS * BLOCK
    piped = ParallelLayout(devices=4, seq_len=S, micro_batch=1, global_batch=8, pp=4, offload_share=1.0)
    assert part(rank_memory(LLAMA, piped, 0), "activations") == 8 * TOKENS * BLOCK
    assert part(rank_memory(LLAMA, replace(piped, offload_share=0.5), 0), "activations") == (16 + 8) * TOKENS * BLOCK


# Logits, buffers, moments.


@pytest.mark.parametrize(
    ("change", "each", "ways"),
    [
        ({}, 2 + 4, 1),
        ({"tp": 8}, 2 + 4, 8),
        ({"fused": False}, 2 + 4 + 4 + 4, 1),
        ({"fused": False, "fsdp": True, "zero": 3}, 2 + 4 + 4 + 4, 1),
        ({"fused": False, "fsdp": True, "zero": 3, "loss_kernel": True}, 2 + 2, 1),
        ({"fused": False, "tp": 8}, 2 + 4 + 4 + 4 + 2 + 4 + 2, 1),
    ],
)
def test_bytes_of_a_logit(change: dict[str, int], each: int, ways: int) -> None:
    layout = replace(EIGHT, **change)  # type: ignore[arg-type]
    assert logit_bytes(layout) == each
    assert head(LLAMA, layout).saved == pytest.approx(each * TOKENS * 128256 / ways + 2 * H * TOKENS)


def test_logits_stand_where_the_head_does() -> None:
    layout = ParallelLayout(devices=4, seq_len=S, micro_batch=1, global_batch=8, pp=4)
    assert [part(rank_memory(LLAMA, layout, rank), "logits") > 0 for rank in range(4)] == [False, False, False, True]


def test_full_sharding_gathers_two_layers_and_holds_a_gradient() -> None:
    """16-bit weights of two layers, and the gradient of one before it is scattered."""
    layout = replace(EIGHT, zero=3, fsdp=True, recompute="full", seq_len=65536)
    layer = LLAMA.block_params("attention") + LLAMA.block_params("mlp")
    shape = replace(LLAMA, vocab=256)
    assert part(memory(shape, layout), "buffers") == (2 * 2 + 4) * layer


def test_what_is_on_its_way() -> None:
    """Eight whole inputs under overlapped tp; activation and gradient in and out between stages; keys and values of
    the next rank, or of all four, with their gradients; tokens to and from experts; two buckets of ZeRO-2."""

    def exchanged(layout: ParallelLayout, shape: ModelShape = LLAMA) -> float:
        return part(memory(shape, layout), "exchange")

    assert exchanged(ONE) == 0
    wide = replace(EIGHT, tp=8, sp=True, global_batch=1)
    assert exchanged(wide) == 0
    assert exchanged(replace(wide, overlap_tp=True)) == 8 * 2 * H * TOKENS
    staged = ParallelLayout(devices=2, seq_len=S, micro_batch=1, global_batch=2, pp=2)
    assert exchanged(staged) == 2 * 2 * 2 * H * TOKENS
    ring = ParallelLayout(devices=4, seq_len=S, micro_batch=1, global_batch=1, cp=4)
    block = 2 * 2 * (H * G / A) * TOKENS / 4
    assert exchanged(ring) == 2 * block
    assert exchanged(replace(ring, cp_kind="gather")) == 2 * 4 * block
    assert exchanged(replace(EIGHT, ep=8), EXPERTS) == 2 * 2 * 2048 * TOKENS * 8
    assert exchanged(replace(EIGHT, zero=2)) == 2 * 4 * 5e8


def test_every_extra_prediction_has_logits() -> None:
    once = part(memory(LLAMA, ONE), "logits")
    assert part(memory(replace(LLAMA, mtp_layers=1), ONE), "logits") == 2 * once


def test_the_peak_is_the_fullest_moment() -> None:
    """A large vocabulary peaks at the loss, a small one in the backward of a layer, a tiny batch at the update."""
    assert part(memory(LLAMA, ONE), "logits") > 0
    assert part(memory(LLAMA, ONE), "working set") == 0
    small = memory(replace(LLAMA, vocab=256), ONE)
    assert part(small, "working set") == TOKENS * BLOCK
    tiny = memory(LLAMA, replace(ONE, seq_len=8, grad_bytes=2))
    assert part(tiny, "update") == 4 * LLAMA.total_params


def test_a_tied_projection_is_one_tensor_on_one_stage_and_two_on_two() -> None:
    tied = replace(LLAMA, tied=True)
    table = 2 * 128256 * H
    assert part(memory(tied, ONE), "weights") == part(memory(LLAMA, ONE), "weights") - table
    two = ParallelLayout(devices=2, seq_len=S, micro_batch=1, global_batch=2, pp=2)
    for rank in range(2):
        assert rank_memory(tied, two, rank).parts == rank_memory(LLAMA, two, rank).parts


def test_a_given_cut_is_charged_at_its_heaviest_stage() -> None:
    layout = ParallelLayout(devices=2, seq_len=S, micro_batch=1, global_batch=2, pp=2)
    layer = Counter({"attention": 1, "mlp": 1})
    blocks = [Counter({name: n * count for name, count in layer.items()}) for n in (4, 28)]
    cut = (Chunk(blocks[0], 4, embedding=True, heads=0), Chunk(blocks[1], 28, embedding=False, heads=1))
    found = memory(LLAMA, layout, cut)
    assert found.rank == 1
    assert part(found, "weights") == 2 * (LLAMA.total_params - 128256 * H - 4 * sum(map(LLAMA.block_params, layer)))


def test_all_categories_in_the_printed_report() -> None:
    text = str(memory(LLAMA, EIGHT))
    for words in ("peak", "weights", "gradients", "optimizer", "activations", "logits", "reserve", "context"):
        assert words in text
    assert text.endswith("smaller gradients: ZeRO-2, 16-bit gradients")
    sizes = [size for _, size in memory(LLAMA, EIGHT).largest]
    assert sizes == sorted(sizes, reverse=True)


# What must hold for any layout.


def built(tp: int, pp: int, cp: int, dp: int, micro: int, **rest: Any) -> ParallelLayout:
    return ParallelLayout(
        devices=tp * pp * cp * dp, micro_batch=micro, global_batch=micro * dp * 16, tp=tp, pp=pp, cp=cp,
        ep=min(8, tp * cp * dp), **rest,
    )  # fmt: skip


layouts = st.builds(
    built,
    tp=st.sampled_from([1, 2, 4, 8]), pp=st.sampled_from([1, 2, 4]), cp=st.sampled_from([1, 2]),
    dp=st.sampled_from([1, 2, 8, 64]), micro=st.integers(1, 8), vpp=st.sampled_from([1, 2]),
    seq_len=st.sampled_from([512, 4096, 32768]), zero=st.integers(0, 3), fsdp=st.booleans(), sp=st.booleans(),
    recompute=st.sampled_from(["none", "selective", "full"]), fused=st.booleans(),
    precision=st.sampled_from(["bf16", "fp8"]), flash=st.booleans(), lora=st.booleans(),
    offload_share=st.sampled_from([0.0, 0.5]), expandable=st.booleans(), overlap_tp=st.booleans(),
)  # fmt: skip
shapes = st.sampled_from([LLAMA, EXPERTS, replace(LLAMA, tied=True, vocab=1024)])


@given(shapes, layouts)
@settings(max_examples=100, deadline=None, derandomize=True)
def test_more_shards_never_hold_more(shape: ModelShape, layout: ParallelLayout) -> None:
    wide = replace(layout, devices=2 * layout.devices, global_batch=2 * layout.global_batch)
    assert memory(shape, wide).persistent_bytes <= memory(shape, layout).persistent_bytes * (1 + 1e-12)
    for rank in range(layout.pp):
        assert rank_memory(shape, wide, rank).tensor_bytes <= rank_memory(shape, layout, rank).tensor_bytes * (
            1 + 1e-12
        )


@given(shapes, layouts)
@settings(max_examples=100, deadline=None, derandomize=True)
def test_more_tokens_never_need_less(shape: ModelShape, layout: ParallelLayout) -> None:
    least = memory(shape, layout).peak_bytes
    more_rows = replace(
        layout, micro_batch=layout.micro_batch + 1, global_batch=16 * layout.dp * (layout.micro_batch + 1)
    )
    assert memory(shape, more_rows).peak_bytes >= least
    assert memory(shape, replace(layout, seq_len=2 * layout.seq_len)).peak_bytes >= least


@given(shapes, layouts)
@settings(max_examples=50, deadline=None, derandomize=True)
def test_recompute_and_accumulation_never_need_more(shape: ModelShape, layout: ParallelLayout) -> None:
    """Kept activations shrink with every kind of recompute; more micro-batches than fill the pipeline keep no more."""

    def kept(kind: str) -> float:
        return part(rank_memory(shape, replace(layout, recompute=kind), 0), "activations")

    assert kept("full") <= kept("none")
    assert kept("selective") <= kept("none")
    assert memory(shape, replace(layout, global_batch=8 * layout.global_batch)) == memory(shape, layout)
