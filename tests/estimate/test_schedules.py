"""Schedules of a given layout: legality, split backwards, the V, and what stays alive, each worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hpsearch.cluster import Cluster
from hpsearch.cluster.efficiency import efficiency_of
from hpsearch.errors import LegalityError
from hpsearch.estimate import Memory, ModelShape, ParallelLayout, estimate, memory, rank_memory
from hpsearch.estimate.estimate import blocks, price
from hpsearch.estimate.kept import owed_bytes
from hpsearch.estimate.many import estimate_all
from hpsearch.estimate.price import HOST, LINEAR, MOVED, PLAIN, ROUTED
from hpsearch.estimate.shape import transformer
from hpsearch.estimate.work import attention, mlp
from hpsearch.schedule import KINDS

SHAPE = ModelShape("8 layers", 4096, 32, 8, 128, 32000, transformer(8, 0, 0), ffn=14336)
BARE = replace(SHAPE, vocab=0)
"""Layers alone: every chunk is made of them and nothing else."""
EXPERTS = ModelShape("experts", 2048, 16, 4, 128, 0, transformer(8, 0, 8), experts=8, top_k=2, moe_ffn=2048)
CLUSTER = Cluster.load("h100-sxm-roce400", devices=8)
RATES = replace(efficiency_of(CLUSTER.device.name), kernel_s=0.0, step_s=0.0)
"""Nothing waits for the host."""
FOUR = ParallelLayout(devices=4, seq_len=4096, micro_batch=1, global_batch=16, pp=4)
FOLDED = replace(FOUR, vpp=2)
LEGAL = [
    replace(FOLDED if kind.least_virtual == 2 else FOUR, schedule=name) for name, kind in KINDS.items()
]  # fmt: skip


def part(found: Memory, name: str) -> float:
    return dict(found.parts).get(name, 0.0)


# Legality.


@pytest.mark.parametrize(
    ("layout", "schedule", "told"),
    [
        (FOUR, "dapple", "layout, schedule = dapple: expected one of gpipe, 1f1b"),
        (FOUR, "zbv", "schedule zbv, virtual = 1: expected 2 stages on each rank, but found 1; Legal: 2"),
        (FOLDED, "zb-h1", "schedule zb-h1, virtual = 2: expected 1 stage on each rank"),
        (FOLDED, "1f1b", "layout, schedule = 1f1b: expected vpp = 1, but vpp = 2"),
        (FOUR, "interleaved", "layout, schedule = interleaved: expected vpp of 2 and more, but vpp = 1"),
        (replace(FOLDED, global_batch=7), "dualpipev", "micro_batches = 7: expected at least 8 for 4 ranks"),
        (replace(FOLDED, global_batch=18), "interleaved-zb", "micro_batches = 18: expected a multiple of the 4 ranks"),
        (replace(FOUR, pp=1), "zb-h1", "layout, schedule = zb-h1: expected a pipeline, but pp = 1"),
    ],
)
def test_a_schedule_that_does_not_fit_the_layout_is_refused(layout: ParallelLayout, schedule: str, told: str) -> None:
    with pytest.raises(LegalityError) as error:
        replace(layout, schedule=schedule)
    assert told.replace("; ", "").split(": ")[0] in str(error.value).replace("\n", " ")
    assert told.split(": ")[1].split(";")[0] in str(error.value)


@pytest.mark.parametrize(("layout", "named"), [(FOUR, "1f1b"), (FOLDED, "interleaved"), (replace(FOUR, pp=1), "1f1b")])
def test_by_default_it_is_the_one_that_frameworks_run(layout: ParallelLayout, named: str) -> None:
    assert layout.schedule_kind == named
    said = replace(layout, schedule=named)
    assert estimate(SHAPE, said, CLUSTER) == estimate(SHAPE, layout, CLUSTER)


# Seconds.


@pytest.mark.parametrize("shape", [SHAPE, EXPERTS])
@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_a_weight_part_is_one_product_of_each_linear(shape: ModelShape, precision: str) -> None:
    """As long as the forward's, with one kernel each, and the accumulation of gradients."""
    layout = replace(FOUR, precision=precision)
    works, seconds = blocks(shape, layout, CLUSTER)
    stream = CLUSTER.device.memory_bytes_per_s * CLUSTER.device.memory_efficiency
    for name, one in seconds.items():
        work, (forward, weight) = works[name], (one.forward, one.weight)
        assert weight[[LINEAR, PLAIN]].tolist() == forward[[LINEAR, PLAIN]].tolist()
        assert weight[ROUTED] == pytest.approx(forward[ROUTED] - work.routed_forward / stream)
        accumulated = 2 * 4 * (work.params + work.expert_params) if name in shape.counts else 0.0
        assert weight[MOVED] == pytest.approx(accumulated / stream)
        assert weight[HOST] == len(work.linears) + len(work.grouped) + len(work.plains)
        assert (weight <= one.backward).all()


