"""`--fix` for a search: pinned dimensions narrow the space, pinned switches describe the training code."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hpsearch.cluster import Cluster
from hpsearch.errors import LegalityError
from hpsearch.estimate import ModelShape
from hpsearch.estimate.pins import CUT, NAMES, check_capacity, check_device, cut_of, layout_of
from hpsearch.space.space import PINS, SCHEDULES, Space

SWITCHES = tuple(name for name in NAMES if name not in (*PINS, "dp_shard", "dp_replicate", "micro_batches", "cut"))
"""Names that are no dimension of the space: precision, optimizer, overlap, …"""
WORDS = ("cp_kind", "recompute")
FLAGS = {"true": True, "false": False}


def space_of(
    shape: ModelShape,
    cluster: Cluster,
    pins: Mapping[str, str],
    *,
    global_batch: int,
    seq_len: int,
    precision: str = "bf16",
) -> Space:
    """The space that `pins` leave; a dimension may have several values, tp=2+4.

    Raises LegalityError: a name that is none, a value that is none, a precision that the device does not multiply.
    """
    if unknown := sorted(set(pins) - set(PINS) - set(SWITCHES) - {"cut"}):
        raise LegalityError(f"pin {unknown[0]!r}", f"expected one of {', '.join((*PINS, 'cut', *SWITCHES))}", "")
    switches = {"zero": "1", "micro_batch": "1", "recompute": "none", "grad_bytes": "4"}
    switches |= {name: value for name, value in pins.items() if name in SWITCHES}
    base = layout_of(switches, devices=1, global_batch=global_batch, seq_len=seq_len, precision=precision).layout
    check_device(cluster.device, base)
    check_capacity(shape, base)
    dimensions = {name: _values(name, value) for name, value in pins.items() if name in PINS}
    return Space(shape, cluster, base, dimensions, _cut(pins["cut"]) if "cut" in pins else ())


def _cut(text: str) -> tuple[int, ...]:
    try:
        return cut_of(text)
    except ValueError:
        raise LegalityError("pin cut", f"expected {CUT}, but got {text!r}", "Write cut=…") from None


def _values(name: str, text: str) -> tuple[Any, ...]:
    if name in WORDS:
        return (text,)
    words = text.split("+")
    if name == "sp":
        if not set(words) <= set(FLAGS):
            raise LegalityError(f"pin {name}", f"expected true or false, but got {text!r}", f"Write {name}=true.")
        return tuple(FLAGS[word] for word in words)
    if name == "schedule":
        if odd := [word for word in words if word not in SCHEDULES]:
            raise LegalityError("pin schedule", f"expected {', '.join(SCHEDULES)} joined by +, but got {odd[0]!r}", "")
        return tuple(words)
    if not all(word.isdecimal() for word in words) or (name not in ("zero", "shard_ranks") and "0" in words):
        raise LegalityError(f"pin {name}", f"expected numbers joined by +, but got {text!r}", f"Write {name}=1+2.")
    return tuple(int(word) for word in words)
