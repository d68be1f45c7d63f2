"""Seconds and bytes for everything the solver will see. No torch."""

from hpsearch.cost.cost_table import CostTable, build
from hpsearch.cost.job import OPTIMIZER_STATES, RECIPES, Job, Recipe, check_batch, optimizer_states, recipe_of
from hpsearch.cost.storage import Storage

__all__ = [
    "OPTIMIZER_STATES",
    "RECIPES",
    "CostTable",
    "Job",
    "Recipe",
    "Storage",
    "build",
    "check_batch",
    "optimizer_states",
    "recipe_of",
]