def test_frozen_weights_have_no_weight_part() -> None:
    _, seconds = blocks(SHAPE, replace(FOUR, lora=True), CLUSTER)
    assert not seconds["mlp"].weight.any()


def test_zb_h1_by_hand() -> None:
    """Equal stages, hops of nothing: all work of a rank and (p - 1)·max(F, I, F + I - W)."""
    made = replace(price(BARE, replace(FOUR, schedule="zb-h1"), CLUSTER), hop_s=0.0, gather_s=0.0, reduce_s=0.0)
    f, i, w = (float(one[0]) for one in made.split_seconds(RATES))
    parts = dict(made.step(RATES)[1])
    step_s = made.step(RATES)[0] - parts["optimizer"]
    assert step_s == pytest.approx(16 * (f + i + w) + 3 * max(f, i, f + i - w))
    whole = price(BARE, FOUR, CLUSTER).chunk_seconds(RATES)
    assert f + i + w == pytest.approx(float(whole[0][0] + whole[1][0]))


@pytest.mark.parametrize("layout", LEGAL, ids=lambda one: one.schedule)
def test_a_step_is_no_shorter_than_the_work_of_a_rank(layout: ParallelLayout) -> None:
    made = price(SHAPE, layout, CLUSTER)
    f, i, w = made.split_seconds(RATES)
    work = [16 * float((f + i + w)[list(layout.chunks_of(rank))].sum()) for rank in range(4)]
    step_s, parts = made.step(RATES)
    assert step_s >= max(work)
    assert sum(value for _, value in parts) == pytest.approx(step_s)


def test_all_at_once_is_one_by_one() -> None:
    found = estimate_all(SHAPE, LEGAL, CLUSTER)
    for layout, step_s, peak in zip(LEGAL, found.step_s.tolist(), found.peak_bytes.tolist(), strict=True):
        one = estimate(SHAPE, layout, CLUSTER)
        assert (step_s, peak) == (pytest.approx(one.step_s, rel=1e-12), one.peak_bytes)


def test_split_backwards_hide_less_of_the_reduction() -> None:
    """Gradients are complete after weight parts, and only those are left to hide it."""
    many = replace(FOUR, devices=8, global_batch=32, overlap_grad_reduce=True)
    split, whole = (
        dict(price(SHAPE, replace(many, schedule=kind), CLUSTER).step(RATES)[1])["reduce"] for kind in ("zb-h1", "1f1b")
    )
    assert split >= whole


# The V.


def test_embedding_and_head_stand_on_rank_0_of_a_v() -> None:
    folded = replace(FOLDED, schedule="zbv")
    assert [folded.chunks_of(rank) for rank in range(4)] == [(0, 7), (1, 6), (2, 5), (3, 4)]
    layer, table = sum(SHAPE.block_params(name) for name in ("attention", "mlp")), 32000 * 4096
    for tied, tables in ((False, 2), (True, 1)):
        shape = replace(SHAPE, tied=tied)
        wanted = [2 * layer + tables * table + 4096, *[2 * layer] * 3]
        found = [rank_memory(shape, replace(folded, cut=(1,) * 8), rank).persistent_bytes for rank in range(4)]
        assert found == pytest.approx([18 * params for params in wanted])


