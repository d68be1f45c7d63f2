"""Cases about pipelines: what schedules, layouts and searches decide of them."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from itertools import accumulate, pairwise

import pytest
import torch
from torch import Tensor, nn

from hpsearch.errors import InfeasibleError, LegalityError
from hpsearch.estimate import ModelShape, ParallelLayout, estimate, memory
from hpsearch.estimate.estimate import price
from hpsearch.estimate.flops import utilisation
from hpsearch.estimate.memory import rank_memory
from hpsearch.estimate.pins import layout_of
from hpsearch.estimate.shape import transformer
from hpsearch.estimate.stages import chunks, sizes_of
from hpsearch.schedule import dry_run, make_schedule, placement, schedule_s
from hpsearch.space import Found, best
from hpsearch.space.layout_file import layout_file
from hpsearch.space.pins import space_of
from hpsearch.space.prices import Prices
from tests.cases import configs
from tests.cases.plans import h100
from tests.cases.staged import staged
from tests.estimate.stated import shape_of_config

ONE_WAY = {"micro_batch": "1", "schedule": "1f1b", "recompute": "full"}
"""Micro-batches of a row, a stage on each rank, and any number of layers recomputed."""


def small(layers: int) -> ModelShape:
    return ModelShape("small", 2048, 16, 4, 128, 32000, transformer(layers, 0, 0), ffn=8192)


def found(shape: ModelShape, pins: dict[str, str], devices: int, *, batch: int = 16, gib: float = 0.0) -> Found:
    return best(space_of(shape, h100(devices, gib), pins, global_batch=batch, seq_len=2048), gap=0.001)


def test_pip_01_fewer_micro_batches_than_ranks_are_refused_with_both_numbers_or_filled_and_drained() -> None:
    told = "schedule 1f1b, micro_batches = 4: expected at least 8 for 8 ranks, but found 4. Legal: 8 and more; gpipe"
    with pytest.raises(LegalityError, match=re.escape(told)):
        make_schedule("1f1b", 8, 1, 4)
    schedule = make_schedule("gpipe", 8, 1, 4)
    assert dry_run(schedule).peak_live == (4,) * 8
    whole, busy = schedule_s(schedule, [1.0] * 8, [1.0] * 8, [1.0] * 8), 4 * 3.0
    assert 1 - busy / whole == pytest.approx((8 - 1) / (4 + 8 - 1))


def test_pip_01_a_search_fills_and_drains_and_says_what_stands_idle() -> None:
    """4 rows through 8 stages of one layer, without embedding and head: (8 - 1)/(4 + 8 - 1) = 63.6 % of the time."""
    shape = replace(small(8), vocab=0, hidden=16384, heads=128, ffn=65536)  # nothing waits for the host
    layout = found(shape, {"pp": "8", **ONE_WAY}, 8, batch=4).best.layout
    assert (layout.pp, layout.micro_batches, layout.cut) == (8, 4, (1,) * 8)
    made = estimate(shape, layout, h100(8))
    parts = dict(made.parts)
    once = sum(parts[name] for name in ("reduce", "gather", "optimizer", "once"))
    assert parts["bubble, host"] / (made.step_s - once) == pytest.approx(7 / 11, abs=0.02)


@pytest.mark.parametrize("vpp", [1, 2])
def test_pip_03_every_layer_stands_on_one_stage(vpp: int) -> None:
    """30 layers of kinds that differ, so that each can be found again: by default and as searched."""
    shape = small(30)
    assert sum(sizes_of(shape, 4 * vpp)) == 30
    pins = {"pp": "4", **ONE_WAY, "vpp": str(vpp), "schedule": ("1f1b", "interleaved")[vpp - 1]}
    cut = found(shape, pins, 4).best.layout.cut
    assert (sum(cut), len(cut), min(cut) > 0) == (30, 4 * vpp, True)
    own = tuple((f"mlp#{i}", replace(shape, ffn=8192 + 128 * i)) for i in range(30))
    told = replace(shape, pattern=tuple(("attention", f"mlp#{i}") for i in range(30)), variants=own)
    layout = ParallelLayout(devices=4, seq_len=64, micro_batch=1, global_batch=8, pp=4, vpp=vpp, cut=cut)
    placed = chunks(told, layout)
    assert sum((chunk.blocks for chunk in placed), Counter()) == Counter({"attention": 30} | {n: 1 for n, _ in own})
    ends = [0, *accumulate(cut)]
    for chunk, (first, last) in zip(placed, pairwise(ends), strict=True):
        assert {int(name[4:]) for name in chunk.blocks if "#" in name} == set(range(first, last))


def test_pip_05_a_cut_that_contradicts_the_pipeline_is_refused_with_both() -> None:
    """One layer on the last of one stage would drop 19 of 20."""
    shape, cluster = small(20), h100(1)
    one = layout_of({"pp": "1", "cut": "1"}, devices=1, global_batch=8, seq_len=64).layout
    with pytest.raises(LegalityError, match=r"20 layers in pp·vpp = 1·1 chunks, but found 1 in cut = 1"):
        estimate(shape, one, cluster)
    with pytest.raises(LegalityError, match=r"expected 1 numbers \(pp·vpp = 1·1\), but found 2"):
        layout_of({"pp": "1", "cut": "19+1"}, devices=1, global_batch=8, seq_len=64)
    with pytest.raises(LegalityError, match=r"pin cut: expected the 20 layers of small in .* but 1 are 1\. Legal"):
        found(shape, {"pp": "1", "cut": "1"}, 1)
    with pytest.raises(LegalityError, match=r"pin cut: expected as many numbers as .* chunks \(pp·vpp\), but got 2\."):
        found(shape, {"pp": "1", "cut": "19+1"}, 1)
    with pytest.raises(LegalityError, match=r"pin cut: expected layers of each chunk joined by \+, .* got '19,1'"):
        found(shape, {"cut": "19,1"}, 1)


def test_pip_05_flops_are_those_of_the_placed_layers() -> None:
    """However they are cut, for all 20; and twice the layers have twice the work."""
    layout = layout_of({"pp": "4", "cut": "8+5+5+2"}, devices=4, global_batch=8, seq_len=64).layout
    rate, _ = utilisation(small(20), layout, h100(4), 1.0)
    even, _ = utilisation(small(20), replace(layout, cut=()), h100(4), 1.0)
    assert rate == even
    without_ends = [replace(small(layers), vocab=0) for layers in (20, 40)]
    once, twice = (utilisation(one, replace(layout, cut=()), h100(4), 1.0)[0] for one in without_ends)
    assert twice == pytest.approx(2 * once)


DEPTHS = {
    "405B on 16": (configs.LLAMA_405B | {"model_type": "llama"}, 512, 256,
                   {"pp": "16", "tp": "8", "dp": "4", "sp": "true"}),
    "235B on 8": (configs.QWEN3_235B | {"model_type": "qwen3_moe"}, 256, 512,
                  {"pp": "8", "tp": "4", "dp": "8", "ep": "8", "etp": "1", "sp": "true"}),
    "671B on 8": (configs.DEEPSEEK_V3, 1024, 8192, {"pp": "8", "tp": "1", "ep": "64", "zero": "1", "dp": "128"}),
    "106B on 4": (configs.GLM_4_5_AIR, 64, 256, {"pp": "4", "tp": "1", "ep": "8", "zero": "1", "dp": "16"}),
}  # fmt: skip


@pytest.mark.parametrize("name", DEPTHS)
def test_pip_06_depths_that_do_not_divide_are_cut_in_balance(name: str) -> None:
    """126, 94, 61 and 46 layers: no stage takes 15 % longer than the mean, and the ends have what they can carry."""
    config, devices, batch, pins = DEPTHS[name]
    shape, cluster = shape_of_config(config), h100(devices, 200.0)
    space = space_of(shape, cluster, {**pins, **ONE_WAY}, global_batch=batch, seq_len=4096)
    layout = best(space, gap=0.001).best.layout
    cut = layout.cut
    assert sum(cut) == shape.layers
    forward, backward = price(shape, layout, cluster).chunk_seconds(Prices(space).rates)
    times = forward + backward
    assert times.max() / times.mean() <= 1.15
    if name == "405B on 16":
        assert cut == (7, *(8,) * 14, 7)
    if name == "235B on 8":
        assert set(cut) == {11, 12}
        assert (cut[0], cut[-1]) == (11, 11)
    if name == "671B on 8":
        assert cut[0] == max(cut) > min(cut) == cut[-1]


def test_pip_06_an_extra_prediction_layer_counts_on_the_last_stage() -> None:
    shape = shape_of_config(configs.DEEPSEEK_V3)
    layout = ParallelLayout(devices=8, seq_len=64, micro_batch=1, global_batch=8, pp=8, cut=(8,) * 7 + (5,))
    last, without = (chunks(one, layout)[-1] for one in (shape, replace(shape, mtp_layers=0)))
    assert (last.heads, without.heads) == (2, 1)
    assert last.blocks - without.blocks == Counter(shape.pattern[-1])


def test_pip_10_interleaving_takes_whole_rounds_and_the_kind_says_how_many_stages_a_rank_holds() -> None:
    told = "micro_batches = 6: expected a multiple of the 4 ranks, but found 6. Legal: 4, 8, 12, …; nearest 4 or 8."
    with pytest.raises(LegalityError, match=re.escape(told)):
        make_schedule("interleaved", 4, 2, 6)
    with pytest.raises(LegalityError, match=re.escape("schedule 1f1b, virtual = 2: expected 1 stage on each rank")):
        make_schedule("1f1b", 4, 2, 8)
    with pytest.raises(LegalityError, match=re.escape("virtual = 1: expected at least 2 stages on each rank")):
        make_schedule("interleaved", 4, 1, 8)
    for kind in ("interleaved", "zbv"):
        assert make_schedule(kind, 4, 2, 8).placement == placement(kind, 4, 2)


def test_pip_10_a_search_interleaves_whole_rounds_alone() -> None:
    pins = {"pp": "4", "vpp": "2", "micro_batch": "1", "schedule": "interleaved"}
    with pytest.raises(LegalityError) as caught:
        found(small(8), pins, 4, batch=6)
    assert re.search(r"for 4 devices and 6 sequences .* Legal: ", str(caught.value))
    assert found(small(8), pins, 4, batch=8).best.layout.schedule_kind == "interleaved"
    with pytest.raises(LegalityError, match=r"schedule = 1f1b, expected vpp = 1|expected vpp = 1, but vpp = 2"):
        layout_of({"pp": "4", "vpp": "2", "schedule": "1f1b"}, devices=4, global_batch=8, seq_len=64)


def test_pip_11_a_step_is_fill_and_steady_state_and_drain() -> None:
    """Stages of 1, 1, 1 and 4 ms, four micro-batches, forward only as in the report: 7 + 3 · 4 = 19, not 16."""
    forward, nothing = [1.0, 1.0, 1.0, 4.0], [0.0] * 4
    assert schedule_s(make_schedule("gpipe", 4, 1, 4), forward, nothing, nothing) == 19
    assert schedule_s(make_schedule("1f1b", 4, 1, 4), forward, forward, nothing) == 3 + 4 * 8 + 3


def test_pip_11_few_micro_batches_are_not_for_many_stages() -> None:
    """What a search finds fastest is what the timeline says is fastest, stage by stage count: 1, 2, 4 and 8 on 8."""
    shape, steps = small(8), {}
    for stages in (1, 2, 4, 8):
        pins = {"pp": str(stages), "tp": "1", "cp": "1", **ONE_WAY}
        steps[stages] = found(shape, pins, 8, batch=8).best.step_s
    free = found(shape, {"tp": "1", "cp": "1", **ONE_WAY}, 8, batch=8).best
    assert (free.layout.pp, free.step_s) == min(steps.items(), key=lambda one: one[1])


DEEP = ModelShape("deep", 2048, 16, 16, 128, 128256, transformer(101, 0, 0), ffn=5632)


def test_pip_13_where_only_a_balanced_cut_fits_it_is_found() -> None:
    """101 layers on 4 devices, with the embedding on the first and the head on the last. The least memory in which any
    cut fits, all layers recomputed: by trying every number of layers on every stage."""
    pins = {"pp": "4", "tp": "1", "dp": "1", "zero": "0", **ONE_WAY}
    plain = layout_of({"pp": "4", "zero": "0", "recompute": "full"}, devices=4, global_batch=16, seq_len=2048).layout

    def peak_bytes(stage: int, layers: int) -> float:
        rest = iter(sizes(101 - layers))
        cut = tuple(layers if one == stage else next(rest) for one in range(4))
        return rank_memory(DEEP, replace(plain, cut=cut, recomputed=cut), stage).peak_bytes

    needed = [[peak_bytes(stage, layers) for layers in range(1, 99)] for stage in range(4)]
    rooms = sorted({size for sizes_of_stage in needed for size in sizes_of_stage})
    least = next(room for room in rooms if sum(sum(size <= room for size in one) for one in needed) >= 101)
    gib = (int(least) + 1) / 2**30
    made = found(DEEP, pins, 4, gib=gib)
    cut = made.best.layout.cut
    assert memory(DEEP, made.best.layout).peak_bytes <= least + 1
    peaks = [needed[stage][layers - 1] for stage, layers in enumerate(cut)]
    layer = max(after - before for before, after in pairwise(needed[1]))
    assert max(peaks) - min(peaks) <= layer * 1.001
    assert max(needed[stage][layers - 1] for stage, layers in enumerate((26, 25, 25, 25))) > least + 1
    with pytest.raises(InfeasibleError):
        found(DEEP, pins, 4, gib=int(least) / 2**30 - 1e-6)


def sizes(layers: int) -> list[int]:
    """Of three other stages."""
    return [layers - 2 * (layers // 3), layers // 3, layers // 3]


def test_pip_13_a_given_cut_is_kept_and_checked() -> None:
    given = (24, 27, 27, 23)
    pins = {"pp": "4", "cut": "24+27+27+23", **ONE_WAY}
    space = space_of(DEEP, h100(4), pins, global_batch=16, seq_len=2048)
    made = best(space, gap=0.001)
    assert {choice.layout.cut for choice in made.tried} == {given}
    assert layout_file(space, made).question.pins["cut"] == list(given)
    pinned = layout_of({"pp": "4", "cut": "24+27+27+23"}, devices=4, global_batch=16, seq_len=2048)
    assert [chunk.layers for chunk in chunks(DEEP, pinned.layout)] == list(given)
    with pytest.raises(InfeasibleError, match=r"with the pins pp = 4, .*cut = 24, 27, 27, 23 needs"):
        found(DEEP, pins, 4, gib=8)
    with pytest.raises(LegalityError, match=r"101 layers of deep in chunks of at least 1, but 24\+27\+27\+24 are 102"):
        found(DEEP, {"cut": "24+27+27+24"}, 4)


class Hidden(nn.Module):
    """Blocks that hand on a hidden state, a mask of integers, and something that only their own loss would read."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: Tensor, mask: Tensor, aux: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            x = x + self.linear(x).tanh() * mask[..., None]
            return x, mask * (x[..., 0] < 2).long(), aux * 2 + x.mean(-1)

    def __init__(self, depth: int = 5) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(self.Block() for _ in range(depth))
        self.double()

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        mask, aux = (ids > 3).long(), x.sum(-1)
        for layer in self.layers:
            x, mask, aux = layer(x, mask, aux)
        return (x * mask[..., None]).square().mean()


