"""Model FLOPs of a token, and the utilisation that a step time amounts to.

Convention: two for each multiply-add of every matrix product and of attention, causal pairs only, the head's logits
counted, the embedding lookup not, routed experts as many as a token goes to; backward twice the forward; nothing for
recomputation. Utilisation is of the dense 16-bit peak.
"""

from __future__ import annotations

from hpsearch.cluster import Cluster
from hpsearch.estimate.parallel import ParallelLayout
from hpsearch.estimate.shape import ModelShape, kind_of


def token_flops(shape: ModelShape, seq_len: int) -> float:
    """Forward and backward of one token."""
    matrices = float(shape.active_params - shape.embedding_params - shape.head_params)
    matrices += shape.vocab * shape.hidden
    pairs = 0.0
    for name, count in shape.counts.items():
        own = shape.of(name)
        if kind_of(name) == "attention":
            length = own.tokens or seq_len
            seen = length / 2 if own.causal else float(length)
            windowed = min(own.window_layers / max(own.counts["attention"], 1), 1.0) if own.window else 0.0
            seen = (1 - windowed) * seen + windowed * min(own.window, seen)
            pairs += count * seen * (own.q_width + own.v_width)
    return 3 * (2 * matrices + 2 * pairs)


def utilisation(shape: ModelShape, layout: ParallelLayout, cluster: Cluster, step_s: float) -> tuple[float, float]:
    """(model FLOP/s of one device, share of its dense 16-bit peak)."""
    rate = token_flops(shape, layout.seq_len) * layout.rows * layout.seq_len / step_s / layout.devices
    return rate, rate / cluster.device.peak_flops_per_s(cluster.device.sixteen)
