"""What [device] of a cluster file has to satisfy beyond its types: plausible numbers that belong to one device."""

from __future__ import annotations

from collections.abc import Iterator

from hpsearch.cluster.device import ITEM_BYTES
from hpsearch.cluster.plausible import FRACTION, Path, not_growing, number_wrong, numbers_wrong
from hpsearch.cluster.schema import ClusterFile, DeviceEntry, Number
from hpsearch.cluster.units import LINKS, UNITS, Complaint, in_unit

_BALANCE = (0.5, 5000.0)
"""FLOPs a device can do per byte it can load, for its fastest dtype: 1 for old CPUs, 600 for 2025's accelerators."""
_PEAK = (1e8, 1e17)
_MEMORY_BANDWIDTH = (1e8, 1e14)
_MEMORY = (2.0**27, 4e12)
_HOST_SHARE = 1 / 9
"""Of the bandwidth of device memory, PCIe to the host reaches less: 1/56 (V100) to 1/127 (B200), 1/9.4 (L4). A number
in Gbit/s that is called GB/s is beyond that, or beyond PCIe."""
_LAUNCH = (1e-9, 1e-3)
_COLLECTIVE_LAUNCH = (0.0, 20e-3)
_SHARE = (0.0, 1.0)
_MATMUL_RATE = (1e5, 1e17)
_ARRIVAL = (0.0, 1.0)
_STREAM_TIME = (1e-9, 100.0)
_POWER = (1.0, 1e4)
_PRICE = (1e-3 / 3600, 1e4 / 3600)


def device_wrong(device: DeviceEntry) -> Iterator[Complaint]:
    """Everything wrong with it."""
    at: Path = ("device",)
    before = [
        *number_wrong((*at, "memory"), device.memory, "size", _MEMORY, "a device's memory"),
        *number_wrong(
            (*at, "memory_bandwidth"), device.memory_bandwidth, "bandwidth", _MEMORY_BANDWIDTH, "device memory"
        ),
        *number_wrong((*at, "launch"), device.launch, "time", _LAUNCH, "one kernel's fixed time"),
        *number_wrong(
            (*at, "collective_launch"), device.collective_launch, "time", _COLLECTIVE_LAUNCH, "a collective's start"
        ),
    ]
    for name in ("memory_efficiency", "matmul_efficiency", "attention_efficiency"):
        number = getattr(device, name)
        if number is not None:
            before += number_wrong((*at, name), number, "fraction", FRACTION, "an efficiency")
    before += number_wrong((*at, "overlap_efficiency"), device.overlap_efficiency, "fraction", _SHARE, "a share")
    if device.arrival is not None:
        before += number_wrong((*at, "arrival"), device.arrival, "time", _ARRIVAL, "ranks' coming late")
    for i, late in enumerate(device.arrivals):
        before += number_wrong((*at, "arrivals", i, "time"), late.time, "time", _ARRIVAL, "ranks' coming late")
    if device.power is not None:
        before += number_wrong((*at, "power"), device.power, "power", _POWER, "the power of one device")
    if device.price is not None:
        before += number_wrong((*at, "price"), device.price, "price", _PRICE, "an hour of one device")
    if device.host_bandwidth is not None:
        before += _host(device, device.host_bandwidth)
    before += _peaks(device)
    yield from before
    if not before:
        yield from _balance(device)
    for i, table in enumerate(device.matmul):
        if table.dtype not in device.peak:
            known = ", ".join(device.peak)
            problem = f"expected a dtype of [device.peak] ({known}), but found {table.dtype!r}"
            yield Complaint((*at, "matmul", i, "dtype"), problem, "Add its peak.")
        yield from not_growing((*at, "matmul", i, "m"), table.m)
        yield from numbers_wrong((*at, "matmul", i, "rate"), table.rate, len(table.m), "rate", _MATMUL_RATE, "a matmul")
    if device.stream:
        yield from not_growing((*at, "stream", "nbytes"), device.stream.nbytes)
        count = len(device.stream.nbytes)
        yield from numbers_wrong((*at, "stream", "time"), device.stream.time, count, "time", _STREAM_TIME, "one kernel")


