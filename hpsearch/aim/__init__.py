"""What a layout is wanted for, other than the shortest step: objectives over stated values, each with its proof; and
several models in one step. No torch."""

from hpsearch.aim.aim import DIMENSIONS, Aim
from hpsearch.aim.front import Front, Point, front, ranked
from hpsearch.aim.module import Job, Module
from hpsearch.aim.price import Tariff
from hpsearch.aim.reach import Reached, Verdict, reach
from hpsearch.aim.together import Together, together
from hpsearch.aim.vary import Steadiness, Tie, steadiness, steady, ties, worst

__all__ = [
    "DIMENSIONS",
    "Aim",
    "Front",
    "Job",
    "Module",
    "Point",
    "Reached",
    "Steadiness",
    "Tariff",
    "Tie",
    "Together",
    "Verdict",
    "front",
    "ranked",
    "reach",
    "steadiness",
    "steady",
    "ties",
    "together",
    "worst",
]
