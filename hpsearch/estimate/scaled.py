"""Widths that ranks have pieces of: whole blocks where a format has one scale for each, whole tiles for speed.

A cut through a block would leave a rank with half of what a scale is for.
"""

from __future__ import annotations

from hpsearch.errors import LegalityError
from hpsearch.estimate.parallel import ParallelLayout
from hpsearch.estimate.shape import ModelShape, kind_of

BLOCK = {"mxfp8": 32, "nvfp4": 16}
"""Elements that share a scale, along the dim that a product sums over (OCP Microscaling Formats MX v1.0, §5.2:
https://www.opencompute.org/documents/ocp-microscaling-formats-mx-v1-0-spec-final-pdf; NVFP4:
https://docs.nvidia.com/deeplearning/transformer-engine/user-guide/examples/fp8_primer.html)."""


def block_of(precision: str) -> int:
    """Elements of a block; 1 for formats without."""
    return BLOCK.get(precision, 1)


def is_whole(size: int, degree: int, block: int) -> bool:
    """Whether `degree` ranks have whole blocks of a dim of `size` elements. One rank may have a last block that is not
    full."""
    return degree == 1 or size % (degree * block) == 0


def check_whole(axis: str, degree: int, what: str, size: int, precision: str) -> None:
    """LegalityError: a piece is no whole number of blocks; says which degrees give whole ones."""
    block = block_of(precision)
    if is_whole(size, degree, block):
        return
    blocks = size / block
    legal = [d for d in range(1, size // block + 1) if is_whole(size, d, block)] or [1]
    raise LegalityError(
        "layout", f"expected whole blocks of {block} elements on a rank, as {precision} has a scale for each, but "
        f"{what} = {size} is {blocks:g} blocks and {axis} = {degree} leaves {blocks / degree:g}",
        f"Legal degrees of {axis} in {precision}: {', '.join(map(str, legal[:12]))}{', …' if len(legal) > 12 else ''}."
        " In bf16 any divisor is.",
    )  # fmt: skip


TILE = 64
"""16-bit elements of 128 bytes, of which matrix units take whole ones
(https://docs.nvidia.com/deeplearning/performance/dl-performance-matrix-multiplication/index.html)."""


def padded_widths(shape: ModelShape, layout: ParallelLayout) -> tuple[str, ...]:
    """Pieces of cut widths that are no multiple of TILE, each in words: legal, but partly multiplied for nothing."""
    found = []
    for name in shape.counts:
        own, kind = shape.of(name), kind_of(name)
        axis, degree = ("etp", layout.etp) if kind == "moe" else ("tp", layout.tp)
        what, size = {"mlp": ("feed-forward width", own.ffn), "moe": ("expert width", own.moe_ffn)}.get(kind, ("", 0))
        if degree > 1 and (size // degree) % TILE:
            found.append(f"{axis}={degree} leaves {size // degree} of {what} {size}, no multiple of {TILE}")
    return tuple(dict.fromkeys(found))