def test_a_tied_table_of_a_v_is_reduced_once() -> None:
    wide = replace(FOLDED, devices=8, global_batch=32, schedule="zbv", zero=0, cut=(1,) * 8)
    tied, untied = (price(replace(SHAPE, tied=one, vocab=500_000), wide, CLUSTER) for one in (True, False))
    assert tied.reduce_s < untied.reduce_s < 2 * tied.reduce_s
    assert tied.optimizer_s < untied.optimizer_s


# What stays alive.


def layer_bytes() -> tuple[float, float]:
    """Of one layer: kept from forward to input part; inputs and output gradients of its linears, to the weight part."""
    works = attention(BARE, FOUR), mlp(BARE, FOUR)
    return sum(one.saved + one.copies for one in works), sum(owed_bytes(one, BARE, FOUR) for one in works)


def test_inputs_and_output_gradients_by_hand() -> None:
    """Of one layer in 16 bit: inputs 4096, 4096, 4096, 14336 wide, outputs 6144, 4096, 28672, 4096 wide."""
    inputs, outputs = 3 * 4096 + 14336, 6144 + 4096 + 28672 + 4096
    assert layer_bytes()[1] == 2 * 4096 * (inputs + outputs)


def test_activations_of_zb_h1() -> None:
    """Rank r has as many forwards ahead as in 1F1B, and r weight parts to do."""
    kept, owed = layer_bytes()
    layout = replace(FOUR, schedule="zb-h1")
    for rank in range(4):
        found = part(rank_memory(BARE, layout, rank), "activations")
        ahead = [(4 - rank) * kept + rank * owed, (3 - rank) * kept + rank * owed + max(kept, owed)]
        assert found == pytest.approx(2 * ahead[1])  # two layers a stage; the backward has its working set on top


def test_recomputed_layers_owe_as_much_as_others() -> None:
    """Before its input part a layer that is computed again keeps its input alone, after it what its linears need."""
    _, owed = layer_bytes()
    layout = replace(FOUR, schedule="zb-h1", recompute="full")
    found = part(rank_memory(BARE, layout, 3), "activations")
    assert found == pytest.approx(2 * (3 * owed + owed))
    some = replace(layout, cut=(2, 2, 2, 2), recomputed=(2, 2, 2, 0))
    plain = replace(layout, recompute="none")
    assert part(rank_memory(BARE, some, 3), "activations") == part(rank_memory(BARE, plain, 3), "activations")


def test_gpipe_keeps_every_micro_batch_and_its_logits() -> None:
    kept, _ = layer_bytes()
    found = rank_memory(BARE, replace(FOUR, schedule="gpipe"), 3)
    assert part(found, "activations") == pytest.approx(16 * 2 * kept)
    whole, once = (rank_memory(SHAPE, replace(FOUR, schedule=one), 3) for one in ("gpipe", "1f1b"))
    assert part(whole, "logits") == pytest.approx(16 * part(once, "logits"))


def test_a_v_keeps_as_much_on_every_rank_as_1f1b_on_the_first() -> None:
    """Of layers alone, but for what weight parts wait for (Qi et al. 2024, section 6)."""
    kept, owed = layer_bytes()
    first = 4 * 2 * kept
    for rank in range(4):
        found = part(rank_memory(BARE, replace(FOLDED, schedule="zbv"), rank), "activations")
        assert found <= first + max(owed - kept, 0) * 8 + 1
        assert found >= 7 * kept


@pytest.mark.parametrize("layout", LEGAL, ids=lambda one: one.schedule)
def test_offload_and_recompute_keep_less(layout: ParallelLayout) -> None:
    plain = memory(SHAPE, layout).peak_bytes
    assert memory(SHAPE, replace(layout, offload_share=0.5)).peak_bytes <= plain
    again = replace(
        layout, recompute="full", recomputed=(1,) * layout.chunks, cut=(8 // layout.chunks,) * layout.chunks
    )
    assert part(memory(SHAPE, again), "activations") <= part(memory(SHAPE, layout), "activations")
