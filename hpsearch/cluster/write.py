"""A cluster file as TOML text; `read` takes it back unchanged. Used by profilers."""

from __future__ import annotations

import json

from hpsearch.cluster.schema import (
    ClusterFile,
    DeviceEntry,
    EfficiencyEntry,
    GroupEntry,
    Number,
    Numbers,
    ProtocolEntry,
    SwitchesEntry,
    SwitchTreeEntry,
    TierEntry,
)


def write(entry: ClusterFile) -> str:
    """The text of a cluster file, ending with a newline."""
    lines = [f"{name} = {_text(getattr(entry, name))}" for name in ("schema_version", "name", "summary")]
    lines += ["", "[sources]", *(f"{_text(key)} = {_text(url)}" for key, url in entry.sources.items())]
    lines += _device(entry.device)
    for tier in entry.tiers:
        lines += _tier(tier)
    for group in entry.groups:
        lines += ["", "[[groups]]", f"name = {_text(group.name)}", f"nodes = {group.nodes}", *_fields(group)]
    if entry.efficiency:
        lines += ["", "[efficiency]", *(f"{name} = {_value(number)}" for name, number in entry.efficiency.items())]
    return "\n".join(lines) + "\n"


def _device(device: DeviceEntry) -> list[str]:
    lines = ["", "[device]", f"name = {_text(device.name)}", *_fields(device)]
    lines += [f"host_link = {_text(device.host_link)}"] if device.host_link != "pcie" else []
    lines += ["", "[device.peak]", *(f"{_text(dtype)} = {_value(peak)}" for dtype, peak in device.peak.items())]
    for table in device.matmul:
        lines += ["", "[[device.matmul]]", f"dtype = {_text(table.dtype)}", f"n = {table.n}", f"k = {table.k}"]
        lines += [f"m = {list(table.m)}", f"rate = {_value(table.rate)}"]
    for late in device.arrivals:
        lines += ["", "[[device.arrivals]]", f"group = {late.group}", f"stride = {late.stride}"]
        lines += [f"time = {_value(late.time)}"]
    if device.stream:
        lines += [
            "",
            "[device.stream]",
            f"nbytes = {list(device.stream.nbytes)}",
            f"time = {_value(device.stream.time)}",
        ]
    return lines


def _tier(tier: TierEntry) -> list[str]:
    lines = ["", "[[tiers]]", f"name = {_text(tier.name)}", f"link = {_text(tier.link)}", *_fields(tier)]
    lines += [f"each = {_value(tier.each)}"] if tier.each else []
    lines += [f"wiring = {_text(tier.wiring)}"] if tier.wiring != "switch" else []
    lines += [f"like = {_text(tier.like)}"] if tier.like else []
    for protocol in tier.protocols:
        lines += ["", "[[tiers.protocols]]", f"name = {_text(protocol.name)}", *_fields(protocol)]
    for name, table in (("switches", tier.switches), ("switch_tree", tier.switch_tree)):
        lines += ["", f"[tiers.{name}]", *_fields(table)] if table is not None else []
    for curve in tier.collectives:
        lines += ["", "[[tiers.collectives]]", f"op = {_text(curve.op)}", f"group = {curve.group}"]
        lines += [f"stride = {curve.stride}", f"nbytes = {list(curve.nbytes)}"]
        given = {"time": curve.time, "busbw": curve.busbw, "algbw": curve.algbw}
        lines += [f"{name} = {_value(numbers)}" for name, numbers in given.items() if numbers is not None]
    return lines


def _fields(
    entry: DeviceEntry | TierEntry | GroupEntry | ProtocolEntry | SwitchesEntry | SwitchTreeEntry,
) -> list[str]:
    return [f"{name} = {_value(number)}" for name, number in entry if isinstance(number, Number)]


def _value(number: Number | Numbers) -> str:
    """An inline table; floats are written so that they read back equal."""
    first = f"value = {number.value!r}" if isinstance(number, Number) else f"values = {list(number.values)!r}"
    rest = [f"{name} = {_text(getattr(number, name))}" for name in ("unit", "kind", "source")]
    rest += [f"error = {number.error!r}"] if isinstance(number, EfficiencyEntry) and number.error else []
    note = [f"note = {_text(number.note)}"] if number.note else []
    return f"{{ {', '.join([first, *rest, *note])} }}"


def _text(text: str) -> str:
    """A TOML basic string; JSON's escapes are a subset of TOML's."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
