"""What holds for every estimate: slower links and memory never speed a step up; closed forms of pipelines equal the
schedule run event by event."""

from __future__ import annotations

from functools import cache

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from hpsearch.cluster import Cluster
from hpsearch.errors import LegalityError
from hpsearch.estimate import ModelShape, ParallelLayout, estimate
from hpsearch.estimate.parallel import RECOMPUTE
from hpsearch.estimate.pipeline import as_run, pipeline_s, simulated_s
from hpsearch.estimate.shape import transformer
from hpsearch.schedule import Event, dry_run, simulate
from tests.cluster.test_properties import with_half_the_bandwidth
from tests.estimate.test_pipeline import timeline_s

DENSE = ModelShape("8B", 4096, 32, 8, 128, 128256, transformer(32, 0, 0), ffn=14336)
EXPERTS = ModelShape(
    "16B-A3B", 2048, 16, 16, 128, 102400, transformer(32, 0, 64), ffn=10944, experts=64, top_k=6, moe_ffn=1408,
    shared_ffn=2816,
)  # fmt: skip
DEVICES = 64
CLUSTERS = ("h100-sxm-ib400", "a100-sxm-selene", "b200-hgx-ib400", "h800-sxm-ib400", "gb200-nvl72")
QUICK = settings(max_examples=150, deadline=None, derandomize=True)


@cache
def machines(name: str) -> tuple[Cluster, Cluster]:
    """A shipped cluster, and the same with half of every bandwidth."""
    cluster = Cluster.load(name, devices=DEVICES)
    return cluster, with_half_the_bandwidth(cluster)


@st.composite
def layouts(draw: st.DrawFn) -> ParallelLayout:
    """Any legal layout of 64 devices."""
    powers = st.integers(0, 3).map(lambda power: 2**power)
    tp, pp, cp, ep = (draw(powers) for _ in range(4))
    assume(tp * pp * cp <= DEVICES)
    dp = DEVICES // (tp * pp * cp)
    micro_batch, count = draw(st.sampled_from([1, 2])), pp * draw(st.sampled_from([1, 2, 4]))
    zero = draw(st.sampled_from([0, 1, 2, 3]))
    try:
        return ParallelLayout(
            devices=DEVICES, seq_len=4096, micro_batch=micro_batch, global_batch=micro_batch * dp * count, tp=tp, pp=pp,
            cp=cp, ep=ep, vpp=draw(st.sampled_from([1, 2])) if pp > 1 else 1, sp=draw(st.booleans()) and tp > 1,
            zero=zero, fsdp=zero == 3 and draw(st.booleans()), recompute=draw(st.sampled_from(RECOMPUTE)),
            fused=draw(st.booleans()), flash=draw(st.booleans()), overlap_grad_reduce=draw(st.booleans()),
            overlap_param_gather=draw(st.booleans()), overlap_tp=draw(st.booleans()),
        )  # fmt: skip
    except LegalityError:
        assume(False)
        raise


@QUICK
@given(st.sampled_from(CLUSTERS), layouts(), st.booleans())
def test_half_of_every_bandwidth_never_speeds_up_a_step(name: str, layout: ParallelLayout, experts: bool) -> None:
    shape = EXPERTS if experts else DENSE
    before, after = (estimate(shape, layout, machine).step_s for machine in machines(name))
    assert before < after <= 2.01 * before


STAGES, FACTORS = st.sampled_from([1, 2, 3, 4, 8]), st.floats(0.1, 10)


@QUICK
@given(STAGES, st.integers(1, 40), FACTORS, FACTORS)
def test_1f1b_equals_its_closed_form(stages: int, m: int, forward: float, backward: float) -> None:
    """Equal stages, no hops: m + p - 1 slots of one forward and one backward."""
    closed = (m + stages - 1) * (forward + backward)
    f, b = [forward] * stages, [backward] * stages
    assert simulated_s(f, b, stages, m, 0.0) == pytest.approx(closed, rel=0.01)
    assert pipeline_s(f, b, stages, m, 0.0) == pytest.approx(closed, rel=0.01)
    assert timeline_s(f, b, stages, m) == pytest.approx(closed, rel=0.01)


@QUICK
@given(st.sampled_from([2, 3, 4, 8]), st.sampled_from([2, 3, 4]), st.integers(1, 6), FACTORS, FACTORS)
def test_interleaved_equals_its_closed_form(
    stages: int, chunks: int, rounds: int, forward: float, backward: float
) -> None:
    """Equal chunks, no hops, whole rounds of micro-batches: the bubble of 1F1B divided by the chunks of a rank
    (Narayanan et al. 2021): m (F + B) + (p - 1)(F + B) / v."""
    m = stages * rounds
    closed = m * (forward + backward) + (stages - 1) * (forward + backward) / chunks
    f, b = [forward / chunks] * (stages * chunks), [backward / chunks] * (stages * chunks)
    assert simulated_s(f, b, stages, m, 0.0) == pytest.approx(closed, rel=0.01)
    assert pipeline_s(f, b, stages, m, 0.0) == pytest.approx(closed, rel=0.01)
    assert timeline_s(f, b, stages, m) == pytest.approx(closed, rel=0.01)


@QUICK
@given(st.integers(1, 8), st.integers(1, 30), FACTORS, FACTORS)
def test_all_forwards_first_takes_as_long_as_1f1b(stages: int, m: int, forward: float, backward: float) -> None:
    """GPipe on the timeline, rank by rank: (m + p - 1)(F + B) too."""
    events = [
        Event(f"F{r} {i}", str(r), forward, (f"F{r - 1} {i}",) if r else ()) for r in range(stages) for i in range(m)
    ]
    events += [
        Event(f"B{r} {i}", str(r), backward, (f"B{r + 1} {i}",) if r + 1 < stages else (f"F{r} {i}",))
        for r in reversed(range(stages))
        for i in range(m)
    ]
    assert simulate(events).end_s == pytest.approx((m + stages - 1) * (forward + backward), rel=1e-9)


@QUICK
@given(st.sampled_from([2, 4, 8]), st.sampled_from([1, 2, 4]), st.integers(1, 5))
def test_every_rank_does_every_chunk_of_every_micro_batch_once(stages: int, chunks: int, rounds: int) -> None:
    m = stages * rounds
    schedule = as_run(stages, chunks, m)
    assert len(dry_run(schedule).order) == 2 * stages * chunks * m
    for rank, steps in enumerate(schedule.ranks):
        wanted = {f"{c * stages + rank}{kind}{i}" for c in range(chunks) for i in range(m) for kind in "FB"}
        assert set(map(str, steps)) == wanted
        assert len(steps) == len(wanted)
