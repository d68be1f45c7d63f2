"""A Hugging Face checkpoint directory straight into shards: each rank reads only the slices it stores."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from torch import nn

from hpsearch.errors import CheckpointError
from hpsearch.run.safetensors import Entry, entries


def match(
    model: nn.Module, folder: Path, wanted: Mapping[str, tuple[tuple[int, ...], tuple[str, ...]]]
) -> dict[str, Entry]:
    """For each wanted FQN (with its shape and its aliases) the tensor on disk that holds it.

    A checkpoint of the base model (without its head's prefix) matches as well, as Hugging Face writes both. Names that
    the model class declares ignorable are ignored. Raises CheckpointError listing what is missing, unexpected or of
    another shape.
    """
    disk = _prefixed(entries(folder), getattr(model, "base_model_prefix", ""), set(wanted))
    found: dict[str, Entry] = {}
    missing, reshaped, used = [], [], set()
    for fqn, (shape, aliases) in wanted.items():
        names = [name for name in (fqn, *aliases) if name in disk]
        used.update(names)
        if not names:
            missing.append(fqn)
        elif disk[names[0]].shape != shape:
            reshaped.append(f"{fqn} {list(disk[names[0]].shape)} for {list(shape)}")
        else:
            found[fqn] = disk[names[0]]
    missing = _kept(missing, getattr(model, "_keys_to_ignore_on_load_missing", None))
    unexpected = _kept([n for n in disk if n not in used], getattr(model, "_keys_to_ignore_on_load_unexpected", None))
    unexpected = [n for n in unexpected if n not in dict(model.named_buffers())]
    problems = [
        f"{len(names)} {kind}: {', '.join(names[:5])}{', …' if len(names) > 5 else ''}"
        for kind, names in (("missing", missing), ("unexpected", unexpected), ("of another shape", reshaped))
        if names
    ]
    if problems:
        raise CheckpointError(
            str(folder), f"does not fit {type(model).__name__}; {'; '.join(problems)}", "Check the config."
        )
    return found


def _kept(names: list[str], ignored: Iterable[str] | None) -> list[str]:
    patterns = [re.compile(p) for p in ignored or ()]
    return [name for name in names if not any(p.search(name) for p in patterns)]


def _prefixed(disk: dict[str, Entry], prefix: str, wanted: set[str]) -> dict[str, Entry]:
    """Names as the model has them: the base model's prefix added or taken away where only that makes them match."""
    head = f"{prefix}."
    if not prefix:
        return disk
    found = {}
    for name, entry in disk.items():
        if name not in wanted and head + name in wanted:
            name = head + name
        elif name not in wanted and name.removeprefix(head) in wanted:
            name = name.removeprefix(head)
        found[name] = entry
    return found
