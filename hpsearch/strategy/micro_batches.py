"""Which losses may be cut into micro-batches."""

from __future__ import annotations

from hpsearch.errors import LegalityError

WHY_WHOLE = (
    "its loss is not proved to be a mean or a sum over equal micro-batches (it divides by something made of data, or "
    "mixes rows before it sums)"
)


def check_micro_batches(name: str, loss_reduction: str, count: int) -> None:
    """Raises LegalityError where more than one micro-batch would give another loss than the whole batch does."""
    if loss_reduction == "whole" and count > 1:
        raise LegalityError(
            f"micro_batches={count}",
            f"expected 1 for {name}, because {WHY_WHOLE}, but found {count}",
            "Leave micro_batches at 1; or put num_items_in_batch, counted over the global batch, into the batch and "
            "divide the loss's sum by it.",
        )
