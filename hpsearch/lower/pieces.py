"""`Piece`: what is emitted once: a block class, or a segment of the outer graph between two calls.

Its five callables are functions of the emitted program: gather (rounds), forward, backward_input, backward_weight,
reduce (rounds).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from hpsearch.lower.emit import emit_part, emit_rounds, name_list
from hpsearch.lower.local_graph import LocalGraph
from hpsearch.lower.parameters import ParamUse
from hpsearch.lower.partition import Backward, Part, Sources, make_part, needed, split_backward


@dataclass(frozen=True)
class Piece:
    name: str
    """Python name, first word of its functions' names: `LlamaDecoderLayer`, `outer_0`."""
    graph: str
    """Name of the graph it is of."""
    uses: dict[str, ParamUse]
    """Parameters it reads or makes gradients of, by their names in the graph."""
    buffers: tuple[str, ...]
    """Buffers it reads, by their names in the graph."""
    forward: Part | None
    outputs: tuple[str, ...]
    """Local names of the results of forward."""
    saved: tuple[str, ...]
    """Local names that forward keeps for backward (block) or that backward takes from earlier units (segment)."""
    backward: Backward | None
    tangents: tuple[str, ...]
    """Local names of the gradients that come in."""
    input_grads: tuple[str, ...]
    param_grads: dict[str, str]
    """Parameter's name in the graph → local name of its gradient."""
    gather: tuple[str, ...]
    """Names of the functions of the gather, in order: issue, then waits."""
    reduce: tuple[str, ...]
    code: str
    owners: tuple[str, ...] = ()
    """Of a block: for each of `saved`, the value of the graph that owns its memory."""

    def param_names(self, phase: str) -> tuple[str, ...]:
        """Parameters that a phase reads, by their names in the graph; backward's halves are input and weight."""
        parts: list[Part] = []
        if phase == "forward" and self.forward is not None:
            parts = [self.forward]
        if phase in ("backward", "input") and self.backward is not None:
            parts.append(self.backward.input)
        if phase in ("backward", "weight") and self.backward is not None:
            parts.append(self.backward.weight)
        read = {name for part in parts for name in part.params}
        return tuple(local for local, use in self.uses.items() if use.name in read)


def make_piece(
    name: str,
    local: LocalGraph,
    uses: dict[str, ParamUse],
    *,
    forward: Part | None = None,
    outputs: Sequence[str] = (),
    backward: Backward | None = None,
    tangents: Sequence[str] = (),
    input_grads: Sequence[str] = (),
    param_grads: dict[str, str] | None = None,
) -> Piece:
    """Emits the functions of a piece."""
    graph, param_grads = local.graph, param_grads or {}
    param_keys = {local.name(value): key for key, value in graph.params.items()}
    buffer_keys = {local.name(value): key for key, value in graph.buffers.items()}
    parts = [p for p in (forward, backward.input if backward else None, backward.weight if backward else None) if p]
    read = {n for p in parts for n in p.params} | {uses[key].name for key in param_grads}
    own = {key: use for key, use in uses.items() if use.name in read}
    saved = tuple(n for n in backward.input.reads if n not in tangents) if backward else ()
    gather, gather_code = emit_rounds(name, "gather", list(own.values()))
    reduce, reduce_code = emit_rounds(name, "reduce", [own[key] for key in param_grads])
    code = [gather_code]
    if forward is not None:
        gives = f"{name_list(outputs)}, {name_list(forward.writes[len(outputs) :])}"
        code.append(emit_part(f"{name}_forward", forward, param_keys, buffer_keys, {"inputs": forward.reads}, gives))
    if backward is not None:
        gives = f"{name_list(input_grads)}, {name_list(backward.kept)}"
        takes = {"saved": saved, "tangents": tangents}
        code.append(emit_part(f"{name}_backward_input", backward.input, param_keys, buffer_keys, takes, gives))
        grads = "{" + ", ".join(f'"{key}": {value}' for key, value in param_grads.items()) + "}"
        takes = {"kept": backward.kept}
        code.append(emit_part(f"{name}_backward_weight", backward.weight, param_keys, buffer_keys, takes, grads))
    code.append(reduce_code)
    buffers = tuple(dict.fromkeys(buffer_keys[n] for p in parts for n in p.buffers))
    return Piece(
        name, graph.name, own, buffers, forward, tuple(outputs), saved, backward, tuple(tangents),
        tuple(input_grads), param_grads, gather, reduce, "\n".join(c for c in code if c),
    )  # fmt: skip


def block_piece(name: str, local: LocalGraph, uses: dict[str, ParamUse]) -> Piece:
    """The piece of a block class."""
    graph = local.graph
    sources = sources_of(local)
    param_grads = {key: local.name(value) for key, value in graph.param_grads.items() if value is not None}
    input_grads = [local.name(value) for value in graph.input_grads if value is not None]
    tangents = [local.name(value) for value in graph.tangents]
    outputs = [local.name(value) for value in graph.outputs]
    inputs = [local.name(value) for value in graph.inputs]
    ahead = [s for s in local.statements if s.phase == "forward"]
    behind = [s for s in local.statements if s.phase == "backward"]
    backward = split_backward(behind, input_grads, list(param_grads.values()), sources)
    saved = [n for n in backward.input.reads if n not in tangents]
    writes = [*outputs, *saved]
    forward = make_part(needed(ahead, writes), writes, sources)
    # every input is taken, in order, also those that nobody reads
    forward = Part(forward.statements, forward.params, forward.buffers, tuple(inputs), forward.writes)
    piece = make_piece(
        name, local, uses, forward=forward, outputs=outputs, backward=backward, tangents=tangents,
        input_grads=input_grads, param_grads=param_grads,
    )  # fmt: skip
    made = {value.name: name for name, value in local.values.items()}
    return replace(piece, owners=tuple(graph.storage(made[n]) for n in piece.saved))


def sources_of(local: LocalGraph) -> Sources:
    """Who makes what in a graph, in both phases."""
    graph = local.graph
    return Sources.of(
        local.statements,
        [local.name(v) for v in graph.params.values()],
        [local.name(v) for v in graph.buffers.values()],
    )
