"""What a parallel layout of a transformer costs, in seconds and bytes, from shapes alone. No torch."""

from hpsearch.estimate.shape import LatentAttention, ModelShape, StateSpace
from hpsearch.estimate.shape_sources import shape_of_config, shape_of_row

__all__ = ["LatentAttention", "ModelShape", "StateSpace", "shape_of_config", "shape_of_row"]
