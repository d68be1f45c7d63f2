"""Forms of an exchange with experts: seconds by hand, copies by counting, and one form that is never taken."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpsearch.cluster import Cluster, Routing, Tier
from hpsearch.cluster.dispatch import parts_met
from hpsearch.cluster.exchange import CALLS, exchanges
from hpsearch.errors import LegalityError
from hpsearch.schedule.timeline import Event, simulate
from tests.cluster.conftest import TOY_DEVICE

US = 1e-6


def test_both_forms_by_hand(toy: Cluster) -> None:
    """4 nodes of 8 at 100 GB/s and 1 us, 10 GB/s and 10 us between; 1,000 tokens of 10 kB, top 8 of 64 experts."""
    routing = Routing(1000, 1e4, 8, 64)
    apart = toy.exchange(routing, 32, 1, "apart")
    assert apart.hops == ()
    assert apart.price.seconds == pytest.approx(CALLS * 10 * US + 80e6 * 24 / 32 / 10e9)
    assert apart.crossing == 8 * 3 / 4
    together = toy.exchange(routing, 32, 1)
    nodes, ranks = parts_met(4, 64, 8), parts_met(32, 64, 8)
    assert (together.form, together.hops) == ("together", (4, 8))
    assert str(together) == "one copy a domain in hops of 4 x 8"
    assert together.crossing == pytest.approx(nodes * 3 / 4)
    seconds = CALLS * 11 * US + 10e6 * nodes * 3 / 4 / 10e9 + 10e6 * ranks * 7 / 8 / 100e9
    assert together.price.seconds == pytest.approx(seconds)


def test_limits_of_the_choice(toy: Cluster) -> None:
    """One expert a token: nothing travels together. Few tokens: one hop. Inside a node: one copy a rank."""
    assert toy.exchange(Routing(1000, 1e4, 1, 64), 32, 1).form == "apart"
    assert toy.exchange(Routing(1, 1e3, 8, 64), 32, 1).form == "apart"
    assert toy.exchange(Routing(1000, 1e4, 8, 64), 8, 1).hops == (8,)
    assert toy.exchange(Routing(1000, 1e4, 8, 64), 4, 8).hops == (4,)  # one rank a node


def test_hops_follow_the_tiers(deep: Cluster) -> None:
    assert deep.exchange(Routing(1000, 1e4, 8, 64), 64, 1, "together").hops == (2, 4, 4, 2)


@st.composite
def machines(draw: st.DrawFn) -> tuple[Cluster, int, int]:
    """Up to four tiers of any speeds, slow or fast inside, and a group on them."""
    sizes = draw(st.lists(st.sampled_from([2, 4]), min_size=1, max_size=4))
    tiers, size = [], 1
    for level, parts in enumerate(sizes):
        size *= parts
        rate, latency = draw(st.floats(1e8, 1e12)), draw(st.floats(0, 1e-3))
        tiers.append(Tier(f"t{level}", size, "nvlink", rate, latency))
    group = draw(st.sampled_from([n for n in (2, 4, 8, 16, 32, 64, 128, 256) if n <= size]))
    stride = draw(st.sampled_from([n for n in (1, 2, 4, 8, 16, 32, 64, 128) if n * group <= size]))
    return Cluster("drawn", size, TOY_DEVICE, tuple(tiers)), group, stride


@given(
    machine=machines(), top_k=st.integers(1, 8), tokens=st.integers(0, 10**5), token_bytes=st.floats(1, 1e5),
    each=st.sampled_from([1, 2, 8]),
)  # fmt: skip
def test_hops_without_joining_copies_are_never_taken(
    machine: tuple[Cluster, int, int], top_k: int, tokens: int, token_bytes: float, each: int
) -> None:
    """By timeline: the tiers of one exchange work at once, hops wait for each other and carry no copy less."""
    cluster, size, stride = machine
    routing = Routing(tokens, token_bytes, min(top_k, each * size), each * size)
    shape = cluster.shape(size, stride)
    found = {e.form: e for e in exchanges(cluster._links, routing, shape)}
    assert cluster.exchange(routing, size, stride).form != "relayed"
    assert played(cluster, routing, size, stride, found["apart"].hops) == pytest.approx(found["apart"].price.seconds)
    relayed = played(cluster, routing, size, stride, found["relayed"].hops)
    assert relayed == pytest.approx(found["relayed"].price.seconds)
    assert relayed >= found["apart"].price.seconds * (1 - 1e-12)
    with pytest.raises(LegalityError, match=r"exchange relayed .*: expected a form that saves bytes"):
        cluster.exchange(routing, size, stride, "relayed")


def played(cluster: Cluster, routing: Routing, size: int, stride: int, hops: tuple[int, ...]) -> float:
    """Seconds until the copies that rank 0 sends or passes on have left, each on its own, experts drawn evenly.

    A hop goes from anywhere in `high` ranks to the right part of `low`, after the hop before; each tier that it crosses
    is a resource.
    """
    total, events, before = routing.tokens * routing.token_bytes * routing.top_k, list[Event](), tuple[str, ...]()
    spans, high = [], size
    for hop in hops or (size,):
        spans.append((high, high // hop))
        high //= hop
    for high, low in spans:
        loads: dict[int, float] = {}
        for other in range(low * stride, high * stride, low * stride):  # rank 0 stays where it is
            tier = next(i for i, tier in enumerate(cluster.tiers) if other < tier.size)
            loads[tier] = loads.get(tier, 0.0) + total * low / high
        calls_s = CALLS * cluster.tiers[max(loads)].latency_s
        for tier, nbytes in loads.items():
            rate = cluster.tiers[tier].rate_within(min(cluster.tiers[tier].size // stride, size))
            events.append(Event(f"{high} {tier}", f"tier {tier}", calls_s + nbytes / rate, before))
        before = tuple(f"{high} {tier}" for tier in loads)
    return simulate(events).end_s
