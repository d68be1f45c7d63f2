"""The answer to a job of several models as a file: canonical JSON that is reviewed and compared.

The bytes depend on the question and the answer alone: no time, no path, no machine that searched.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hpsearch.aim.module import Job, Module
from hpsearch.aim.together import Together
from hpsearch.cluster import Cluster
from hpsearch.estimate import ParallelLayout
from hpsearch.files import deliver

SCHEMA = 1


def content(job: Job, cluster: Cluster, found: Together) -> bytes:
    """Question, split, layouts, tasks and proof; sorted names, two spaces, a line break at the end."""
    told = {
        "schema_version": SCHEMA,
        "question": {
            "cluster": cluster.name, "cluster_digest": cluster.digest, "devices": cluster.devices,
            "modules": [_module(one) for one in job.modules],
        },
        "split": [{"devices": count, "modules": list(names)} for count, names in found.split],
        "parts": found.chunks,
        "layouts": {one.module: _layout(one.layout) for one in found.placed},
        "peak_bytes": {one.module: one.peak_bytes for one in found.placed},
        "step_s": found.step_s,
        "tasks": [asdict(one) for one in found.tasks],
        "certificate": {
            "bound_s": found.bound_s, "gap": found.gap, "sizes": list(found.sizes), "considered": found.considered,
            "solved": found.solved, "searched": found.searched,
        },
    }  # fmt: skip
    return (json.dumps(told, indent=2, sort_keys=True) + "\n").encode()


def save(job: Job, cluster: Cluster, found: Together, path: Path) -> None:
    """All or nothing. PlanError: it cannot be written."""
    deliver(path, content(job, cluster, found))


def _module(one: Module) -> dict[str, Any]:
    return {
        "name": one.name, "model": one.shape.name, "parameters": one.shape.total_params,
        "global_batch": one.base.global_batch, "seq_len": one.base.seq_len, "trains": one.trains, "runs": one.runs,
        "takes": list(one.takes), "after": list(one.after), "pins": {k: list(v) for k, v in sorted(one.pins.items())},
    }  # fmt: skip


def _layout(layout: ParallelLayout) -> dict[str, Any]:
    return {n: sorted(v) if isinstance(v, frozenset) else v for n, v in asdict(layout).items()}