def hidden_batch(rows: int = 8) -> tuple[Tensor, Tensor]:
    seed = torch.Generator().manual_seed(1)
    return torch.randn(rows, 6, 8, generator=seed, dtype=torch.float64), torch.randint(0, 8, (rows, 6), generator=seed)


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_pip_08_only_what_has_a_gradient_is_sent_back(schedule: str) -> None:
    found = staged(Hidden(), hidden_batch(), {"pp": 2, "micro_batches": 4, "schedule": schedule})
    assert found.worst <= 1e-12
    first, last = (stage.ends for stage in found.program.stages)
    assert first is not None
    assert last is not None
    ahead = [passed.dtype for passed in last.takes]
    assert torch.int64 in ahead
    back = [passed.dtype for passed in first.takes_back]
    assert back == [torch.float64, torch.float64], "of the hidden state; zeros, of what nothing reads"
    assert len(last.gives_back) == 2, "the list is that of the plan, whatever a batch holds"


def test_pip_01_fewer_micro_batches_than_stages_run_where_the_schedule_can() -> None:
    found = staged(Hidden(), hidden_batch(), {"pp": 4, "micro_batches": 2, "schedule": "gpipe"})
    assert found.worst <= 1e-12
    assert len(found.program.stages) == 4
    told = "schedule 1f1b, micro_batches = 2: expected at least 4 for 4 ranks, but found 2"
    with pytest.raises(LegalityError, match=re.escape(told)):
        staged(Hidden(), hidden_batch(), {"pp": 4, "micro_batches": 2, "schedule": "1f1b"})
