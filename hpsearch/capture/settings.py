"""A Hugging Face config as its class reads it: what it contradicts is refused, what it leaves out is told."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, TypeGuard

from torch import nn

from hpsearch.capture.huggingface import LIMITS, NESTED
from hpsearch.errors import CaptureError

LAYERS = (
    "n_layer", "n_layers", "num_layers", "num_decoder_layers", "encoder_layers", "decoder_layers", "depth",
)  # fmt: skip
EXTENTS = (
    "n_positions", "max_position_embeddings", "max_source_positions", "max_target_positions", "image_size",
    "patch_size", "num_channels", "num_mel_bins",
)  # fmt: skip
OPTIONAL = ("num_experts", "num_local_experts", "n_routed_experts", "moe_intermediate_size", "n_inner")
"""Sizes of parts that a class may leave out, which some configs write as 0."""


def architecture(contents: Mapping[str, Any]) -> str:
    """The class that a config names first. Raises CaptureError where `architectures` is no list of names."""
    names = contents.get("architectures")
    if names is None or (isinstance(names, (list, tuple)) and not names):
        raise CaptureError("config", "expected `architectures` with a class name, but found none", "Add it.")
    if not isinstance(names, (list, tuple)) or not isinstance(names[0], str):
        remedy = 'Write for example ["LlamaForCausalLM"].'
        raise CaptureError("config", f"expected `architectures` as a list of class names, but found {names!r}", remedy)
    return names[0]


def check_sizes(contents: Mapping[str, Any]) -> None:
    """Raises CaptureError for a size that is stated and not positive; a class may build a model without it."""
    for name, least, value in _too_small(contents, ""):
        raise CaptureError("config", f"expected {name} of at least {least}, but found {value}", "Correct it.")


def _too_small(contents: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, int, int]]:
    for name in (*LIMITS, *LAYERS, *EXTENTS):
        value, least = contents.get(name), 0 if name in OPTIONAL else 1
        if _is_size(value) and value < least:
            yield prefix + name, least, value
    for name in NESTED:
        inner = contents.get(name)
        if isinstance(inner, Mapping):
            yield from _too_small(inner, f"{prefix}{name}.")


def build(kind: Any, contents: Mapping[str, Any]) -> nn.Module:
    """The model of class `kind` for the contents of a config file, on the current default device.

    Raises CaptureError where the class refuses the config, or reads another size than the file states.
    """
    from huggingface_hub.errors import StrictDataclassError

    try:
        config = kind.config_class.from_dict(dict(contents))
        for name, stated, read in _contradictions(contents, config, ""):
            raise CaptureError(
                f"config of {kind.__name__}",
                f"states {name} = {stated}, but with its other fields the class has {read}",
                "Correct the one or the others.",
            )
        model: nn.Module = kind(config)
    except (StrictDataclassError, ValueError, TypeError, KeyError, AttributeError) as error:
        said = " ".join(str(error).split()) or type(error).__name__
        raise CaptureError(
            f"config of {kind.__name__}", f"is refused by transformers: {said}", "Correct it."
        ) from error
    return model


def _contradictions(contents: Mapping[str, Any], config: Any, prefix: str) -> Iterator[tuple[str, int, int]]:
    for name in LIMITS:
        stated, read = contents.get(name), getattr(config, name, None)
        if _is_size(stated) and _is_size(read) and stated != read:
            yield prefix + name, stated, read
    for name in NESTED:
        inner, own = contents.get(name), getattr(config, name, None)
        if isinstance(inner, Mapping) and hasattr(own, "to_dict"):
            yield from _contradictions(inner, own, f"{prefix}{name}.")


def assumed(contents: Mapping[str, Any], config: Any) -> tuple[str, ...]:
    """Sizes and the rotary base that the class fills in where the file states none: `vocab_size = 262208`."""
    return tuple(_assumed(contents, config, "", dict(contents)))


def _assumed(contents: Mapping[str, Any], config: Any, prefix: str, outer: Mapping[str, Any]) -> Iterator[str]:
    own = config.to_dict()
    for name in LIMITS:
        if name in own and _is_size(own[name]) and name not in contents and name not in outer:
            if name == "head_dim" and own[name] * getattr(config, "num_attention_heads", 0) == config.hidden_size:
                continue
            yield f"{prefix}{name} = {own[name]}"
    rotary = own.get("rope_parameters")
    stated = [place.get(key) for place in (contents, outer) for key in ("rope_theta", "rope_parameters")]
    if isinstance(rotary, Mapping) and "rope_theta" in rotary and not any(_has_base(s) for s in stated):
        yield f"{prefix}rope_theta = {rotary['rope_theta']:g}"
    for name in NESTED:
        inner = getattr(config, name, None)
        if hasattr(inner, "to_dict"):
            stated_inside = contents.get(name)
            yield from _assumed(
                stated_inside if isinstance(stated_inside, Mapping) else {}, inner, f"{prefix}{name}.", contents
            )


def _has_base(stated: Any) -> bool:
    if isinstance(stated, Mapping):
        return "rope_theta" in stated or any(isinstance(v, Mapping) and "rope_theta" in v for v in stated.values())
    return stated is not None


def _is_size(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)
