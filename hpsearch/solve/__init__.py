"""The inner problem: one state per node at least cost, exactly, with proof. numpy and OR-tools only.

Reading order: problem.py (what is asked), intra_op.py (the integer program), solver.py (how it is solved).
"""

from hpsearch.solve.enumeration import enumerate_all
from hpsearch.solve.problem import Flow, Hinge, Problem, Row, Solution
from hpsearch.solve.solver import least, solve

__all__ = ["Flow", "Hinge", "Problem", "Row", "Solution", "enumerate_all", "least", "solve"]
