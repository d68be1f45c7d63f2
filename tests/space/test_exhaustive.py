"""On small problems, every layout of the space priced by plain loops: nothing is better than the bound, the best is as
good as its certificate says, and it fits.

Each model and cluster is enumerated once, and searched with memory without limit and at quantiles of the peaks found:
there some layouts fit only recomputed, some only cut unevenly, and few or none without sharding.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache, cached_property

import pytest

from hpsearch.cluster import Cluster
from hpsearch.errors import InfeasibleError
from hpsearch.estimate import LatentAttention, ModelShape, ParallelLayout, memory
from hpsearch.estimate.shape import StateSpace, hybrid, transformer
from hpsearch.space import Found, Space, best
from tests.space.naive import Outcome, Pins, every_outcome

BASE = ParallelLayout(
    devices=1, seq_len=4096, micro_batch=1, global_batch=16, overlap_grad_reduce=True, overlap_param_gather=True,
    dedup=True,
)  # fmt: skip
PLAIN = replace(BASE, overlap_grad_reduce=False, overlap_param_gather=False, dedup=False)
DENSE = ModelShape("dense", 4096, 32, 8, 128, 64000, transformer(4, 0, 0), ffn=14336)
DEEP = ModelShape("deep", 2048, 16, 4, 128, 32000, transformer(6, 0, 0), ffn=8192)
WIDE_HEAD = ModelShape("wide head", 2048, 16, 16, 128, 256000, transformer(5, 0, 0), ffn=8192, tied=True)
EXPERTS = ModelShape(
    "experts", 2048, 16, 4, 128, 64000, transformer(4, 0, 8), experts=8, top_k=2, moe_ffn=4096, shared_ffn=2048
)
DENSE_THEN_EXPERTS = ModelShape(
    "dense, then experts", 2048, 16, 4, 128, 64000, transformer(5, 2, 8), ffn=8192, experts=8, top_k=2, moe_ffn=4096
)
HYBRID = ModelShape(
    "hybrid", 2048, 16, 4, 128, 64000, hybrid("M-M*-E"), ffn=8192, experts=8, top_k=2, moe_ffn=2048,
    mamba=StateSpace(64, 64, 128, 8),
)  # fmt: skip
LATENT = ModelShape(
    "latent", 2048, 16, 16, 192, 64000, transformer(5, 1, 8), ffn=8192, experts=8, top_k=2, moe_ffn=2048,
    shared_ffn=2048, mla=LatentAttention(768, 512, 128, 64, 128), mtp_layers=1,
)  # fmt: skip


@dataclass(frozen=True)
class Problem:
    shape: ModelShape
    machine: str
    devices: int
    pins: Pins
    base: ParallelLayout = BASE
    limits: tuple[float, ...] = (1.0, 0.3, 0.1, 0.02)
    """Share of all layouts that fit."""
    node: int = 0
    """Devices of a node, where not the machine's own."""

    @cached_property
    def cluster(self) -> Cluster:
        if not self.node:
            return Cluster.load(self.machine, devices=self.devices)
        made = Cluster.load(self.machine, devices=16)
        inner, outer = made.tiers
        tiers = replace(inner, size=self.node), replace(outer, size=self.devices)
        return Cluster(made.name, self.devices, made.device, tiers)


