"""`capture_config`: from a Hugging Face `config.json` to a captured graph; no weights, no network."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hpsearch.capture import settings
from hpsearch.capture.captured import CapturedGraph, capture
from hpsearch.capture.twin import COMPUTE_DTYPE
from hpsearch.errors import CaptureError
from hpsearch.graph.store import config_key, read_config, save_graph

POSITION_TABLES = {"gpt2": "n_positions", "whisper": "max_target_positions", "opt": "max_position_embeddings"}
"""Config field that bounds the sequence, for model types with a table of positions."""

ROWS = 2
"""Rows of the batch that a config is captured with; sizes at other rows follow from it."""


def capture_config(
    config: str | Path | Mapping[str, Any], *, rows: int = ROWS, seq_len: int, recipe: str = "bf16"
) -> CapturedGraph:
    """Captures the class that `architectures[0]` names, on a batch made up from what its forward takes.

    config: path of a `config.json`, or its contents. rows: sequences (or images) of a batch. seq_len: tokens of each.
    The graph of the default rows is kept for `hpsearch.graph.store.load_graph`: what is planned does not depend on
    which rows were asked for last. Raises CaptureError, in one line, for a config that transformers does not know.
    """
    contents = read_config(config)
    model = model_of(deepcopy(contents))  # config classes write into nested dicts they are given
    batch = batch_for(model, rows, seq_len, COMPUTE_DTYPE.get(recipe, torch.float32))
    captured = capture(model, batch, recipe=recipe)
    graph = replace(captured.graph, assumed=settings.assumed(contents, model.config))
    captured = replace(captured, graph=graph)
    if rows == ROWS:
        save_graph(config_key(contents, seq_len, recipe), captured.graph)
    return captured


def model_of(contents: Mapping[str, Any]) -> nn.Module:
    """The model on the meta device, in training mode. Raises CaptureError for an unknown class or a wrong config."""
    try:
        import transformers
    except ImportError as error:
        raise CaptureError(
            "config", "needs transformers, which is not installed", 'pip install "hpsearch[hf]"'
        ) from error
    name = settings.architecture(contents)
    settings.check_sizes(contents)
    kind = getattr(transformers, name, None)
    if kind is None or getattr(kind, "config_class", None) is None:
        version = transformers.__version__
        raise CaptureError(
            f"architecture {name}", f"transformers {version} has no such model class", "Use a class it knows."
        )
    with torch.device("meta"):
        return settings.build(kind, contents).train()


def batch_for(model: Any, rows: int, seq_len: int, compute: torch.dtype) -> dict[str, torch.Tensor]:
    """Meta tensors for a training step: tokens and labels, or images or sound and labels."""
    takes = inspect.signature(model.forward).parameters
    config = model.config
    table = POSITION_TABLES.get(config.model_type)
    if table is not None and seq_len > getattr(config, table):
        raise CaptureError(
            f"sequence length {seq_len}",
            f"expected at most {table} = {getattr(config, table)} of {type(model).__name__}",
            "Choose a shorter sequence.",
        )
    if "labels" not in takes:
        raise CaptureError(
            f"architecture {type(model).__name__}",
            "expected a class with a loss, but its forward takes no labels",
            "Name the class with a head in `architectures`, or call capture with a loss function.",
        )
    tokens = torch.empty(rows, seq_len, dtype=torch.int64, device="meta")
    if "input_ids" in takes:
        return {"input_ids": tokens, "labels": tokens}
    if "input_features" in takes:
        frames = 2 * config.max_source_positions
        sound = torch.empty(rows, config.num_mel_bins, frames, dtype=compute, device="meta")
        return {"input_features": sound, "labels": tokens}
    if "pixel_values" in takes:
        size = getattr(config, "image_size", None)
        if size is None:
            raise CaptureError(
                f"architecture {type(model).__name__}", "expected image_size in the config, but it has none",
                "Call capture with the module and a batch.",
            )  # fmt: skip
        height, width = size if isinstance(size, (list, tuple)) else (size, size)
        images = torch.empty(rows, config.num_channels, height, width, dtype=compute, device="meta")
        return {"pixel_values": images, "labels": torch.empty(rows, dtype=torch.int64, device="meta")}
    raise CaptureError(
        f"architecture {type(model).__name__}",
        f"expected input_ids, input_features or pixel_values, but forward takes {', '.join(takes)}",
        "Call capture with the module and a batch.",
    )
