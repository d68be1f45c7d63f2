"""Whether mask, scale and softmax of a written score matrix are one kernel."""

from __future__ import annotations

from hpsearch.estimate.parallel import ParallelLayout
from hpsearch.estimate.shape import ModelShape

MATRICES = 4


def softmax_is_fused(shape: ModelShape, layout: ParallelLayout) -> bool:
    """The kernel takes score matrices (local heads times rows) in fours and leaves other counts to the ops of fp32,
    whose result is one more copy to keep
    (https://github.com/NVIDIA/Megatron-LM/blob/0cb36de2d698dd4dd9804659e411f3394c13f0df/megatron/model/fused_softmax.py).
    So 16 heads on 8 ranks: 1 row of a micro-batch takes 20 % longer than 2 (arXiv 2312.12391, A100).
    """
    return layout.fused_softmax and shape.heads // layout.tp * layout.micro_batch % MATRICES == 0
