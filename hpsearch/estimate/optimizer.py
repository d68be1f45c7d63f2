"""What the optimizer keeps, moves and computes."""

from __future__ import annotations

from collections.abc import Sequence

from hpsearch.cluster import Cluster
from hpsearch.estimate.parallel import ParallelLayout
from hpsearch.estimate.shape import ModelShape, kind_of
from hpsearch.estimate.stages import Chunk

MOMENTS = {"adamw": 2, "muon": 1, "momentum": 1, "sgd": 0}
"""Tensors of a parameter's size. Muon's matrices have one; what it leaves to AdamW (vectors, embeddings) is counted so
too."""
ALWAYS_BYTES = 28.0
"""Read and written for one parameter besides its moments: norm and scale 8, master copy 8, gradient 8, weight 4."""
ITERATIONS = 5
"""Newton-Schulz steps of Muon (https://kellerjordan.github.io/posts/muon/)."""


def moment_bytes(layout: ParallelLayout) -> float:
    """Of the moments of one parameter."""
    return float(MOMENTS[layout.optimizer] * layout.moment_element_bytes)


def traffic_bytes(layout: ParallelLayout) -> float:
    """Read and written for one parameter in an update."""
    return ALWAYS_BYTES + 2 * moment_bytes(layout)


def matrices(shape: ModelShape, layout: ParallelLayout, block: str) -> list[tuple[float, float]]:
    """(inputs, outputs) of every linear of a block on one device; of scans and routers none."""
    shape, block = shape.of(block), kind_of(block)
    h, t = shape.hidden, layout.tp
    if block == "attention" and shape.mla is not None:
        m, up = shape.mla, shape.heads * (shape.mla.qk_nope + shape.mla.v_dim)
        query = [(h, m.q_lora), (m.q_lora, shape.q_width / t)] if m.q_lora else [(h, shape.q_width / t)]
        return [*query, (h, m.kv_lora + m.qk_rope), (m.kv_lora, up / t), (shape.v_width / t, h)]
    if block == "attention":
        keys = (h, shape.kv_width / t)
        return [(h, shape.q_width / t), keys, keys, (shape.v_width / t, h)]
    if block == "mlp":
        return [(h, shape.ffn / t)] * (3 if shape.gated else 2)
    if block == "moe":
        mats = 3 if shape.moe_gated else 2
        routed = (float(shape.expert_width), shape.moe_ffn / layout.etp)
        shared = [(float(h), shape.shared_ffn / t)] * (mats if shape.shared_ffn else 0)
        return shared + [routed] * int(mats * shape.experts / layout.ep)
    return []


def orthogonal_s(shape: ModelShape, layout: ParallelLayout, cluster: Cluster, mine: Sequence[Chunk]) -> float:
    """Seconds of Muon's Newton-Schulz steps on a pipeline rank: X ← aX + (bA + cA²)X with A = XXᵀ, on matrices that
    each have one owner among the ranks that share them; the ranks of a tensor-parallel group share the matrix too."""
    whole: list[tuple[float, float]] = []
    for chunk in mine:
        for name, count in chunk.blocks.items():
            whole += [(inputs, outputs) for inputs, outputs in matrices(shape, layout, name) for _ in range(count)]
    flops = sum(2 * ITERATIONS * (2 * min(pair) ** 2 * max(pair) + min(pair) ** 3) for pair in whole)
    rate = cluster.device.peak_flops_per_s(cluster.device.sixteen) * cluster.device.matmul_efficiency
    return flops / max(min(layout.data_ranks, len(whole)), 1) / rate
