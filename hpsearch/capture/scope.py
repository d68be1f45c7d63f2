"""Where in the user's model an op came from: module path and `file.py:line`, written to `node.meta["custom"]`."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.fx import traceback as fx_traceback
from torch.overrides import TorchFunctionMode

from hpsearch.errors import CaptureError

_OURS = (os.path.dirname(torch.__file__) + os.sep, os.path.dirname(__file__) + os.sep)
"""Folders whose frames are not the user's."""


class _Lines(TorchFunctionMode):
    """Notes the user's line at every torch function that Python calls."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        frame: Any = sys._getframe(1)
        while frame is not None and frame.f_code.co_filename.startswith(_OURS):
            frame = frame.f_back
        if frame is not None:
            _note("source", f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}")
        return func(*args, **(kwargs or {}))


def _note(key: str, value: str) -> None:
    """A new dict each time: nodes keep shallow copies of `current_meta`."""
    meta = fx_traceback.current_meta
    meta["custom"] = {**meta.get("custom", {}), key: value}


@contextmanager
def recording(model: nn.Module) -> Iterator[None]:
    """While open, ops traced from `model` carry its module paths and lines."""
    path: list[str] = []

    def enter(name: str) -> None:
        path.append(name)
        _note("scope", name)

    def leave() -> None:
        path.pop()
        _note("scope", path[-1] if path else "")

    handles = []
    for name, module in model.named_modules():
        handles += [
            module.register_forward_pre_hook(lambda *_, name=name: enter(name)),
            module.register_forward_hook(lambda *_: leave()),
        ]
    saved = fx_traceback.current_meta.pop("custom", None)
    try:
        with _Lines():
            yield
    finally:
        fx_traceback.current_meta.pop("custom", None)
        if saved is not None:
            fx_traceback.current_meta["custom"] = saved
        for handle in handles:
            handle.remove()


@contextmanager
def one_graph() -> Iterator[None]:
    """While open, a look at tensor values becomes a CaptureError that names the user's line."""
    try:
        yield
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(_OURS)]
        place = f"{frames[-1].filename}:{frames[-1].lineno}" if frames else "model"
        code = f" (`{frames[-1].line}`)" if frames else ""
        raise CaptureError(
            place,
            f"expected one graph for every batch, but {error.func} makes Python depend on the values of a tensor{code}",
            "Write it with tensor operations, such as torch.where.",
        ) from error


def scope_and_source(graph: fx.Graph) -> dict[str, tuple[str, str]]:
    """(module path, line) by node name; a backward node has those of the forward node it differentiates."""
    found: dict[str, tuple[str, str]] = {}
    forward: dict[int, tuple[str, str]] = {}
    for node in graph.nodes:
        number = node.meta.get("seq_nr", -1)
        if node.meta.get("autograd_backward"):
            found[node.name] = forward.get(number, ("", ""))
            continue
        custom = node.meta.get("custom", {})
        found[node.name] = (custom.get("scope", ""), custom.get("source", ""))
        if number >= 0:
            forward.setdefault(number, found[node.name])
    return found
