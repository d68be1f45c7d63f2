"""A found layout as a file: canonical JSON that is reviewed, committed, priced again and compared.

The bytes depend on the question and the answer alone: no time, no path, no machine that searched.
"""

from __future__ import annotations

import json
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

from hpsearch.errors import PlanError
from hpsearch.estimate import ParallelLayout, memory
from hpsearch.files import deliver
from hpsearch.space.best import Found
from hpsearch.space.space import Space

SCHEMA = 1


class Question(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    model: str
    parameters: int
    cluster: str
    cluster_digest: str
    devices: int
    global_batch: int
    seq_len: int
    pins: dict[str, list[Any]]


class Proof(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    space: str
    bound_s: float
    gap: float
    considered: int
    solved: int
    refused: list[tuple[str, str, int]]


class LayoutFile(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    schema_version: int
    question: Question
    layout: dict[str, Any]
    step_s: float
    peak_bytes: float
    certificate: Proof

    def read(self) -> ParallelLayout:
        """The layout, checked as any. PlanError: a field is none, is missing or has another type."""
        names = {field.name for field in fields(ParallelLayout)}
        for odd, how in ((set(self.layout) - names, "unknown"), (names - set(self.layout), "missing")):
            if odd:
                problem = f"expected its {len(names)} fields, but {sorted(odd)[0]!r} is {how}"
                raise PlanError("layout", problem, "Search again with -o: a layout file is not written by hand.")
        try:
            return TypeAdapter(ParallelLayout).validate_json(json.dumps(self.layout), strict=True)
        except ValidationError as error:
            first = error.errors()[0]
            raise PlanError(
                f"layout, {first['loc'][0]}", f"{first['msg']}, but found {first['input']!r}", "Search again with -o."
            ) from None


def layout_file(space: Space, found: Found) -> LayoutFile:
    """What was asked, the best layout, and what is proven about it."""
    layout = found.best.layout
    told = {n: sorted(v) if isinstance(v, frozenset) else v for n, v in asdict(layout).items()}
    proof = found.certificate
    return LayoutFile(
        schema_version=SCHEMA,
        question=Question(
            model=space.shape.name, parameters=space.shape.total_params, cluster=space.cluster.name,
            cluster_digest=space.cluster.digest, devices=space.devices, global_batch=space.global_batch,
            seq_len=space.base.seq_len, pins=_pins(space),
        ),
        layout=told, step_s=found.best.step_s, peak_bytes=memory(space.shape, layout).peak_bytes,
        certificate=Proof(
            space=proof.space, bound_s=proof.bound_s, gap=proof.gap, considered=proof.considered, solved=proof.solved,
            refused=list(proof.refused),
        ),
    )  # fmt: skip


def _pins(space: Space) -> dict[str, list[Any]]:
    cut = {"cut": space.cut} if space.cut else {}
    return {name: list(values) for name, values in sorted({**space.pins, **cut}.items())}


def content(file: LayoutFile) -> bytes:
    """Canonical bytes: sorted names, two spaces, a line break at the end."""
    return (json.dumps(file.model_dump(mode="json"), indent=2, sort_keys=True) + "\n").encode()


def save(file: LayoutFile, path: Path) -> None:
    """All or nothing. PlanError: it cannot be written."""
    deliver(path, content(file))


def load(path: Path) -> LayoutFile:
    """The file at `path`. PlanError: not there, not whole, another schema, or not what hpsearch writes."""
    try:
        found = LayoutFile.model_validate_json(path.read_bytes())
    except OSError as error:
        raise PlanError(str(path), f"cannot be read: {error.strerror or error}", "Is it the right path?") from None
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the file"
        raise PlanError(str(path), f"is no layout file: {where}: {first['msg']}", "Search again with -o.") from None
    if found.schema_version != SCHEMA:
        raise PlanError(
            str(path), f"expected schema {SCHEMA}, but found {found.schema_version}", "Search again with this hpsearch."
        )
    return found
