"""What has no answer says why, with numbers and what would be legal; and odd questions that have one."""

from __future__ import annotations

import re
from dataclasses import replace
from math import ceil
from typing import Any

import pytest

from hpsearch.cluster import Cluster
from hpsearch.errors import HpsearchError, InfeasibleError, LegalityError
from hpsearch.estimate import ModelShape, ParallelLayout, memory
from hpsearch.estimate.shape import transformer
from hpsearch.estimate.stages import filled_sizes, sizes_of
from hpsearch.space import RULES, Space, best
from hpsearch.space.rules import Rules
from tests.space.naive import Pins, every_outcome

SHAPE = ModelShape("dense", 2048, 16, 4, 128, 32000, transformer(6, 0, 0), ffn=8192)
SMALL = {"micro_batch": (1,), "recompute": ("full",), "vpp": (1,), "cp_kind": ("ring",)}


def space(devices: int, batch: int, pins: Pins | None = None, *, seq_len: int = 4096, room: int = 0) -> Space:
    cluster = Cluster.load("h100-sxm-roce400", devices=devices)
    if room:
        cluster = replace(cluster, device=replace(cluster.device, memory_bytes=room))
    base = ParallelLayout(devices=1, seq_len=seq_len, micro_batch=1, global_batch=batch)
    return Space(SHAPE, cluster, base, pins or {})


# No answer.


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        (space(8, 8, {"tp": (3,)}), "pin tp: expected a legal value for 8 devices and 8 sequences of 4096, but got 3. "
                                    "Legal: 1, 2, 4, 8."),
        (space(8, 8, {"cp": (3,)}), "but got 3. Legal: 1, 2, 4, 8."),
        (space(7, 8, {"pp": (7,)}), "pin pp: expected a legal value for 7 devices and 8 sequences of 4096, but got 7. "
                                    "Legal: 1."),
        (space(8, 8, {"tp": (2,), "pp": (9,)}), "pin pp: expected a legal value for 8 devices and 8 sequences of 4096 "
                                                "beside tp = 2, but got 9. Legal: 1, 2, 4."),
        (space(8, 4, {"micro_batch": (5,)}), "but got 5. Legal: 1, 2, 4."),
        (space(1, 4, {"zero": (3,)}), "pin zero: expected a legal value for 1 device and 4 sequences of 4096, but got "
                                      "3. Legal: 0."),
        (space(16, 1, {"pp": (1,), "cp": (1,), "dp": (16,)}), "pin dp: expected a legal value for 16 devices and 1 "
                                                              "sequence of 4096 beside pp = 1, cp = 1, but got 16. "
                                                              "Legal: 1."),
        (space(8, 8, {"tp": (2,), "sp": (True,)}, seq_len=4095), "beside tp = 2, but got True. Legal: False."),
        (space(8, 8, {"recompute": ("attention",)}), "but got attention. Legal: full, mlp, norm+activation."),
        (space(8, 8, {"tp": ()}), "but got none. Legal: 1, 2, 4, 8."),
        (space(8, 8, {"ep": (2,), "etp": (1,)}), "but got 2. Legal: 1."),
    ],
)  # fmt: skip
def test_one_pin_too_many(asked: Space, words: str) -> None:
    """And with a legal value in its place there is an answer."""
    with pytest.raises(LegalityError, match=re.escape(words)) as refused:
        best(asked)
    name = refused.value.subject.removeprefix("pin ")
    legal = refused.value.remedy.removeprefix("Legal: ").rstrip(".").split(", ")
    allowed: tuple[Any, ...] = tuple(
        int(word) if word.isdecimal() else {"False": False}.get(word, word) for word in legal
    )
    assert best(replace(asked, pins={**asked.pins, name: allowed})).best.step_s > 0


def test_two_pins_that_are_both_illegal() -> None:
    with pytest.raises(InfeasibleError) as refused:
        best(space(8, 8, {"tp": (3,), "pp": (9,)}))
    words = "8 devices and 8 sequences of 4096, but the pins leave none. Legal without pins: tp 1, 2, 4, 8; pp 1, 2, 4."
    assert words in str(refused.value)
    assert refused.value.exit_code == 3


def test_no_pin_and_no_layout() -> None:
    """16 heads, 6 layers and one sequence cannot be shared by 7 devices of which none may stand idle."""
    with pytest.raises(InfeasibleError, match=r"7 devices and 1 sequence of 4096, but the rules leave none. Broken: "
                       r"\w.* \(\d+ times: "):  # fmt: skip
        best(space(7, 1))