def _host(device: DeviceEntry, number: Number) -> Iterator[Complaint]:
    """The link to host memory: in the range of its kind, and far below the device's own memory where it is PCIe."""
    at: Path = ("device", "host_bandwidth")
    if device.host_link not in LINKS:
        known = ", ".join(LINKS)
        yield Complaint(("device", "host_link"), f"expected one of {known}, but found {device.host_link!r}", "")
        return
    allowed = LINKS[device.host_link].bandwidth
    wrong = list(number_wrong(at, number, "bandwidth", allowed, f"{device.host_link} to the host, one direction"))
    memory = device.memory_bandwidth
    if wrong or device.host_link != "pcie" or memory.unit not in UNITS["bandwidth"]:
        yield from wrong
        return
    most = _HOST_SHARE * memory.value * UNITS["bandwidth"][memory.unit]
    found = number.value * UNITS["bandwidth"][number.unit]
    if found > most:
        yield Complaint(
            at, f"expected at most 1/9 of the {in_unit('bandwidth', most / _HOST_SHARE)} of device memory for "
            f"PCIe to the host, but found {in_unit('bandwidth', found)}",
            f"{in_unit('bandwidth', found / 8)} is {number.value:g} Gbit/s: check the unit.",
        )  # fmt: skip


def _peaks(device: DeviceEntry) -> Iterator[Complaint]:
    if not device.peak:
        yield Complaint(
            ("device", "peak"), "expected a peak for at least one dtype, but found none", "Add bfloat16 = …."
        )
    for dtype, peak in device.peak.items():
        if dtype not in ITEM_BYTES:
            known = ", ".join(ITEM_BYTES)
            yield Complaint(("device", "peak", dtype), f"expected a dtype of torch ({known}), but found {dtype!r}", "")
        yield from number_wrong(("device", "peak", dtype), peak, "rate", _PEAK, "a device's peak")


def _balance(device: DeviceEntry) -> Iterator[Complaint]:
    """Peak and memory bandwidth belong to one device: 989 GFLOP/s beside 3.35 TB/s does not."""
    dtype, peak = max(device.peak.items(), key=lambda item: item[1].value * UNITS["rate"][item[1].unit])
    flops = peak.value * UNITS["rate"][peak.unit]
    bandwidth = device.memory_bandwidth.value * UNITS["bandwidth"][device.memory_bandwidth.unit]
    if _BALANCE[0] <= flops / bandwidth <= _BALANCE[1]:
        return
    path: Path = ("device", "memory_bandwidth")
    number = device.memory_bandwidth
    if flops / bandwidth < _BALANCE[0]:
        path, number = ("device", "peak", dtype), peak
    larger = {"GFLOP/s": "TFLOP/s", "FLOP/s": "GFLOP/s", "GB/s": "TB/s", "MB/s": "GB/s", "Gbit/s": "GB/s"}
    unit = larger.get(number.unit)
    value = f"{number.value:g}"
    yield Complaint(
        path,
        f"expected {_BALANCE[0]:g} to {_BALANCE[1]:g} FLOP per byte of memory bandwidth, but found "
        f"{in_unit('rate', flops)} beside {in_unit('bandwidth', bandwidth)}",
        f'{value} {number.unit} looks like {value} {unit}: write unit = "{unit}".' if unit else "Check both numbers.",
    )


_LESS = (("memory", "size", _MEMORY), ("memory_bandwidth", "bandwidth", _MEMORY_BANDWIDTH))


def groups_wrong(entry: ClusterFile) -> Iterator[Complaint]:
    """Names of their own; each says less than [device], in its units. Whether they add up is known with the devices."""
    seen: set[str] = set()
    for i, group in enumerate(entry.groups):
        at: Path = ("groups", i)
        if group.name in seen or not group.name or "+" in group.name:
            yield Complaint((*at, "name"), f"expected a new name without +, but found {group.name!r}", "Rename it.")
        seen.add(group.name)
        if group.compute is not None:
            yield from number_wrong((*at, "compute"), group.compute, "compute", FRACTION, "a rate over the device's")
        for name, dimension, allowed in _LESS:
            number, best = getattr(group, name), getattr(entry.device, name)
            if number is None:
                continue
            wrong = list(number_wrong((*at, name), number, dimension, allowed, "a group of nodes"))
            yield from wrong
            units = UNITS[dimension]
            if not wrong and best.unit in units and number.value * units[number.unit] > best.value * units[best.unit]:
                most = in_unit(dimension, best.value * units[best.unit])
                problem = f"expected at most the {most} of [device], but found {number.value:g} {number.unit}"
                yield Complaint((*at, name), problem, "Let [device] describe the best of the nodes.")
