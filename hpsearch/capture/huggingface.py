"""Everything that knows Hugging Face transformers. The library is optional: nothing here imports it by itself."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from hpsearch.capture.batch import Batch

LIMITS = (
    "num_attention_heads", "num_key_value_heads", "vocab_size", "hidden_size", "intermediate_size", "n_head",
    "num_heads", "n_embd", "n_inner", "d_model", "d_ff", "d_kv", "encoder_attention_heads", "decoder_attention_heads",
    "encoder_ffn_dim", "decoder_ffn_dim", "num_experts", "num_local_experts", "n_routed_experts", "num_labels",
    "moe_intermediate_size", "head_dim", "num_hidden_layers",
)  # fmt: skip
"""Config fields that bound a degree."""
NESTED = ("text_config", "vision_config", "audio_config", "encoder", "decoder")


def limits(model: nn.Module) -> dict[str, int]:
    """The config's bounds; those of nested configs as `text_config.num_attention_heads`. Empty without a config."""
    config = getattr(model, "config", None)
    return {} if config is None else _limits(config, "")


def _limits(config: Any, prefix: str) -> dict[str, int]:
    found = {}
    for name in LIMITS:
        value = getattr(config, name, None)
        if isinstance(value, int) and not isinstance(value, bool):
            found[prefix + name] = value
    for name in NESTED:
        inner = getattr(config, name, None)
        if inner is not None and hasattr(inner, "to_dict"):
            found |= _limits(inner, f"{prefix}{name}.")
    return found


def _configs(config: Any) -> Iterator[Any]:
    if config is not None and hasattr(config, "to_dict"):
        yield config
        for name in NESTED:
            yield from _configs(getattr(config, name, None))


@contextmanager
def tracing(twin: nn.Module, batch: Batch) -> Iterator[None]:
    """While open, transformers builds masks without looking at values, and no caches.

    It looks at the values of position ids to see whether sequences are packed, and at those of a padding mask to see
    whether anything is masked. A trace has no values. Sequences count as packed only when the batch brings position
    ids; otherwise there would be an explicit mask of sequence x sequence where the model runs causal attention without
    one. A padding mask counts as masking something, which is right whatever is in it.
    """
    for module in twin.modules():
        for config in _configs(getattr(module, "config", None)):
            if getattr(config, "use_cache", False):
                config.use_cache = False
    with _sorted_sets(twin), _masks_without_values(batch):
        yield


class _SortedSet(set):  # type: ignore[type-arg]
    """A set that is walked in sorted order."""

    def __iter__(self) -> Iterator[Any]:
        return iter(sorted(super().__iter__(), key=str))


@contextmanager
def _sorted_sets(twin: nn.Module) -> Iterator[None]:
    """While open, `for layer_type in set(config.layer_types)`, as 51 models have it, runs in the same order everywhere.

    Python's own order of strings in a set differs from process to process, and with it the trace and the plan.
    """
    names = sorted({type(module).__module__ for module in twin.modules()})
    sources = [sys.modules[name] for name in names if name.startswith("transformers.")]
    own = [source for source in sources if "set" not in vars(source)]
    for source in own:
        source.set = _SortedSet  # type: ignore[attr-defined]
    try:
        yield
    finally:
        for source in own:
            del source.set  # type: ignore[attr-defined]


@contextmanager
def _masks_without_values(batch: Batch) -> Iterator[None]:
    """No mask is left out because a look at its values says that nothing is masked: a trace has no values."""
    masking = sys.modules.get("transformers.masking_utils")
    if masking is None:
        yield
        return
    changed: dict[str, Any] = {"fast_all": lambda _mask: False}
    if not any(leaf.name.rpartition(".")[2] == "position_ids" for leaf in batch.leaves):
        changed["find_packed_sequence_indices"] = lambda *_args, **_kwargs: None
    original = {name: getattr(masking, name) for name in changed}
    for name, value in changed.items():
        setattr(masking, name, value)
    try:
        yield
    finally:
        for name, value in original.items():
            setattr(masking, name, value)
