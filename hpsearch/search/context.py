"""Context parallelism among the meshes: which ways of attention over a cut sequence a model and a mesh have."""

from __future__ import annotations

from dataclasses import replace

from hpsearch.errors import LegalityError
from hpsearch.graph import ModelGraph
from hpsearch.layout import EXCHANGES, HEAD_TAIL, Mesh
from hpsearch.search.fix import Fix
from hpsearch.strategy import head_repeats, is_attention, sequence_lengths


def with_exchanges(mesh: Mesh, model: ModelGraph, fix: Fix) -> list[Mesh]:
    """The mesh once for each way of attention along its axis cp; the mesh alone without one.

    Pieces of sequences are head-tail where attention looks back only and the lengths allow it, so that work is equal.
    Raises LegalityError for sequences or heads that cannot be divided as pinned.
    """
    ranks = mesh.size("cp")
    if ranks == 1:
        return [mesh]
    length = max(sequence_lengths(model), default=0)
    if length == 0 or length % ranks:
        found = f"{length} % {ranks} = {length % ranks}" if length else "the batch has no sequences"
        raise LegalityError(
            f"fix cp={ranks}", f"expected a sequence length that cp divides, but {found}", "Choose another degree."
        )
    causal = any(graph.causal for graph, _ in model.pieces())
    found_meshes = []
    fused = any(is_attention(op) for graph, _ in model.pieces() for op in graph.ops)
    if not fused and fix.cp_kind not in (None, "gathered"):
        problem = f"expected a fused attention to pass blocks through, but {model.name} has none"
        raise LegalityError(f"fix cp_kind={fix.cp_kind}", problem, "Choose gathered.")
    kinds = EXCHANGES if fused else ("gathered",)
    for kind in kinds if fix.cp_kind is None else (fix.cp_kind,):
        why = _odd_heads(model, mesh) if kind == "ulysses" else ""
        if why and fix.cp_kind:
            raise LegalityError(f"fix cp_kind={kind}", why, "Choose gathered or ring, or another degree.")
        balanced = causal and kind != "ulysses" and length % (2 * ranks) == 0
        order = HEAD_TAIL if balanced else ""
        if not why:
            axes = (replace(a, exchange=kind, order=order) if a.name == "cp" else a for a in mesh.axes)
            found_meshes.append(Mesh(tuple(axes)))
    return found_meshes


def _odd_heads(model: ModelGraph, mesh: Mesh) -> str:
    """Why heads cannot be exchanged for positions; empty where they can."""
    ranks, tp = mesh.size("cp"), mesh.size("tp")
    for graph, _ in model.pieces():
        for op in graph.ops:
            if is_attention(op) and op.phase == "forward":
                queries, keys = (graph.values[name].fixed[1] // tp for name in op.inputs[:2])
                if head_repeats(queries, keys, ranks) is None:
                    return (
                        f"expected heads that {ranks} ranks can share, but each has {queries} of queries and {keys} of "
                        f"keys ({op.source or op.name})"
                    )
    return ""
