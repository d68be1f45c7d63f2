"""`layout_of`: a `ParallelLayout` from pinned names and values, the ones of `--fix`.

Degrees have the names of mesh axes. What is not pinned has the value that training code has by default, and is told.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from hpsearch.cluster import Device
from hpsearch.cluster.efficiency import generation
from hpsearch.errors import LegalityError
from hpsearch.estimate.parallel import OPTIMIZERS, RECOMPUTE, ParallelLayout
from hpsearch.estimate.price import LOW
from hpsearch.estimate.scaled import check_whole
from hpsearch.estimate.shape import ModelShape, kind_of
from hpsearch.schedule import KINDS

PARTS = ("attention", "mlp", "moe", "activation", "norm", "mla_up", "ops")
"""What selective recompute may name: `recompute=selective:attention+norm`."""
OVERLAPS = ("grad_reduce", "param_gather", "tp", "ep")
DEFAULT_OVERLAP = "grad_reduce+param_gather"
PRECISIONS = ("bf16", "fp16", "fp8", "mxfp8", "nvfp4")
CP_KINDS = ("ring", "gather", "ulysses")
GRAPHED = ("attention", "mlp", "mamba", "router", "all")


@dataclass(frozen=True)
class Pinned:
    layout: ParallelLayout
    assumed: tuple[str, ...]
    """What nobody pinned and is not the only possibility, as `name = value`."""


def layout_of(
    pins: Mapping[str, str], *, devices: int, global_batch: int, seq_len: int, precision: str = "bf16"
) -> Pinned:
    """The layout that `pins` describe. LegalityError names the pin, what it says and what it may say."""
    reader = _Pins({"precision": precision} | dict(pins))
    unknown = sorted(set(pins) - set(NAMES))
    if unknown:
        raise LegalityError(f"pin {unknown[0]!r}", f"expected one of {', '.join(NAMES)}", "")
    tp, pp, cp, vpp = (reader.degree(name) for name in ("tp", "pp", "cp", "vpp"))
    if vpp > 1 and pp == 1:
        raise LegalityError("pin vpp", f"expected a pipeline to interleave, but vpp = {vpp} and pp = 1", "Pin pp too.")
    if devices % (tp * pp * cp):
        raise LegalityError(
            "layout", f"expected tp·pp·cp to divide {devices} devices, but {tp}·{pp}·{cp} = {tp * pp * cp} does not",
            "Change one degree.",
        )  # fmt: skip
    dp = devices // (tp * pp * cp)
    zero, shard_ranks = _sharding(reader, dp * cp)
    recompute, parts, share = _recompute(reader)
    overlap = reader.words("overlap", DEFAULT_OVERLAP, (*OVERLAPS, "none"))
    layout = ParallelLayout(
        devices=devices, seq_len=seq_len, micro_batch=_micro_batch(reader, global_batch, dp), global_batch=global_batch,
        tp=tp, pp=pp, cp=cp, ep=reader.degree("ep"), etp=reader.degree("etp"), vpp=vpp,
        schedule=reader.one_of("schedule", "", tuple(KINDS), told=False),
        sp=reader.flag("sp", tp > 1) and tp > 1, cp_kind=reader.one_of("cp_kind", "ring", CP_KINDS, told=cp > 1),
        zero=zero, fsdp=zero == 3, shard_ranks=shard_ranks, recompute=recompute, recompute_parts=parts,
        recompute_share=share, precision=reader.one_of("precision", "bf16", PRECISIONS, told=False),
        optimizer=reader.one_of("optimizer", "adamw", OPTIMIZERS, told=False),
        moment_element_bytes=reader.number("moment_bytes", 4, (1, 2, 4)),
        grad_bytes=reader.number("grad_bytes", 2 if zero == 3 else 4, (2, 4)), flash=reader.flag("flash", True),
        fused=reader.flag("fused", True), dropout=reader.flag("dropout", False),
        dedup=_dedup(reader), capacity=reader.capacity(), lora=reader.flag("lora", False),
        graphed=frozenset(reader.words("graphed", "none", (*GRAPHED, "none"), told=False)) - {"none"},
        offload_share=reader.share("offload"), imbalance=reader.ratio("imbalance"),
        overlap_grad_reduce="grad_reduce" in overlap, overlap_param_gather="param_gather" in overlap,
        overlap_tp="tp" in overlap, overlap_ep="ep" in overlap, cut=reader.read("cut", (), cut_of, CUT, told=False),
    )  # fmt: skip
    return Pinned(layout, tuple(reader.assumed))


NAMES = (
    "tp", "pp", "cp", "ep", "etp", "vpp", "dp_shard", "dp_replicate", "zero", "micro_batch", "micro_batches",
    "schedule", "sp",
    "cp_kind", "recompute", "precision", "optimizer", "moment_bytes", "grad_bytes", "overlap", "flash", "fused",
    "dropout", "dedup", "graphed", "lora", "offload", "cut", "imbalance", "capacity",
)  # fmt: skip


class _Pins:
    """Reads pins one by one, and notes what was left to a default."""

    def __init__(self, pins: dict[str, str]) -> None:
        self.pins = pins
        self.assumed: list[str] = []

    def read(self, name: str, default: Any, parse: Callable[[str], Any], legal: str, told: bool = True) -> Any:
        if name not in self.pins:
            if told:
                self.assumed.append(f"{name} = {default}")
            return default
        try:
            return parse(self.pins[name])
        except (ValueError, KeyError):
            raise LegalityError(
                f"pin {name}", f"expected {legal}, but got {self.pins[name]!r}", f"Write {name}=…"
            ) from None

    def degree(self, name: str) -> int:
        return int(self.read(name, 1, _positive, "a whole number of at least 1", told=False))

    def number(self, name: str, default: int, legal: tuple[int, ...]) -> int:
        words = {str(value): value for value in legal}
        return int(self.read(name, default, words.__getitem__, f"one of {', '.join(words)}", told=False))

    def flag(self, name: str, default: bool, told: bool = False) -> bool:
        return bool(self.read(name, default, _FLAGS.__getitem__, "true or false", told))

    def one_of(self, name: str, default: str, legal: tuple[str, ...], told: bool = True) -> str:
        words = {value: value for value in legal}
        return str(self.read(name, default, words.__getitem__, f"one of {', '.join(legal)}", told))

    def words(self, name: str, default: str, legal: tuple[str, ...], told: bool = True) -> tuple[str, ...]:
        def parse(text: str) -> str:
            named = set(text.split("+"))
            if not named <= set(legal) or ("none" in named and len(named) > 1):
                raise ValueError
            return text

        return tuple(
            str(self.read(name, default, parse, f"one of {', '.join(legal)}, or several joined by +", told)).split("+")
        )

    def ratio(self, name: str) -> float:
        return float(self.read(name, 1.0, _ratio, "a number of at least 1", told=False))

    def capacity(self) -> float:
        legal = "a number above 0, of an even share"
        return float(self.read("capacity", 0.0, _above_0, legal, told=False))

    def share(self, name: str) -> float:
        return float(self.read(name, 0.0, _share, "a share between 0 and 1", told=False))


_FLAGS = {"true": True, "false": False, "1": True, "0": False, "yes": True, "no": False}


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise ValueError
    return value


CUT = "layers of each chunk joined by +, as 7+8+8+7"


def cut_of(text: str) -> tuple[int, ...]:
    """Layers of each chunk. ValueError: not numbers of 0 or more."""
    found = tuple(int(word) for word in text.split("+"))
    if min(found) < 0:
        raise ValueError
    return found


def _ratio(text: str) -> float:
    value = float(text)
    if not 1 <= value < float("inf"):
        raise ValueError
    return value


def _above_0(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise ValueError
    return value


def _share(text: str) -> float:
    value = float(text)
    if not 0 <= value <= 1:
        raise ValueError
    return value


def _dedup(reader: _Pins) -> bool:
    """Whether copies of a token travel as one: not beside a capacity, where each has a slot of its own."""
    found = reader.flag("dedup", "capacity" not in reader.pins)
    if found and "capacity" in reader.pins:
        raise LegalityError(
            "pin capacity", "expected each copy of a token on its own, in a slot of its own, but dedup = true",
            "Leave one of the two out.",
        )  # fmt: skip
    return found


def _sharding(reader: _Pins, data_ranks: int) -> tuple[int, int]:
    """(ZeRO stage, ranks among which states are sharded, 0 for all). `dp_shard` is fully sharded storage."""
    if "dp_shard" not in reader.pins and "dp_replicate" not in reader.pins:
        return reader.number("zero", 1, (0, 1, 2, 3)), 0
    replicas = reader.degree("dp_replicate")
    shards = reader.degree("dp_shard") if "dp_shard" in reader.pins else data_ranks // max(replicas, 1)
    if "dp_replicate" not in reader.pins and shards and data_ranks % shards == 0:
        replicas = data_ranks // shards
    if shards * replicas != data_ranks:
        raise LegalityError(
            "pin dp_shard", f"expected dp_replicate·dp_shard = {data_ranks} data ranks (cp among them), but "
            f"{replicas}·{shards} = {shards * replicas}", "Change one of them, or pin neither.",
        )  # fmt: skip
    stage = reader.number("zero", 3 if shards > 1 else 0, (0, 1, 2, 3))
    return stage, shards if replicas > 1 and shards > 1 else 0


def _micro_batch(reader: _Pins, global_batch: int, dp: int) -> int:
    """Rows of one micro-batch on one data rank, pinned as such or by the number of micro-batches."""
    if "micro_batches" not in reader.pins:
        return int(reader.read("micro_batch", 1, _positive, "a whole number of at least 1"))
    count = reader.degree("micro_batches")
    rows, rest = divmod(global_batch, dp * count)
    if rest or not rows:
        raise LegalityError(
            "pin micro_batches", f"expected the global batch of {global_batch} to be a multiple of data ranks · "
            f"micro-batches = {dp}·{count} = {dp * count}", "Change one of them.",
        )  # fmt: skip
    if reader.pins.get("micro_batch", str(rows)) != str(rows):
        raise LegalityError(
            "pin micro_batch", f"expected {rows}, which micro_batches = {count} on {dp} data ranks gives of a global "
            f"batch of {global_batch}, but got {reader.pins['micro_batch']}", "Pin one of them.",
        )  # fmt: skip
    return rows


def _recompute(reader: _Pins) -> tuple[str, frozenset[str], float]:
    """(kind, parts of selective, share of layers under full): none, full, full:0.5, selective, selective:mlp+norm."""
    legal = f"none, full, full:SHARE, selective or selective:PART+PART with parts of {', '.join(PARTS)}"

    def parse(text: str) -> tuple[str, frozenset[str], float]:
        kind, _, detail = text.partition(":")
        parts = frozenset(detail.split("+")) if kind == "selective" and detail else frozenset({"attention"})
        if kind not in RECOMPUTE or not parts <= set(PARTS) or (detail and kind == "none"):
            raise ValueError
        return kind, parts, _share(detail) if kind == "full" and detail else 1.0

    found = reader.read("recompute", "none", parse, legal)
    return ("none", frozenset({"attention"}), 1.0) if found == "none" else found


def check_device(device: Device, layout: ParallelLayout) -> None:
    """Whether the device's matmuls take the layout's precision. LegalityError: the precisions they take."""
    peaks = dict(device.peak)
    legal = [name for name, dtype in (("bf16", "bfloat16"), ("fp16", "float16"), ("fp8", LOW)) if dtype in peaks]
    legal += SCALED if LOW in peaks and generation(device.name) not in UNSCALED else ()
    if layout.precision not in legal:
        raise LegalityError(
            "pin precision", f"expected one of {', '.join(legal)}, which {device.name} multiplies, but got "
            f"{layout.precision}", "Choose another precision or cluster.",
        )  # fmt: skip


SCALED = ("mxfp8", "nvfp4")
"""Formats with a scale for each block of elements, which the matrix units read."""
UNSCALED = ("volta", "ampere", "hopper", "cdna3")
"""Generations whose matrix units do not: cuBLAS has block scales from compute capability 10 on
(https://docs.nvidia.com/cuda/cublas/)."""


def check_shape(shape: ModelShape, layout: ParallelLayout) -> None:
    """Whether the model can be cut so. LegalityError: field, value, degree, and the degrees that would do."""
    for name in shape.counts:
        own, kind = shape.of(name), kind_of(name)
        if kind == "attention":
            _divides("tp", layout.tp, "attention heads", own.heads)
            check_whole("tp", layout.tp, "attention width", own.v_width, layout.precision)
            if layout.cp_kind == "ulysses":
                _divides("cp", layout.cp, "attention heads of a tp rank", own.heads // layout.tp)
        if kind == "mlp":
            _divides("tp", layout.tp, "feed-forward width", own.ffn)
            check_whole("tp", layout.tp, "feed-forward width", own.ffn, layout.precision)
        if kind == "moe":
            _divides("ep", layout.ep, "experts", own.experts, layout.dp * layout.cp * layout.tp)
            _divides("etp", layout.etp, "expert width", own.moe_ffn)
            check_whole("etp", layout.etp, "expert width", own.moe_ffn, layout.precision)
    _divides("cp", layout.cp, "sequence length", layout.seq_len)
    chunks = layout.pp * layout.vpp
    if chunks > shape.layers:
        raise LegalityError(
            "layout", f"expected pp·vpp of at most {shape.layers} layers, but {layout.pp}·{layout.vpp} = {chunks}", ""
        )
    for axis in ("ep", "etp"):
        degree = getattr(layout, axis)
        if degree > 1 and not any(kind_of(name) == "moe" for name in shape.counts):
            raise LegalityError("layout", f"{axis} = {degree}, but {shape.name} has no experts", f"Leave {axis} away.")
    check_capacity(shape, layout)


def check_capacity(shape: ModelShape, layout: ParallelLayout) -> None:
    """Whether there are experts for a capacity, and it says anything. LegalityError: none, or all tokens fit."""
    if layout.capacity and not any(kind_of(name) == "moe" for name in shape.counts):
        found = f"capacity = {layout.capacity:g}, but {shape.name} has no experts"
        raise LegalityError("layout", found, "Leave capacity away.")
    for own in (shape.of(name) for name in shape.counts if kind_of(name) == "moe"):
        if layout.capacity * own.top_k > own.experts:
            raise LegalityError(
                "layout", f"expected capacity of at most experts / top_k = {own.experts / own.top_k:g}, with which an "
                f"expert has room for every token, but found {layout.capacity:g}", "Leave capacity away, or lower it.",
            )  # fmt: skip


def _divides(axis: str, degree: int, what: str, size: int, ranks: int = 0) -> None:
    """`ranks`: over which the axis is folded, and whose number it divides too."""
    if size % degree:
        legal = [d for d in range(1, size + 1) if size % d == 0 and (ranks or d) % d == 0]
        raise LegalityError(
            "layout", f"expected {axis} to divide {what} = {size}, but {axis} = {degree}",
            f"Legal degrees of {axis}: {', '.join(map(str, legal[:12]))}{', …' if len(legal) > 12 else ''}.",
        )  # fmt: skip
