"""`Plan`: the decision of a search, as a noun over the plan file (`schema.py`)."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from hpsearch.errors import PlanError, counted
from hpsearch.files import deliver
from hpsearch.graph import ModelGraph
from hpsearch.layout import Layout, Mesh, MeshAxis
from hpsearch.plan.consistency import check_consistency
from hpsearch.plan.fingerprint import check_model
from hpsearch.plan.legality import check_legality, check_total
from hpsearch.plan.own_stages import check_stages
from hpsearch.plan.patterns import matches
from hpsearch.plan.reading import read_plan
from hpsearch.plan.schema import ClusterEntry, ParamEntry, PlanFile
from hpsearch.plan.writing import write_plan

if TYPE_CHECKING:
    from hpsearch.cluster import Cluster


@dataclass(frozen=True)
class Plan:
    """How to train one model on one cluster: frozen, compares and hashes by content, prints as its explanation.

    Made by the search or by `Plan.load`. A plan may be edited by hand in its file, as long as it stays consistent; its
    predicted numbers and certificate are then those of the original, and `is_edited` says so.
    """

    file: PlanFile

    def __post_init__(self) -> None:
        if not self.file.predicted.priced:
            object.__setattr__(self, "file", _sealed(self.file, file_digest(self.file)))

    def __hash__(self) -> int:
        return hash(self.digest)

    @cached_property
    def content(self) -> bytes:
        """The canonical bytes: what `save` writes and rank 0 broadcasts."""
        return write_plan(self.file)

    @cached_property
    def digest(self) -> str:
        """sha256 of the canonical bytes, in hex; ranks compare it before their first collective."""
        return hashlib.sha256(self.content).hexdigest()

    @cached_property
    def mesh(self) -> Mesh:
        return Mesh(
            tuple(
                MeshAxis(a.name, a.size, a.stride, a.tier, a.exchange or "", a.order or "", a.hops or ())
                for a in self.file.mesh
            )
        )

    @property
    def pipeline_ranks(self) -> int:
        """Degree of pipelining; each pipeline rank is a whole mesh."""
        return self.file.pipeline.ranks if self.file.pipeline else 1

    @property
    def num_ranks(self) -> int:
        """Devices of the plan."""
        return self.pipeline_ranks * self.mesh.num_ranks

    @property
    def layout_text(self) -> str:
        """`pp=2 x dp_shard=4`; the mesh alone without a pipeline."""
        if self.file.pipeline is None:
            return str(self.mesh)
        return f"pp={self.pipeline_ranks}" + (f" x {self.mesh}" if self.mesh.axes else "")

    @property
    def micro_batch_rows(self) -> int:
        """Rows of one micro-batch over all ranks."""
        return self.file.job.global_batch // self.file.job.micro_batches

    @cached_property
    def is_edited(self) -> bool:
        """Whether anything in the file differs from what the search wrote."""
        return self.file.predicted.priced != file_digest(self.file)

    def with_source(self, source: str) -> Plan:
        """The same plan, saying that `source` is what the model was given as; not an edit, unless it was one before."""
        file = self.file.model_copy(update={"model": self.file.model.model_copy(update={"source": source})})
        return Plan(file if self.is_edited else _sealed(file, ""))

    def parameter(self, fqn: str) -> ParamEntry:
        """The entry that decides about the parameter `fqn` (a name, or a pattern as in the file).

        Raises PlanError with the nearest names when no parameter is called so.
        """
        found = [p for p in self.file.parameters if any(fqn == n or matches(n, fqn) for n in (p.pattern, *p.aliases))]
        if found:
            return found[0]
        last = fqn.rpartition(".")[2]
        near = [p.pattern for p in self.file.parameters if p.pattern.endswith(last)] or [
            p.pattern for p in self.file.parameters
        ]
        listed = ", ".join(near[:5]) + (", …" if len(near) > 5 else "")
        problem = f"the plan has no such parameter among its {len(self.file.parameters)} entries"
        raise PlanError(f"parameter {fqn}", problem, f"Did you mean one of: {listed}?")

    def stored(self, fqn: str) -> Layout:
        return Layout.parse(self.parameter(fqn).stored)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the canonical bytes to `path`, all or nothing. Raises PlanError when the file cannot be written."""
        deliver(path, self.content)

    @staticmethod
    def load(path: str | os.PathLike[str], model: ModelGraph | None = None, cluster: Cluster | None = None) -> Plan:
        """The plan in the file at `path`, checked for form and sense, and against `model` and `cluster` when given.

        Raises PlanError with the first difference.
        """
        try:
            content = Path(path).read_bytes()
        except OSError as error:
            raise PlanError(str(path), f"cannot be read: {error.strerror or error}", "Is it the right path?") from None
        return Plan.from_bytes(content, str(path), model, cluster)

    @staticmethod
    def from_bytes(
        content: bytes, subject: str = "plan", model: ModelGraph | None = None, cluster: Cluster | None = None
    ) -> Plan:
        """As `load`, from bytes; `subject` names them in messages."""
        file = read_plan(content, subject)
        check_legality(file, subject)
        if model is not None:
            check_model(file, model, subject)
            check_consistency(file, model, subject)
        else:
            check_total(file, subject)
            check_stages(file, subject)
        if cluster is not None:
            check_cluster(file, cluster, subject)
        return Plan(file)

    def __str__(self) -> str:
        job, predicted = self.file.job, self.file.predicted
        edited = " (edited by hand: the prediction and certificate are of the original)" if self.is_edited else ""
        parts = f"{counted(job.micro_batches, 'micro-batch')} of {counted(self.micro_batch_rows, 'row')}"
        return (
            f"{self.file.model.name} on {counted(self.file.cluster.devices, 'device')} of {self.file.cluster.name}: "
            f"{self.layout_text}, {parts}, "
            f"predicted step {predicted.step_s:.4g} s, {predicted.peak_bytes / 2**30:.3g} GiB a device{edited}"
        )


def file_digest(file: PlanFile) -> str:
    """sha256 over the canonical bytes of the file with an empty seal (`predicted.priced`)."""
    return hashlib.sha256(write_plan(_sealed(file, ""))).hexdigest()


def _sealed(file: PlanFile, seal: str) -> PlanFile:
    return file.model_copy(update={"predicted": file.predicted.model_copy(update={"priced": seal})})


def check_cluster(file: PlanFile, cluster: Cluster, subject: str) -> None:
    """Refuses a cluster other than the plan's, listing every field that differs."""
    then, now = file.cluster, cluster_entry(cluster)
    if then == now:
        return
    differing = [
        f"{name} is {getattr(then, name)!r} in the plan and {getattr(now, name)!r} here"
        for name in type(then).model_fields
        if getattr(then, name) != getattr(now, name)
    ]
    remedy = "Search again for this cluster with `hpsearch plan`, or load the cluster that the plan was made for."
    raise PlanError(subject, f"made for another cluster: {'; '.join(differing)}", remedy)


def cluster_entry(cluster: Cluster) -> ClusterEntry:
    """What a plan states about its cluster."""
    return ClusterEntry(
        name=cluster.name,
        digest=cluster.digest,
        devices=cluster.devices,
        device=cluster.device.name,
        memory_bytes=cluster.device.memory_bytes,
    )