PROBLEMS = {
    "dense, tp and pp": Problem(
        DENSE, "h100-sxm-roce400", 4, {"tp": (1, 2), "cp": (1,), "micro_batch": (1, 2), "pp": (1, 2, 4)}
    ),
    "deep, any cut": Problem(
        DEEP, "h100-sxm-roce400", 3, {"pp": (3,), "micro_batch": (1,), "recompute": ("full",)},
        replace(BASE, global_batch=8),
    ),
    "deep, 6 stages": Problem(DEEP, "h100-sxm-roce400", 12, {"pp": (6,), "micro_batch": (1, 4), "cp": (1,)}, node=4),
    "deep, virtual stages": Problem(
        DEEP, "h100-sxm-roce400", 2, {"pp": (2,), "micro_batch": (1, 2), "recompute": ("full", "mlp")}
    ),
    "deep, few micro-batches": Problem(
        DEEP, "h100-sxm-roce400", 4, {"pp": (4,), "recompute": ("full",)}, replace(PLAIN, global_batch=3)
    ),
    "context": Problem(
        DENSE, "h100-sxm-roce400", 16, {"tp": (1, 2), "cp": (2, 4), "pp": (1, 2), "micro_batch": (1,), "vpp": (1,),
                                        "recompute": ("full",)}, replace(PLAIN, seq_len=16384, global_batch=8),
    ),
    "wide head": Problem(
        WIDE_HEAD, "a100-sxm-40gb", 6, {"pp": (2, 3), "cp": (1,), "micro_batch": (1,), "recompute": ("full",)},
        replace(PLAIN, global_batch=12),
    ),
    "experts": Problem(
        EXPERTS, "h100-sxm-roce400", 8, {"tp": (1, 2), "cp": (1,), "pp": (1, 2), "micro_batch": (1,), "zero": (1, 3),
                                         "recompute": ("full", "moe"), "vpp": (1,)},
    ),
    "experts on two nodes": Problem(
        EXPERTS, "h800-sxm-ib400", 16, {"tp": (1, 2), "cp": (1, 2), "cp_kind": ("ring",), "pp": (1,)},
    ),
    "dense, then experts": Problem(
        DENSE_THEN_EXPERTS, "h100-sxm-roce400", 4, {"cp": (1,), "pp": (2, 4), "micro_batch": (1,), "zero": (0, 3),
                                                    "recompute": ("full",), "sp": (True,)},
    ),
    "dense, then experts, 2 stages": Problem(
        DENSE_THEN_EXPERTS, "h200-sxm-ib400", 8, {"cp": (1,), "pp": (2,), "tp": (1, 2), "micro_batch": (1,)},
    ),
    "hybrid": Problem(
        HYBRID, "h100-sxm-roce400", 4, {"pp": (2, 4), "micro_batch": (1,), "recompute": ("full", "norm+activation"),
                                        "tp": (1, 2), "sp": (True, False), "ep": (1, 2), "etp": (1,)},
    ),
    "latent": Problem(
        LATENT, "b200-hgx-ib400", 4, {"cp": (1,), "pp": (1, 2, 4), "micro_batch": (1, 2), "recompute": ("full",),
                                      "tp": (1, 2), "etp": (1,)},
    ),
    "offload": Problem(
        DEEP, "h100-sxm-roce400", 2, {"pp": (1, 2), "micro_batch": (1, 2), "recompute": ("full", "mlp"), "cp": (1,)},
        replace(PLAIN, offload_share=0.3), (1.0, 0.5, 0.1),
    ),
    "layers alone": Problem(
        replace(DENSE, vocab=0, bias=True), "gb200-nvl72", 4, {"micro_batch": (1,), "cp": (1,), "zero": (0, 3)},
        replace(PLAIN, fused=False, expandable=False, prefetch=False, optimizer="muon", precision="fp8"),
    ),
    "more cuts than are tried": Problem(
        replace(HYBRID, pattern=hybrid("MM*-EMM*E-ME")), "h100-sxm-roce400", 4,
        {"pp": (4,), "micro_batch": (1,), "recompute": ("norm+activation",), "vpp": (1,)}, BASE, (1.0, 0.3, 0.03, 0.0),
    ),
    "written scores": Problem(
        DENSE, "a100-sxm-selene", 4, {"cp": (1,), "pp": (1, 2), "micro_batch": (1, 2), "tp": (1, 2, 4)},
        replace(PLAIN, flash=False, seq_len=2048, dropout=True),
    ),
}  # fmt: skip
CASES = [(name, limit) for name, problem in PROBLEMS.items() for limit in problem.limits]


@cache
def outcomes(name: str) -> tuple[Outcome, ...]:
    problem = PROBLEMS[name]
    return tuple(every_outcome(problem.shape, problem.cluster, problem.base, problem.pins))


def limited(name: str, share: float) -> tuple[Space, list[Outcome]]:
    """The space on devices in which this share of all layouts fit, and those."""
    problem, every = PROBLEMS[name], outcomes(name)
    peaks = sorted(one.peak_bytes for one in every)
    room = int(peaks[max(int(share * len(peaks)) - 1, 0)]) + 1
    cluster = replace(problem.cluster, device=replace(problem.cluster.device, memory_bytes=room))
    space = Space(problem.shape, cluster, problem.base, problem.pins)
    return space, [one for one in every if one.peak_bytes <= room]


@pytest.mark.parametrize(("name", "share"), CASES)
def test_nothing_is_better_than_the_certificate_says(name: str, share: float) -> None:
    space, fitting = limited(name, share)
    found = best(space)
    least = min(one.step_s for one in fitting)
    proof = found.certificate
    assert proof.bound_s <= least * (1 + 1e-9)
    assert least <= found.best.step_s * (1 + 1e-9)
    assert found.best.step_s * (1 - proof.gap) <= least * (1 + 1e-9)
    is_small = space.shape.layers <= 6  # so few cuts are all tried, with the least recompute
    if is_small and (not space.base.offload_share or found.best.layout.pp == 1):
        assert found.best.step_s <= least * (1 + 1e-9)
    assert proof.gap == pytest.approx(1 - proof.bound_s / found.best.step_s, abs=1e-12)
    check_answers(space, found, fitting)


def check_answers(space: Space, found: Found, fitting: list[Outcome]) -> None:
    """Everything it returns is in the space, fits, and takes as long as it says."""
    known = {one.layout: one.step_s for one in fitting}
    for choice in (found.best, found.chosen, *found.tried):
        assert memory(space.shape, choice.layout).peak_bytes <= space.cluster.device.memory_bytes
        assert choice.step_s == pytest.approx(known[choice.layout], rel=1e-12)
    assert found.chosen.step_s <= found.best.step_s * 1.01


@pytest.mark.parametrize("name", PROBLEMS)
def test_what_does_not_fit_is_refused(name: str) -> None:
    """Devices with a byte less than the smallest layout needs."""
    problem, least = PROBLEMS[name], min(one.peak_bytes for one in outcomes(name))
    device = replace(problem.cluster.device, memory_bytes=int(least) - 1)
    space = Space(problem.shape, replace(problem.cluster, device=device), problem.base, problem.pins)
    with pytest.raises(InfeasibleError, match=r"\d GB"):
        best(space)
