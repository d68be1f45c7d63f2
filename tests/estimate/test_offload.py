"""Activations that go to the host and back: seconds of the copies, by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hpsearch.cluster import Cluster
from hpsearch.errors import ClusterError
from hpsearch.estimate import ModelShape, ParallelLayout, estimate
from hpsearch.estimate.estimate import price
from hpsearch.estimate.shape import transformer
from hpsearch.estimate.work import block_work

LLAMA = ModelShape("Llama", 8192, 64, 8, 128, 128256, transformer(80, 0, 0), ffn=28672)
LAYOUT = ParallelLayout(devices=64, seq_len=8192, micro_batch=1, global_batch=64, tp=8, pp=2, sp=True)
CLUSTER = Cluster.load("h100-sxm-ib400", devices=64)


def with_host_link(bytes_per_s: float | None) -> Cluster:
    return replace(CLUSTER, device=replace(CLUSTER.device, host_bytes_per_s=bytes_per_s))


def test_copies_are_what_is_saved_over_the_link() -> None:
    """40 layers a stage, half of each offloaded."""
    saved = sum(block_work(name, LLAMA, LAYOUT).saved for name in ("attention", "mlp"))
    found = price(LLAMA, replace(LAYOUT, offload_share=0.5), with_host_link(55e9)).copies_s
    assert found == pytest.approx([0.5 * 40 * saved / 55e9] * 2)


def test_full_recompute_leaves_one_tensor_a_layer_to_copy() -> None:
    layout = replace(LAYOUT, offload_share=1.0, recompute="full")
    found = price(LLAMA, layout, with_host_link(55e9)).copies_s
    assert found == pytest.approx([40 * 2 * 8192 * 8192 / 8 / 55e9] * 2)


def test_copies_hide_under_compute_until_they_take_longer() -> None:
    offloaded = replace(LAYOUT, offload_share=1.0)
    plain, hidden, slow = (
        estimate(LLAMA, layout, with_host_link(link)).step_s
        for layout, link in ((LAYOUT, 900e9), (offloaded, 900e9), (offloaded, 5e9))
    )
    assert hidden == plain
    assert slow > 2 * plain


def test_an_unknown_link_is_refused() -> None:
    with pytest.raises(ClusterError, match="expected host_bandwidth, to price offload, but found none"):
        estimate(LLAMA, replace(LAYOUT, offload_share=0.5), with_host_link(None))
