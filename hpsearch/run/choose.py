"""Which plan runs: the one that was given, or the one that rank 0 finds; the same bytes on every rank."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from hpsearch.cluster import Cluster
from hpsearch.errors import PlanError
from hpsearch.graph import ModelGraph
from hpsearch.plan import Plan
from hpsearch.run.launch import agree, is_first, num_processes, start, together

Where = Cluster | str | os.PathLike[str] | None
Given = Plan | str | os.PathLike[str] | None
Find = Callable[[Cluster], Plan]


def choose_plan(given: Given, cluster: Where, find: Find) -> Plan:
    """The plan, equal on every rank. Collective under a launcher; on one process alone otherwise.

    Raises LaunchError on every rank when the ranks were given different ones.
    """
    start()
    content = together("plan", lambda: _content(given))
    agreed = agree(content, lambda: find(_cluster(cluster)).content)
    return together("plan", lambda: Plan.from_bytes(agreed, _subject(given)))


def check_plan(plan: Plan, graph: ModelGraph, cluster: Where, given: Given) -> Plan:
    """`plan` again, after making sure that it is for this model, and for `cluster` if one was named. Collective.

    Raises PlanError with the first difference.
    """
    # Only rank 0 looks at the cluster: a `local` one is what that rank's machine measured.
    against = cluster if given is not None and cluster is not None and is_first() else None

    def read() -> Plan:
        return Plan.from_bytes(plan.content, _subject(given), graph, None if against is None else _cluster(against))

    return together("plan", read)


def _subject(given: Given) -> str:
    return "plan" if given is None or isinstance(given, Plan) else str(given)


def _content(given: Given) -> bytes | None:
    if given is None or isinstance(given, Plan):
        return given.content if given is not None else None
    try:
        return Path(given).read_bytes()
    except OSError as error:
        raise PlanError(str(given), f"cannot be read: {error.strerror or error}", "Is it the right path?") from None


def _cluster(cluster: Where) -> Cluster:
    if isinstance(cluster, Cluster):
        return cluster
    name = "local" if cluster is None else cluster
    return Cluster.load(name if isinstance(name, str) else Path(name), devices=num_processes())
