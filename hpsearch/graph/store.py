"""Captured graphs on disk: a config is captured once, and planned again without torch or transformers.

A file is named by a digest of all that the graph depends on: the config's contents, the sequence length, the recipe,
the versions of torch, transformers and hpsearch, and the source of the rooms that capture. It holds the graph as JSON,
with a digest of its own; a file that does not match is no file.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from hpsearch.errors import CaptureError
from hpsearch.files import atomic_write
from hpsearch.graph.model_graph import Call, Input, ModelGraph, Op, OpGraph, Param, Targets, Value

CAPTURING = ("capture", "graph")
"""Rooms whose source decides what a captured graph looks like."""


def read_config(config: str | Path | Mapping[str, Any]) -> dict[str, Any]:
    """The contents of a Hugging Face config. Raises CaptureError for a file that is not a JSON object."""
    if isinstance(config, Mapping):
        return dict(config)
    remedy = "Pass a Hugging Face config.json."
    try:
        contents = json.loads(Path(config).read_text(encoding="utf-8"))
    except OSError as error:
        raise CaptureError(f"config {config}", f"cannot be read: {error.strerror}", "Check the path.") from error
    except ValueError as error:
        raise CaptureError(f"config {config}", f"expected JSON, but {error}", remedy) from error
    if not isinstance(contents, dict):
        raise CaptureError(f"config {config}", f"expected a JSON object, but found {type(contents).__name__}", remedy)
    return contents


def config_key(contents: Mapping[str, Any], seq_len: int, recipe: str) -> str:
    """The name under which the graph of this config is kept, whatever the batch."""
    parts = [json.dumps(contents, sort_keys=True), str(seq_len), recipe, _source_digest()]
    parts += [f"{name} {_version(name)}" for name in ("torch", "transformers", "hpsearch")]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:32]


def _version(distribution: str) -> str:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return "none"


def _source_digest() -> str:
    package = Path(__file__).parent.parent
    digest = hashlib.sha256()
    for room in CAPTURING:
        for path in sorted((package / room).glob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()


def graph_folder() -> Path:
    """$HPSEARCH_CACHE/graphs, else ~/.cache/hpsearch/graphs."""
    root = os.environ.get("HPSEARCH_CACHE")
    return (Path(root) if root else Path.home() / ".cache" / "hpsearch") / "graphs"


def load_graph(key: str) -> ModelGraph | None:
    """The graph kept under `key`; None where there is none, or only a damaged one."""
    try:
        digest, _, text = (graph_folder() / f"{key}.json").read_text(encoding="utf-8").partition("\n")
    except (OSError, UnicodeDecodeError):
        return None
    return graph_from_json(text) if digest == _digest(text) else None


def save_graph(key: str, graph: ModelGraph) -> None:
    """Keeps `graph` under `key`. A folder that cannot be written to keeps nothing."""
    text = graph_to_json(graph)
    try:
        graph_folder().mkdir(parents=True, exist_ok=True)
        atomic_write(graph_folder() / f"{key}.json", f"{_digest(text)}\n{text}".encode())
    except OSError:
        return


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def graph_to_json(graph: ModelGraph) -> str:
    """One line of JSON; equal graphs give equal text."""
    tree = asdict(graph)
    for piece, source in ((tree["outer"], graph.outer), *((tree["blocks"][n], b) for n, b in graph.blocks.items())):
        piece["steps"] = [[type(step).__name__, asdict(step)] for step in source.steps]
    return json.dumps(tree)


def graph_from_json(text: str) -> ModelGraph:
    """The graph that `graph_to_json` wrote."""
    tree = _frozen(json.loads(text))
    tree["outer"] = _piece(tree["outer"])
    tree["blocks"] = {name: _piece(piece) for name, piece in tree["blocks"].items()}
    tree["params"] = {fqn: Param(**param) for fqn, param in tree["params"].items()}
    tree["inputs"] = tuple(Input(**leaf) for leaf in tree["inputs"])
    tree["targets"] = Targets(**tree["targets"]) if tree["targets"] else None
    return ModelGraph(**tree)


def _piece(tree: dict[str, Any]) -> OpGraph:
    tree["values"] = {name: Value(**value) for name, value in tree["values"].items()}
    kinds = {"Op": Op, "Call": Call}
    tree["steps"] = tuple(kinds[kind](**step) for kind, step in tree["steps"])
    return OpGraph(**tree)


def _frozen(tree: Any) -> Any:
    """Lists become tuples, at every depth."""
    if isinstance(tree, list):
        return tuple(_frozen(item) for item in tree)
    if isinstance(tree, dict):
        return {key: _frozen(item) for key, item in tree.items()}
    return tree
