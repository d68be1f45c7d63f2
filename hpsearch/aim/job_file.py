"""The file of a job of several models, TOML or JSON: what each is, how much of it a step runs, what it waits for."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import ErrorDetails

from hpsearch.errors import LegalityError, PlanError


class ModuleEntry(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    model: str
    """A Hugging Face config.json, beside the job file unless the path is absolute; or module:callable."""
    global_batch: int = Field(ge=1)
    """Rows of a step."""
    seq_len: int = Field(ge=1)
    trains: bool = True
    """false: forward only (a reference, a reward model, a frozen tower)."""
    generates: bool = False
    """Token by token: has no price here, and is refused."""
    runs: int = Field(default=1, ge=1)
    """Times a step."""
    takes: tuple[str, ...] = ()
    """Names of modules whose activations it takes."""
    after: tuple[str, ...] = ()
    """Names of modules that have to be done."""
    fix: dict[str, str] = {}
    """Pinned dimensions and switches, as `--fix` of a search."""
    precision: str = "bf16"


class JobFile(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    modules: tuple[ModuleEntry, ...] = Field(min_length=1)


def load_job(path: Path) -> JobFile:
    """The job at `path`, models found from there. PlanError: not there, not TOML or JSON, a field that is none, is
    missing or has another type. LegalityError: a module that generates."""
    try:
        text = path.read_text(encoding="utf-8")
        told: Any = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
        found = JobFile.model_validate(told)
    except OSError as error:
        raise PlanError(str(path), f"cannot be read: {error.strerror or error}", "Is it the right path?") from None
    except (json.JSONDecodeError, tomllib.TOMLDecodeError) as error:
        raise PlanError(str(path), f"expected TOML (or .json), but {error}", "Correct the syntax there.") from None
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the file"
        fields = ", ".join(ModuleEntry.model_fields)
        remedy = f"Fields of a [[modules]] table: {fields}."
        raise PlanError(f"{path}, {where}", _expected(first), remedy) from None
    for one in found.modules:
        if one.generates:
            raise LegalityError(
                f"module {one.name}", "expected a module that trains or runs forward, but it generates: decoding token "
                "by token has no price here", "Leave it out, and plan the devices that generate apart.",
            )  # fmt: skip
    return JobFile(modules=tuple(_beside(one, path.parent) for one in found.modules))


def _expected(wrong: ErrorDetails) -> str:
    if wrong["type"] == "missing":
        there = ", ".join(wrong["input"]) if isinstance(wrong["input"], dict) else repr(wrong["input"])
        return f"expected a value, but there is none (found only: {there or 'nothing'})"
    if wrong["type"] == "extra_forbidden":
        return f"expected a field that there is, but found this one = {wrong['input']!r}"
    return f"{wrong['msg'].replace('Input should be', 'expected')}, but found {wrong['input']!r}"


def _beside(entry: ModuleEntry, folder: Path) -> ModuleEntry:
    path = folder / entry.model
    is_callable = ":" in entry.model and not path.exists()
    return entry if is_callable else entry.model_copy(update={"model": str(path)})
