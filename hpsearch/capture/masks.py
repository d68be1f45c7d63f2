"""Which query-key pairs attention looks at: what an operator's arguments say, else what its module says of itself.

A mask is a tensor, and a captured tensor has no contents; but a causal mask halves the work of a fused kernel, and a
window may leave a small part of it. Modules that build masks say what they mean: transformers' attention modules have
`is_causal`, and `sliding_window` where they have one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import replace

from torch import fx, nn

from hpsearch.graph import ModelGraph

CAUSAL_AT = 4
"""Position of `is_causal` among the arguments of torch's fused attention operators."""


def with_masks(graph: ModelGraph, model: nn.Module, graphs: Mapping[str, fx.Graph]) -> ModelGraph:
    """`graph` with `causal` and `window` of every piece."""
    calls: defaultdict[str, list[str]] = defaultdict(list)
    for block, prefix in graph.instances:
        calls[block].append(prefix)
    blocks = {}
    for name, piece in graph.blocks.items():
        modules = [list(model.get_submodule(prefix).modules()) for prefix in calls[name]]
        windows = [max(map(_window, inside), default=0) for inside in modules]
        causal = _causal(graphs[name], modules[0])
        blocks[name] = replace(piece, causal=causal, window=max(windows), windowed=sum(map(bool, windows)))
    folded = tuple(prefix for _, prefix in graph.instances)
    around = [m for n, m in model.named_modules() if not any(n == f or n.startswith(f + ".") for f in folded)]
    return replace(graph, blocks=blocks, outer=replace(graph.outer, causal=_causal(graphs["outer"], around)))


def _causal(graph: fx.Graph, modules: Iterable[nn.Module]) -> bool:
    return any(map(_says_causal, graph.nodes)) or any(bool(getattr(m, "is_causal", False)) for m in modules)


def _says_causal(node: fx.Node) -> bool:
    if node.op != "call_function" or "scaled_dot_product" not in str(node.target):
        return False
    if "is_causal" in node.kwargs:
        return bool(node.kwargs["is_causal"])
    return len(node.args) > CAUSAL_AT and node.args[CAUSAL_AT] is True


def _window(module: nn.Module) -> int:
    """Of an attention module: its own, else the one of a config that gives all layers the same."""
    if not hasattr(module, "is_causal"):
        return 0
    config = getattr(module, "config", None)
    everywhere = None if getattr(config, "layer_types", None) else getattr(config, "sliding_window", None)
    return int(getattr(module, "sliding_window", everywhere) or 0)
