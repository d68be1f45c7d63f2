"""From a captured graph and a plan to the program that every rank runs."""

from hpsearch.lower.dropout import Clock
from hpsearch.lower.lowering import lower
from hpsearch.lower.parameters import ParamSlot
from hpsearch.lower.pipeline import PipelineProgram
from hpsearch.lower.program import BufferSlot, InputSlot, ParallelProgram

__all__ = ["BufferSlot", "Clock", "InputSlot", "ParallelProgram", "ParamSlot", "PipelineProgram", "lower"]
