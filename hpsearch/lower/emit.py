"""Pieces as Python source. What is printed is what runs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from hpsearch.lower.parameters import ParamUse
from hpsearch.lower.partition import Part
from hpsearch.lower.statement import Statement

HEADER = '''"""The parallel program of {model} on {mesh}, the same text on every rank.

A rank brings `groups` (axis -> process group name), `coordinate` (axis -> its place), `device`, `extent` and `draws`.
"""

import torch

from hpsearch.capture.ops import einsum
from hpsearch.lower.attention import attention, attention_backward
from hpsearch.lower.context import Context
from hpsearch.lower.context_gathered import gathered_attention, gathered_attention_backward
from hpsearch.lower.context_ring import ring_attention, ring_attention_backward
from hpsearch.lower.context_ulysses import ulysses_attention, ulysses_attention_backward
from hpsearch.lower.dropout import dropout
from hpsearch.lower.experts import combine, combine_backward, dispatch, dispatch_backward, route
from hpsearch.lower.local_ops import cut, cut_rows, join, join_rows, mask, pad, split, split_rows, trim
from hpsearch.lower.padded import combine_backward_padded, combine_padded, dispatch_backward_padded, dispatch_padded
from hpsearch.lower.padded import grouped_add_padded, grouped_mm_padded, grouped_mm_weight_padded, grouped_sum_padded
from hpsearch.lower.padded import route_padded
from hpsearch.lower.scaled import amax, scaled_einsum

c10d = torch.ops._c10d_functional'''


def emit_rounds(piece: str, verb: str, uses: Sequence[ParamUse]) -> tuple[tuple[str, ...], str]:
    """Functions `<piece>_<verb>_issue`, `…_next<n>`, `…_wait`, one for each round: (their names, their source).

    Each takes and returns {parameter: tensor}; parameters that are not in the argument are left alone.
    """
    rounds = {use.local: use.gather if verb == "gather" else use.reduce for use in uses}
    count = max((len(r) for r in rounds.values()), default=0)
    names = tuple(f"{piece}_{verb}_{_stage(i, count)}" for i in range(count))
    lines: list[str] = []
    for index, name in enumerate(names):
        lines += ["", "", f"def {name}(given):", "    made = dict(given)"]
        for use in uses:
            own = rounds[use.local]
            if index < len(own):
                lines += _round(use, own[index], index)
        lines.append("    return made")
    return names, "\n".join(lines)


def _stage(index: int, count: int) -> str:
    if index == 0:
        return "issue"
    return "wait" if index == count - 1 else f"next{index}"


def _round(use: ParamUse, statements: Sequence[Statement], index: int) -> Iterable[str]:
    yield f'    if "{use.local}" in given:'
    yield f'        {statements[0].reads[0]} = given["{use.local}"]'
    for statement in statements:
        yield from _with_comment(f"        {statement.text}", statement.comment)
    yield f'        made["{use.local}"] = {statements[-1].writes[0]}'


def emit_part(
    name: str,
    part: Part,
    param_keys: dict[str, str],
    buffer_keys: dict[str, str],
    takes: dict[str, Sequence[str]],
    gives: str,
) -> str:
    """One function `name(params, buffers, *takes)`: each list of `takes` is unpacked and emptied, so that a tensor dies
    at its last reader. `gives` is the expression returned; it names everything in `part.writes`."""
    lines = ["", "", f"def {name}({', '.join(['params', 'buffers', *takes])}):"]
    for holder, names in takes.items():
        if names:
            lines += [f"    {', '.join(names)}{',' if len(names) == 1 else ''} = {holder}", f"    {holder}.clear()"]
    lines += [f'    {n} = params["{param_keys[n]}"]' for n in part.params]
    lines += [f'    {n} = buffers["{buffer_keys[n]}"]' for n in part.buffers]
    outside = {*part.params, *part.buffers}
    for statement, dead in zip(part.statements, dead_names(part, outside), strict=True):
        text = f"    {statement.text}" + (f"; del {', '.join(dead)}" if dead else "")
        lines += _with_comment(text, statement.comment)
    lines.append(f"    return {gives}")
    return "\n".join(lines)


def dead_names(part: Part, outside: set[str]) -> list[tuple[str, ...]]:
    """For each statement the local names that nobody reads after it."""
    live = {*part.writes, *outside}
    found: list[tuple[str, ...]] = []
    for statement in reversed(part.statements):
        touched = dict.fromkeys((*statement.reads, *statement.writes))
        found.append(tuple(n for n in touched if n not in live))
        live.update(statement.reads)
    return found[::-1]


def _with_comment(text: str, comment: str) -> Iterable[str]:
    if not comment:
        yield text
    elif len(text) + len(comment) < 118:
        yield f"{text}  # {comment}"
    else:
        indent = text[: len(text) - len(text.lstrip())]
        yield f"{indent}# {comment}"
        yield text


def name_list(names: Sequence[str]) -> str:
    return f"[{', '.join(names)}]"


def emit_reduce_loss(loss: str, statements: Sequence[Statement]) -> str:
    """`reduce_loss(loss)`: the sum over all ranks of what they hold of the loss."""
    lines = ["", "", f"def reduce_loss({loss}):"]
    for statement in statements:
        lines += _with_comment(f"    {statement.text}", statement.comment)
    return "\n".join([*lines, f"    return {statements[-1].writes[0] if statements else loss}"])
