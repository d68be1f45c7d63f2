"""What holds for every price: more bytes never take less time, slower links never more speed, units survive a file."""

from __future__ import annotations

import dataclasses
import math
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpsearch.cluster import COLLECTIVES, Cluster, Curve, Routing, Tier, shipped
from hpsearch.cluster.read import parse, read
from hpsearch.cluster.schema import Number
from hpsearch.cluster.units import UNITS, in_unit
from hpsearch.cluster.write import write

from .test_files import GOOD

NAMES = sorted(set(shipped()) - {"local"})
QUICK = settings(max_examples=150, deadline=None, derandomize=True)


@cache
def widest(name: str) -> Cluster:
    """The shipped cluster with several domains of its outermost tier, where it has an outermost tier."""
    most = Cluster.load(name, devices=1).tiers[-1].size
    return Cluster.load(name, devices=min(1536 if name == "atlas-800-a3" else 512, most))


@cache
def halved(name: str) -> Cluster:
    return with_half_the_bandwidth(widest(name))


def with_half_the_bandwidth(cluster: Cluster) -> Cluster:
    """Every byte takes twice as long, everything else as long as before: links, channels, memory, measured tables."""
    device = cluster.device
    host = device.host_bytes_per_s
    slower = dataclasses.replace(
        device,
        memory_bytes_per_s=device.memory_bytes_per_s / 2,
        host_bytes_per_s=None if host is None else host / 2,
    )
    return dataclasses.replace(cluster, device=slower, tiers=tuple(map(_half, cluster.tiers)))


def _half(tier: Tier) -> Tier:
    protocols = tuple(
        p if p.channel_bytes_per_s is None else dataclasses.replace(p, channel_bytes_per_s=p.channel_bytes_per_s / 2)
        for p in tier.protocols
    )
    curves = tuple(map(_half_curve, tier.curves))
    return dataclasses.replace(tier, bytes_per_s=tier.bytes_per_s / 2, protocols=protocols, curves=curves)


def _half_curve(curve: Curve) -> Curve:
    """Half the bytes take the time that all of them took."""
    return dataclasses.replace(curve, nbytes=tuple(n // 2 for n in curve.nbytes))


@st.composite
def groups(draw: st.DrawFn) -> tuple[str, int, int]:
    """A shipped cluster and groups that tile it."""
    name = draw(st.sampled_from(NAMES))
    devices = widest(name).devices
    size = draw(st.sampled_from([n for n in range(2, devices + 1) if devices % n == 0]))
    return name, size, draw(st.sampled_from([n for n in range(1, devices // size + 1) if devices // size % n == 0]))


BYTES = st.floats(0, 40).map(lambda power: math.floor(2**power))


@QUICK
@given(groups(), st.sampled_from(COLLECTIVES), BYTES, BYTES)
def test_time_grows_with_bytes(group: tuple[str, int, int], kind: str, one: int, other: int) -> None:
    name, size, stride = group
    few, many = widest(name).collective_s(kind, sorted((one, other)), size, stride)
    assert 0 < few <= many * (1 + 1e-12)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", COLLECTIVES)
def test_time_grows_with_bytes_everywhere(name: str, kind: str) -> None:
    """Every shipped cluster, collective and power-of-two group, at 300 sizes from a byte to 64 GiB."""
    cluster, nbytes = widest(name), np.unique(np.geomspace(1, 2**36, 300).astype(np.int64))
    divisors = [2**i for i in range(1, 10) if cluster.devices % 2**i == 0]
    for size in divisors:
        for stride in [1, *(d for d in divisors if cluster.devices % (size * d) == 0)]:
            seconds = cluster.collective_s(kind, nbytes, size, stride)
            assert (np.diff(seconds) >= -1e-15).all(), (size, stride)


@QUICK
@given(groups(), st.sampled_from(COLLECTIVES), BYTES)
def test_half_the_bandwidth_never_speeds_up_a_collective(group: tuple[str, int, int], kind: str, nbytes: int) -> None:
    name, size, stride = group
    before = widest(name).collective(kind, nbytes, size, stride).seconds
    after = halved(name).collective(kind, nbytes, size, stride).seconds
    assert before * (1 - 1e-9) <= after <= 2.01 * before + 1e-12


@QUICK
@given(
    st.sampled_from(NAMES), st.sampled_from([2, 4, 8]), st.integers(1, 10**5), st.integers(1, 10**5),
    st.integers(1, 16), st.floats(1, 1e5),
)  # fmt: skip
def test_dispatch_grows_with_tokens_and_slows_with_links(
    name: str, size: int, one: int, other: int, top_k: int, token_bytes: float
) -> None:
    few, many = (Routing(tokens, token_bytes, top_k, 64) for tokens in sorted((one, other)))
    assert widest(name).dispatch(few, size, 1)[0].seconds <= widest(name).dispatch(many, size, 1)[0].seconds
    assert widest(name).dispatch(few, size, 1)[0].seconds <= halved(name).dispatch(few, size, 1)[0].seconds


DIMENSIONS = st.sampled_from(sorted(UNITS)).flatmap(
    lambda d: st.tuples(st.just(d), st.sampled_from(sorted(UNITS[d])), st.floats(1e-6, 1e6))
)


@QUICK
@given(DIMENSIONS)
def test_readable_units_come_back(drawn: tuple[str, str, float]) -> None:
    """An SI value, printed in the unit people use and read again, to the six digits that are printed."""
    dimension, unit, value = drawn
    si = value * UNITS[dimension][unit]
    number, _, word = in_unit(dimension, si).partition(" ")
    assert float(number) * UNITS[dimension][word] == pytest.approx(si, rel=1e-5)


@QUICK
@given(
    st.sampled_from(["GB/s", "Gbit/s", "Gbps", "TB/s", "MB/s", "GiB/s", "B/s"]), st.floats(80e9, 1.9e12),
    st.sampled_from(["us", "ms", "ns", "s"]), st.floats(0.1e-6, 4e-6),
    st.sampled_from(["GB", "GiB", "TB", "TiB", "MB", "MiB", "B"]), st.integers(10**9, 10**12),
)  # fmt: skip
def test_units_survive_a_file(
    rate: str, bytes_per_s: float, time: str, latency_s: float, size: str, memory_bytes: int
) -> None:
    """Stated in any unit, written as TOML and read again: the same fields to the last bit, the same SI values."""

    def number(dimension: str, unit: str, si: float) -> Number:
        return Number(value=si / UNITS[dimension][unit], unit=unit, kind="measured", source="here")

    entry = parse(GOOD, "x")
    device = entry.device.model_copy(update={"memory": number("size", size, memory_bytes)})
    changed = {"bandwidth": number("bandwidth", rate, bytes_per_s), "latency": number("time", time, latency_s)}
    node = entry.tiers[0].model_copy(update=changed | {"collectives": ()})
    entry = entry.model_copy(update={"device": device, "tiers": (node, entry.tiers[1])})
    text = write(entry)
    assert parse(text, "x") == entry
    found = read(text, "x")
    assert found.tiers[0].bytes_per_s == pytest.approx(bytes_per_s, rel=1e-12)
    assert found.tiers[0].latency_s == pytest.approx(latency_s, rel=1e-12)
    assert abs(found.device.memory_bytes - memory_bytes) <= 1 + 1e-9 * memory_bytes