def test_memory_for_nothing() -> None:
    """The leanest found is the leanest there is, here; the message has its bytes, and what fills them."""
    pins = {**SMALL, "cp": (1,)}
    least = min(one.peak_bytes for one in every_outcome(SHAPE, space(4, 4).cluster, space(4, 4).base, pins))
    with pytest.raises(InfeasibleError) as refused:
        best(space(4, 4, pins, room=10**9))
    told = "with the pins micro_batch = 1, recompute = full, vpp = 1, cp_kind = ring, cp = 1"
    needs = f"fits in 1 GB, but the leanest found {told} needs {least / 1e9:.4g} GB (tp=4, "
    assert needs in str(refused.value)
    assert re.search(r"of which \w+ \d\S* GB\. Weights, .* have room for them\. Use more", str(refused.value))
    assert f"Without the pins the leanest found needs {least / 1e9:.4g} GB." in str(refused.value)
    room = ceil(least)
    assert memory(SHAPE, best(space(4, 4, pins, room=room)).best.layout).peak_bytes <= room
    with pytest.raises(InfeasibleError, match=r"Without the pins it fits\."):
        best(space(4, 4, {**pins, "zero": (0,), "tp": (1,)}, room=room))


def test_every_refusal_counts() -> None:
    """Rules that struck are told with examples; each is one of those that are printed."""
    refused = best(space(6, 5, SMALL)).certificate.refused
    assert {rule for rule, _, _ in refused} <= {rule.name for rule in RULES}
    assert {rule: what for rule, what, _ in refused}["heads"] == "tp=3, tp=5, tp=6"
    assert all(count >= what.count("=") for _, what, count in refused)


# Odd questions.


@pytest.mark.parametrize(
    ("asked", "pins"),
    [
        (space(8, 13), {"micro_batch": (1, 13), "pp": (1, 2), "recompute": ("full",)}),
        (space(7, 8), {"micro_batch": (1, 2)}),
        (space(5, 3), {"micro_batch": (1,), "pp": (1, 5)}),
        (space(16, 2), {"micro_batch": (1,), "recompute": ("full",), "pp": (1, 2)}),
        (space(16, 1), {"recompute": ("full",), "pp": (1, 2)}),
        (space(1, 4), {}),
        (space(1, 1), {}),
        (space(8, 8, seq_len=4095), {"micro_batch": (1, 2), "pp": (1, 2)}),
        (space(8, 8, seq_len=4098), {"micro_batch": (1,), "pp": (1,)}),
        (space(2, 2, seq_len=1), {"recompute": ("full",)}),
        (space(8, 9), {"micro_batch": (3,), "pp": (1, 2)}),
    ],
)
def test_odd_questions_have_the_best_answer(asked: Space, pins: Pins) -> None:
    """Prime batches and device counts, fewer sequences than devices, one device, odd lengths."""
    asked = replace(asked, pins=pins)
    found = best(asked)
    every = every_outcome(SHAPE, asked.cluster, asked.base, pins)
    least = min(one.step_s for one in every if one.peak_bytes <= asked.cluster.device.memory_bytes)
    assert found.certificate.bound_s <= least * (1 + 1e-9)
    assert found.best.step_s * (1 - found.certificate.gap) <= least * (1 + 1e-9) <= found.best.step_s * (1 + 2e-9)
    layout = found.best.layout
    assert layout.global_batch >= asked.global_batch
    assert memory(SHAPE, layout).peak_bytes <= asked.cluster.device.memory_bytes


def test_odd_lengths_are_not_cut() -> None:
    """4095 tokens are whole on cp, and on tp = 2 and more; tp = 3 would divide them, but no heads."""
    insides = list(space(8, 8, seq_len=4095).insides(Rules()))
    assert {(inside.cp, inside.sp) for inside in insides} == {(1, False)}
    assert {inside.tp for inside in insides} == {1, 2, 4, 8}


def test_every_error_is_ours() -> None:
    with pytest.raises(HpsearchError):
        space(8, 8, {"bucket": (3,)})


def test_states_are_sharded_over_ranks_that_there_are() -> None:
    """Otherwise the pin would leave only layouts without data ranks, without a word."""
    with pytest.raises(LegalityError, match=r"pin shard_ranks: expected a legal value .*, but got 3\. Legal: 0\."):
        best(space(8, 8, {"shard_ranks": (3,)}))


def test_no_recompute_is_a_pin() -> None:
    found = best(space(8, 8, {"recompute": ("none",)}))
    assert {one.layout.recompute for one in found.tried} == {"none"}


def test_a_step_of_a_million_micro_batches_is_refused_at_once() -> None:
    huge = space(8, 10**9 + 7, seq_len=128)
    with pytest.raises(InfeasibleError, match=r"rounds \(\d+ times: \d+ micro-batches"):
        best(huge)


def test_a_heavy_head_leaves_no_stage_without_layers() -> None:
    """Frameworks deal the last of 7 chunks the head alone; no program has such a stage."""
    heavy = replace(SHAPE, vocab=512_000, hidden=512, heads=4, kv_heads=4, ffn=1024, pattern=transformer(9, 0, 0))
    assert sizes_of(heavy, 7)[-1] == 0
    sizes = filled_sizes(heavy, 7)
    assert (min(sizes), sum(sizes), len(sizes)) == (1, 9, 7)
