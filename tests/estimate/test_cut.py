"""A layout's own cut and recomputed layers: equal to no cut where they say the same, else worked out by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from hpsearch.cluster import Cluster
from hpsearch.cluster.efficiency import Efficiency, efficiency_of
from hpsearch.errors import LegalityError
from hpsearch.estimate import Memory, ModelShape, ParallelLayout, estimate, memory, rank_memory
from hpsearch.estimate.estimate import price
from hpsearch.estimate.shape import transformer
from hpsearch.estimate.stages import chunks, sizes_of
from hpsearch.estimate.work import attention, mlp

SHAPE = ModelShape("8 layers", 4096, 32, 8, 128, 32000, transformer(8, 0, 0), ffn=14336)
BARE = replace(SHAPE, vocab=0)
"""Layers alone: every chunk is made of them and nothing else."""
MIXED = ModelShape(
    "2 dense, 2 with experts", 2048, 16, 4, 128, 0, transformer(4, 2, 8), ffn=8192, experts=8, top_k=2, moe_ffn=2048
)
EXTRA = replace(SHAPE, mtp_layers=1)
CLUSTER = Cluster.load("h100-sxm-roce400", devices=8)
DEVICE_ONLY = replace(efficiency_of(CLUSTER.device.name), kernel_s=0.0)
"""Nothing waits for the host: seconds of a chunk are the sum of those of its layers."""
FOUR = ParallelLayout(devices=4, seq_len=4096, micro_batch=1, global_batch=8, pp=4)
TWO = replace(FOUR, devices=2, pp=2)


def both(shape: ModelShape, layout: ParallelLayout) -> tuple[float, float]:
    found = estimate(shape, layout, CLUSTER)
    return found.step_s, found.peak_bytes


def chunk_seconds(
    shape: ModelShape, layout: ParallelLayout, rates: Efficiency = DEVICE_ONLY
) -> tuple[list[float], list[float]]:
    forward, backward = price(shape, layout, CLUSTER).chunk_seconds(rates)
    return forward.tolist(), backward.tolist()


def part(found: Memory, name: str) -> float:
    return dict(found.parts).get(name, 0.0)


# What says the same costs the same.


@pytest.mark.parametrize("layout", [FOUR, replace(TWO, vpp=2), replace(FOUR, recompute="full")])
def test_an_even_cut_is_no_cut(layout: ParallelLayout) -> None:
    assert both(SHAPE, replace(layout, cut=(2, 2, 2, 2))) == both(SHAPE, layout)


@pytest.mark.parametrize("stages", [2, 3, 5])
def test_the_chosen_cut_is_no_cut(stages: int) -> None:
    """Not even: the cut that `chunks` chooses, written down."""
    layout = replace(FOUR, devices=stages, pp=stages)
    assert both(EXTRA, replace(layout, cut=tuple(sizes_of(EXTRA, stages)))) == both(EXTRA, layout)


@pytest.mark.parametrize(
    ("shape", "cut"),
    [(SHAPE, (2, 2, 2, 2)), (SHAPE, (3, 2, 2, 1)), (SHAPE, (4, 2, 2, 0)), (EXTRA, (2, 2, 2, 2)), (EXTRA, (3, 2, 2, 1))],
)
def test_all_layers_again_is_full_recompute(shape: ModelShape, cut: tuple[int, ...]) -> None:
    full = replace(FOUR, cut=cut, recompute="full")
    assert both(shape, replace(full, recomputed=cut)) == pytest.approx(both(shape, full), rel=1e-12)


@pytest.mark.parametrize("shape", [SHAPE, EXTRA])
@pytest.mark.parametrize("cut", [(2, 2, 2, 2), (3, 2, 2, 1), (4, 2, 2, 0)])
def test_no_layer_again_is_no_recompute(shape: ModelShape, cut: tuple[int, ...]) -> None:
    none = replace(FOUR, cut=cut)
    assert both(shape, replace(none, recompute="full", recomputed=(0, 0, 0, 0))) == both(shape, none)


@pytest.mark.parametrize("layout", [FOUR, replace(TWO, vpp=2)])
def test_half_of_every_chunk_is_a_share_of_half(layout: ParallelLayout) -> None:
    half = replace(layout, recompute="full", recompute_share=0.5)
    told = replace(layout, recompute="full", recomputed=(1, 1, 1, 1))
    assert both(SHAPE, told) == pytest.approx(both(SHAPE, half), rel=1e-12)


# Seconds by hand.


def test_seconds_of_an_uneven_cut() -> None:
    """Three layers take three times as long as one, and their recompute is their forward."""
    cut = replace(FOUR, cut=(3, 1, 3, 1))
    (f3, f1, _, _), (b3, b1, _, _) = chunk_seconds(BARE, cut)
    assert f3 == pytest.approx(3 * f1)
    assert b3 == pytest.approx(3 * b1)
    forward, backward = chunk_seconds(BARE, replace(cut, recompute="full", recomputed=(2, 0, 3, 1)))
    assert forward == pytest.approx([3 * f1, f1, 3 * f1, f1])
    assert backward == pytest.approx([3 * b1 + 2 * f1, b1, 3 * b1 + 3 * f1, b1 + f1])


def test_a_chunk_computes_its_first_layers_again() -> None:
    """Layers dense, dense, experts, experts; of the second stage one expert layer, of one stage both dense ones."""
    one = replace(FOUR, devices=1, pp=1, cut=(4,), recompute="full")
    dense, experts = ((f[0], b[0]) for f, b in (
        chunk_seconds(replace(MIXED, pattern=MIXED.pattern[:1]), replace(one, cut=(1,), recompute="none")),
        chunk_seconds(replace(MIXED, pattern=MIXED.pattern[3:]), replace(one, cut=(1,), recompute="none")),
    ))  # fmt: skip
    plain = 2 * dense[1] + 2 * experts[1]
    for again, more in ((1, dense[0]), (2, 2 * dense[0]), (3, 2 * dense[0] + experts[0])):
        _, backward = chunk_seconds(MIXED, replace(one, recomputed=(again,)))
        assert backward == pytest.approx([plain + more])
    _, backward = chunk_seconds(MIXED, replace(TWO, cut=(1, 3), recompute="full", recomputed=(0, 2)))
    assert backward == pytest.approx([dense[1], plain - dense[1] + dense[0] + experts[0]])


def test_a_stage_with_the_head_alone() -> None:
    made = chunks(SHAPE, replace(FOUR, cut=(3, 3, 2, 0)))
    assert [(sum(chunk.blocks.values()), chunk.embedding, chunk.heads) for chunk in made] == [
        (6, True, 0), (6, False, 0), (4, False, 0), (0, False, 1),
    ]  # fmt: skip


def test_extra_layers_are_computed_again_with_all_of_their_stage() -> None:
    """The last of four stages has two layers and an extra one."""
    told = replace(FOUR, cut=(2, 2, 2, 2), recompute="full")
    some, all_of_them = (chunks(EXTRA, replace(told, recomputed=(0, 0, 0, last)))[-1] for last in (1, 2))
    assert some.again == {"attention": 1, "mlp": 1}
    assert all_of_them.again == {"attention": 3, "mlp": 3} == all_of_them.blocks


# Bytes by hand.


def kept_bytes() -> float:
    """Of one layer and micro-batch."""
    works = attention(BARE, FOUR), mlp(BARE, FOUR)
    return sum(work.saved + work.copies for work in works)


@pytest.mark.parametrize(("rank", "alive", "layers", "again"), [(0, 4, 3, 2), (1, 3, 1, 0), (2, 2, 3, 3), (3, 1, 1, 1)])
def test_activations_of_each_stage(rank: int, alive: int, layers: int, again: int) -> None:
    """1F1B keeps as many micro-batches as there are stages from here on; a layer computed again keeps its input."""
    cut = replace(FOUR, cut=(3, 1, 3, 1))
    entry = 2.0 * 4096 * 4096
    assert part(rank_memory(BARE, cut, rank), "activations") == pytest.approx(alive * layers * kept_bytes())
    told = replace(cut, recompute="full", recomputed=(2, 0, 3, 1))
    wanted = alive * ((layers - again) * kept_bytes() + again * entry)
    assert part(rank_memory(BARE, told, rank), "activations") == pytest.approx(wanted)


def test_states_of_each_stage() -> None:
    """18 bytes a parameter, of embedding and output projection too."""
    layer = sum(SHAPE.block_params(name) for name in ("attention", "mlp"))
    table = 32000 * 4096
    cut = replace(FOUR, cut=(1, 4, 2, 1))
    wanted = [layer + table, 4 * layer, 2 * layer, layer + table + 4096]
    for rank, params in enumerate(wanted):
        assert rank_memory(SHAPE, cut, rank).persistent_bytes == pytest.approx(18 * params)


def test_the_fullest_stage_may_stand_in_the_middle() -> None:
    assert memory(BARE, replace(FOUR, cut=(1, 5, 1, 1))).rank == 1
    assert memory(BARE, replace(FOUR, cut=(1, 1, 5, 1))).rank == 2


# What is refused.


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"cut": (2, 2, 2, 1)}, r"cut: expected 8 layers in pp·vpp = 4·1 chunks, but found 7 in cut = 2\+2\+2\+1"),
        ({"cut": (5, 2, 2, -1)}, r"cut: expected 0 or more layers in each chunk, but found -1"),
        ({"cut": (4, 4)}, r"cut: expected 4 numbers \(pp·vpp = 4·1\), but found 2"),
        ({"cut": (2, 2, 2, 2), "recompute": "full", "recomputed": (2, 2)},
         r"recomputed: expected 4 numbers \(pp·vpp = 4·1\), but found 2"),
        ({"cut": (3, 2, 2, 1), "recompute": "full", "recomputed": (3, 2, 2, 2)},
         r"recomputed: expected 0 to 1 layers of chunk 3, but found 2"),
        ({"recompute": "full", "recomputed": (1, -1, 1, 1)},
         r"recomputed: expected 0 to 2 layers of chunk 1, but found -1"),
        ({"recomputed": (1, 1, 1, 1)}, r"recomputed: expected recompute = full .* found none"),
        ({"recompute": "selective", "recomputed": (1, 1, 1, 1)}, r"found selective"),
        ({"recompute": "full", "recompute_share": 0.5, "recomputed": (1, 1, 1, 1)}, r"share of 0.5"),
    ],
)  # fmt: skip
def test_what_is_refused(change: dict[str, Any], words: str) -> None:
    with pytest.raises(LegalityError, match=words) as refused:
        memory(SHAPE, replace(FOUR, **change))
    assert refused.value.remedy
