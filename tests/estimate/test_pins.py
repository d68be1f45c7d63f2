"""Layouts written as pins: what each means, and what a wrong one is told."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from hpsearch.cluster import Cluster
from hpsearch.errors import LegalityError
from hpsearch.estimate import ModelShape, estimate
from hpsearch.estimate.parallel import COUNTS, ParallelLayout
from hpsearch.estimate.pins import check_device, check_shape, layout_of
from hpsearch.estimate.shape import transformer
from hpsearch.estimate.work import moe
from hpsearch.space.pins import space_of

LLAMA = ModelShape("Llama", 4096, 32, 8, 128, 128256, transformer(32, 0, 0), ffn=14336)
EXPERTS = replace(LLAMA, pattern=transformer(32, 1, 64), experts=64, top_k=4, moe_ffn=1536)


def layout(**pins: str) -> ParallelLayout:
    return layout_of(pins, devices=64, global_batch=128, seq_len=4096).layout


def test_degrees_leave_the_rest_to_data() -> None:
    found = layout(tp="4", pp="2")
    assert (found.tp, found.pp, found.dp, found.micro_batch, found.micro_batches) == (4, 2, 8, 1, 16)
    assert found.sp


def test_what_is_not_pinned_is_told() -> None:
    found = layout_of({"tp": "4", "micro_batch": "2"}, devices=64, global_batch=128, seq_len=4096)
    assert found.assumed == ("recompute = none", "overlap = grad_reduce+param_gather")


def test_micro_batches_or_micro_batch() -> None:
    assert layout(micro_batches="1").micro_batch == 2
    assert layout(micro_batch="2").micro_batches == 1
    assert layout(micro_batch="2", micro_batches="1").micro_batch == 2
    with pytest.raises(LegalityError, match="expected 2, which micro_batches = 1 on 64 data ranks gives"):
        layout(micro_batch="1", micro_batches="1")
    with pytest.raises(LegalityError, match="128 to be a multiple of data ranks · micro-batches = 64·3 = 192"):
        layout(micro_batches="3")


def test_shards_are_fully_sharded_storage() -> None:
    assert (layout(dp_shard="64").fsdp, layout(dp_shard="64").shards) == (True, 64)
    hybrid = layout(dp_shard="8")
    assert (hybrid.zero, hybrid.shards, hybrid.dp) == (3, 8, 64)
    assert (layout(dp_replicate="64").zero, layout(zero="2").zero, layout(zero="2").fsdp) == (0, 2, False)
    with pytest.raises(LegalityError, match="expected dp_replicate·dp_shard = 64 data ranks"):
        layout(dp_shard="8", dp_replicate="4")


def test_recompute_words() -> None:
    assert layout(recompute="full:0.5").recompute_share == 0.5
    assert layout(recompute="selective").recompute_parts == {"attention"}
    assert layout(recompute="selective:mlp+norm").recompute_parts == {"mlp", "norm"}
    assert layout(recompute="none").recompute == "none"


WRONG = [
    ({"tp": "0"}, "pin tp: expected a whole number of at least 1, but got '0'"),
    ({"tp": "5"}, "expected tp·pp·cp to divide 64 devices, but 5·1·1 = 5 does not"),
    ({"tpp": "2"}, "pin 'tpp': expected one of tp, pp, cp"),
    ({"recompute": "some"}, "pin recompute: expected none, full, full:SHARE"),
    ({"recompute": "selective:nose"}, "parts of attention, mlp"),
    ({"overlap": "everything"}, "pin overlap: expected one of grad_reduce, param_gather"),
    ({"overlap": "none+tp"}, "joined by +, but got 'none+tp'"),
    ({"vpp": "2"}, "pin vpp: expected a pipeline to interleave, but vpp = 2 and pp = 1"),
    ({"sp": "maybe"}, "pin sp: expected true or false, but got 'maybe'"),
    ({"precision": "int3"}, "pin precision: expected one of bf16, fp16"),
    ({"offload": "2"}, "pin offload: expected a share between 0 and 1"),
    ({"cp": "3"}, "expected tp·pp·cp to divide 64 devices"),
]


@pytest.mark.parametrize(("pins", "message"), WRONG, ids=lambda x: next(iter(x)) if isinstance(x, dict) else "")
def test_a_wrong_pin_is_told_what_it_may_be(pins: dict[str, str], message: str) -> None:
    with pytest.raises(LegalityError) as caught:
        layout(**pins)
    assert message in str(caught.value)


ILLEGAL = [
    (LLAMA, {"tp": "64"}, "expected tp to divide attention heads = 32, but tp = 64. Legal degrees of tp: 1, 2, 4, 8"),
    (LLAMA, {"pp": "64"}, "expected pp·vpp of at most 32 layers, but 64·1 = 64"),
    (LLAMA, {"ep": "2"}, "ep = 2, but Llama has no experts"),
    (LLAMA, {"etp": "2"}, "etp = 2, but Llama has no experts"),
    (EXPERTS, {"ep": "64", "tp": "1"}, ""),
    (EXPERTS, {"ep": "16", "etp": "4"}, ""),
    (replace(EXPERTS, experts=60), {"ep": "8"}, "expected ep to divide experts = 60, but ep = 8"),
    (LLAMA, {"cp": "8", "tp": "8", "cp_kind": "ulysses"}, "expected cp to divide attention heads of a tp rank = 4"),
]


@pytest.mark.parametrize(("shape", "pins", "message"), ILLEGAL)
def test_a_degree_the_model_cannot_take(shape: ModelShape, pins: dict[str, str], message: str) -> None:
    if not message:
        check_shape(shape, layout(**pins))
        return
    with pytest.raises(LegalityError) as caught:
        check_shape(shape, layout(**pins))
    assert message in str(caught.value)


def test_a_precision_beside_the_pins_is_checked_too() -> None:
    job = {"devices": 8, "global_batch": 8, "seq_len": 128}
    with pytest.raises(LegalityError, match="pin precision: expected one of bf16, fp16"):
        layout_of({}, precision="int3", **job)
    assert layout_of({}, precision="fp8", **job).layout.precision == "fp8"
    assert layout_of({"precision": "fp16"}, precision="fp8", **job).layout.precision == "fp16"


@pytest.mark.parametrize(
    ("cluster", "legal"),
    [
        ("v100-sxm", "fp16"), ("a100-sxm-selene", "bf16, fp16"), ("h100-sxm-ib400", "bf16, fp16, fp8"),
        ("mi300x-ib400", "bf16, fp16, fp8"),
        ("b200-hgx-ib400", "bf16, fp16, fp8, mxfp8, nvfp4"),
    ],
)  # fmt: skip
def test_precisions_are_those_the_device_multiplies(cluster: str, legal: str) -> None:
    """V100 has no bfloat16, A100 no 8-bit floating point, Hopper and CDNA3 no block scales or 4-bit formats."""
    device = Cluster.load(cluster, devices=8).device
    for name in ("bf16", "fp16", "fp8", "mxfp8", "nvfp4"):
        if name in legal.split(", "):
            check_device(device, layout(precision=name))
            continue
        with pytest.raises(LegalityError, match=f"expected one of {legal}, which .* but got {name}"):
            check_device(device, layout(precision=name))


def test_a_device_without_bfloat16_is_priced_in_its_own_16_bits() -> None:
    small = layout_of({"precision": "fp16", "flash": "false"}, devices=8, global_batch=8, seq_len=2048).layout
    old, new = (estimate(LLAMA, small, Cluster.load(name, devices=8)) for name in ("v100-sxm", "a100-sxm-selene"))
    assert old.step_s > 2 * new.step_s


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        *((name, 0, f"layout, {name}: expected a whole number of 1 or more, but found 0.") for name in COUNTS),
        ("pp", -2, "layout, pp: expected a whole number of 1 or more, but found -2."),
        ("tp", True, "layout, tp: expected a whole number of 1 or more, but found True."),
        ("offload_share", -0.1, "expected a share of 0 to 1, but found -0.1."),
        ("recompute_share", float("nan"), "expected a share of 0 to 1, but found nan."),
        ("imbalance", 0.5, "layout, imbalance: expected the most over the average, 1 or more, but found 0.5."),
        ("imbalance", float("nan"), "but found nan."),
        ("imbalance", float("inf"), "but found inf."),
        ("capacity", float("nan"), "layout, capacity: expected rows over an even share, 0 for none, but found nan."),
    ],
)
def test_numbers_that_no_layout_has(field: str, value: float, words: str) -> None:
    layout = ParallelLayout(devices=8, seq_len=2048, micro_batch=1, global_batch=8)
    with pytest.raises(LegalityError, match=re.escape(words)):
        replace(layout, **{field: value})  # type: ignore[arg-type]


def test_a_capacity_is_so_many_rows_of_each_expert() -> None:
    """Twice an even share: twice the rows, bytes sent and kept, and no wait of the host for counts."""
    found = layout(ep="8", capacity="2")
    even, twice = moe(EXPERTS, layout(ep="8", dedup="false")), moe(EXPERTS, found)
    assert [gemm[0] for gemm in twice.grouped] == pytest.approx([2 * gemm[0] for gemm in even.grouped])
    assert twice.ep_bytes == pytest.approx(2 * even.ep_bytes)
    assert (even.stalls_forward > 0, twice.stalls_forward, found.dedup) == (True, 0, False)
    for bad in ("0", "-1", "nan", "inf", "much"):
        with pytest.raises(LegalityError, match="pin capacity: expected a number above 0"):
            layout(capacity=bad)
    with pytest.raises(LegalityError, match=r"pin capacity: expected each copy of a token on its own, .* dedup = true"):
        layout(capacity="2", dedup="true")
    with pytest.raises(LegalityError, match="capacity = 2, but Llama has no experts"):
        check_shape(LLAMA, layout(capacity="2"))
    most = EXPERTS.experts / EXPERTS.top_k
    check_shape(EXPERTS, layout(capacity=str(most)))
    with pytest.raises(LegalityError, match=f"expected capacity of at most experts / top_k = {most:g}, .* found 100"):
        check_shape(EXPERTS, layout(capacity="100"))
    with pytest.raises(LegalityError, match="capacity = 2, but Llama has no experts"):
        space_of(LLAMA, Cluster.load("h100-sxm-ib400", devices=8), {"capacity": "2"}, global_batch=8, seq_len=4096)
