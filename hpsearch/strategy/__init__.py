"""Every legal way to split every op. No torch, no prices."""

from hpsearch.strategy.data_axes import DataPlacements, Followed, propagate_all
from hpsearch.strategy.heads import check_degree, head_counts, is_legal_tp, legal_tp
from hpsearch.strategy.micro_batches import WHY_WHOLE, check_micro_batches
from hpsearch.strategy.search_space import Edge, Node, Reader, SearchSpace, enumerate_space

__all__ = [
    "WHY_WHOLE",
    "DataPlacements",
    "Edge",
    "Followed",
    "Node",
    "Reader",
    "SearchSpace",
    "check_degree",
    "check_micro_batches",
    "enumerate_space",
    "head_counts",
    "is_legal_tp",
    "legal_tp",
    "propagate_all",
]
