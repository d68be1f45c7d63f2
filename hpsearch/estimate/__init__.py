"""What a parallel layout of a transformer costs, in seconds and bytes, from shapes alone. No torch."""

from hpsearch.cluster.efficiency import Efficiency, efficiency_of
from hpsearch.estimate.estimate import Estimate, Priced, estimate, price
from hpsearch.estimate.memory import Memory, memory, rank_memory
from hpsearch.estimate.parallel import ParallelLayout
from hpsearch.estimate.read_shape import shape_of_graph
from hpsearch.estimate.shape import LatentAttention, ModelShape, StateSpace

__all__ = [
    "Efficiency",
    "Estimate",
    "LatentAttention",
    "Memory",
    "ModelShape",
    "ParallelLayout",
    "Priced",
    "StateSpace",
    "efficiency_of",
    "estimate",
    "memory",
    "price",
    "rank_memory",
    "shape_of_graph",
]
