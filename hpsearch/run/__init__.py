"""A program on real ranks: parameters, batches, steps, checkpoints."""

from hpsearch.run.parallel_module import ParallelModule
from hpsearch.run.stepper import Built

__all__ = ["Built", "ParallelModule"]
