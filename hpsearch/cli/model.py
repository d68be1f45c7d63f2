"""`--model`: a Hugging Face config, or a function that builds a model. Only here do commands reach for torch."""

from __future__ import annotations

import importlib
import inspect
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer

from hpsearch.errors import CaptureError, HpsearchError
from hpsearch.graph import ModelGraph, store

CALLABLE = "a function of no argument, or of seq_len, that returns (model, batch) or (model, batch, loss)"


def load_graph(model: str, seq_len: int, recipe: str) -> ModelGraph:
    """The captured graph of what `--model` names. Raises CaptureError; wrong usage for what names nothing."""
    if ":" in model and not Path(model).exists():
        graph: ModelGraph = _of_callable(model, seq_len, recipe).graph
        return graph
    return _of_config(_config(model), seq_len, recipe)


def load_captured(model: str, seq_len: int, recipe: str, rows: int) -> Any:
    """As `load_graph`, the `CapturedGraph` at `rows` rows: what lowering needs besides a plan."""
    if ":" in model and not Path(model).exists():
        return _of_callable(model, seq_len, recipe, rows)
    from hpsearch.capture import capture_config

    return capture_config(_config(model), rows=rows, seq_len=seq_len, recipe=recipe)


def _config(model: str) -> Path:
    path = Path(model)
    if not path.is_file():
        problem = "expected a Hugging Face config.json or module:callable, but there is no such file"
        raise CaptureError(model, problem, "Is it the right path?")
    return path


def _of_config(path: Path, seq_len: int, recipe: str) -> ModelGraph:
    kept = store.load_graph(store.config_key(store.read_config(path), seq_len, recipe))
    if kept is not None:
        return kept
    from hpsearch.capture import capture_config

    graph: ModelGraph = capture_config(path, seq_len=seq_len, recipe=recipe).graph
    return graph


def _of_callable(spec: str, seq_len: int, recipe: str, rows: int | None = None) -> Any:
    """Calls it with the default device set to meta, so that a model of any size costs nothing."""
    import torch

    from hpsearch.capture import capture

    build = _find(spec)
    arguments = {"seq_len": seq_len} if "seq_len" in inspect.signature(build).parameters else {}
    with _Theirs(spec, "called"), torch.device("meta"):
        built = build(**arguments)
    if not isinstance(built, tuple) or len(built) not in (2, 3) or not isinstance(built[0], torch.nn.Module):
        raise CaptureError(spec, f"expected {CALLABLE}, but it returned {type(built).__name__}", "Return such a tuple.")
    model, batch, *loss = built
    return capture(model, batch, loss=loss[0] if loss else None, recipe=recipe, rows=rows)


@dataclass(frozen=True)
class _Theirs:
    """Around code of the user's, which may raise anything: one message, with their line and the cause chained."""

    spec: str
    done: str

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if not isinstance(error, Exception) or isinstance(error, (HpsearchError, typer.BadParameter)):
            return
        at = traceback.extract_tb(error.__traceback__)[-1]
        said = f"{type(error).__name__}: {error}".removesuffix(": ")
        problem = f"expected {CALLABLE}, but {said} ({at.filename}, line {at.lineno}) when it was {self.done}"
        remedy = "Call it under torch.device('meta') in Python to see where it fails."
        raise CaptureError(self.spec, problem, remedy) from error


def _module(name: str) -> Any:
    """Wrong usage where there is none of this name."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not name.startswith(error.name):
            raise
        raise typer.BadParameter(f"no module named {error.name}.", param_hint="--model") from None


def _find(spec: str) -> Callable[..., Any]:
    module_name, _, name = spec.partition(":")
    if not module_name or not name:
        raise typer.BadParameter(f"expected module:callable, but got {spec!r}.", param_hint="--model")
    sys.path.insert(0, str(Path.cwd()))
    try:
        with _Theirs(spec, "imported"):
            found = _module(module_name)
    finally:
        sys.path.pop(0)
    for part in name.split("."):
        if not hasattr(found, part):
            raise typer.BadParameter(f"{module_name} has no {name}.", param_hint="--model")
        found = getattr(found, part)
    if not callable(found):
        raise typer.BadParameter(f"expected {CALLABLE}, but {spec} is {type(found).__name__}.", param_hint="--model")
    build: Callable[..., Any] = found
    return build
