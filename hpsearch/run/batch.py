"""Batches: which rows are whose, what a local batch must look like, and what the ranks tell each other about it.

A batch is a mapping (keyword arguments), a tuple or list (positional arguments) or one tensor. Every rank passes the
rows of its data rank, or every rank passes the same global batch; ranks of one tp group pass equal rows. Before each
step the ranks exchange one vector of integers (`Census`), so that a bad batch is refused by all of them at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.utils import _pytree as pytree

from hpsearch.errors import BatchError
from hpsearch.graph import Targets

IGNORE_INDEX = -100
"""Label of a target that does not count, torch's default in cross_entropy and Hugging Face's everywhere."""

Batch = Any


def normal(batch: Batch, rows: int | None = None) -> Batch:
    """The batch as capture takes it: a dict of keyword arguments or a tuple of positional ones.

    Raises BatchError if it should have `rows` rows and does not.
    """
    if rows is not None and rows_of(batch) != rows:
        problem = f"expected the global batch of {rows} rows, but found {rows_of(batch)}"
        raise BatchError("first batch", problem, "Every rank passes the whole global batch first.")
    if isinstance(batch, Mapping):
        return dict(batch)
    return (batch,) if isinstance(batch, torch.Tensor) else tuple(batch)


def rows_of(batch: Batch) -> int:
    """Rows of a batch: dim 0 of its first tensor that has dims, as capture counts them."""
    found = [tensor.shape[0] for tensor in leaves(batch).values() if tensor.dim()]
    if not found:
        raise BatchError("batch", "expected at least one tensor with rows, but found none", "Pass tensors.")
    if not found[0]:
        raise BatchError("batch", "expected at least one row, but found none", "The first tensor's dim 0 is the rows.")
    return int(found[0])


def leaves(batch: Batch) -> dict[str, torch.Tensor]:
    """The tensors of a batch by capture's names: their path, `pixel.values`, or `arg0` for the first positional one."""
    found = pytree.tree_flatten_with_path(normal(batch))[0]
    return {_name(path): leaf for path, leaf in found if isinstance(leaf, torch.Tensor)}


def with_leaves(batch: Batch, changed: Mapping[str, torch.Tensor]) -> Batch:
    """The batch with other tensors at the paths of `changed`."""
    return pytree.tree_map_with_path(lambda path, leaf: changed.get(_name(path), leaf), normal(batch))


def _name(path: Any) -> str:
    text = ".".join(str(getattr(k, "key", getattr(k, "idx", getattr(k, "name", "")))) for k in path)
    return text if text[:1].isalpha() else f"arg{text}"


@dataclass(frozen=True)
class Leaf:
    """What the plan expects of one tensor of the batch."""

    name: str
    shape: tuple[int, ...]
    """Global shape for one optimizer step: all rows."""
    batch_dim: int | None
    """None for a tensor without rows, the same on every rank."""
    dtype: torch.dtype

    def local_shape(self, pieces: int) -> tuple[int, ...]:
        shape = list(self.shape)
        if self.batch_dim is not None:
            shape[self.batch_dim] //= pieces
        return tuple(shape)

    def has_rows(self, tensor: torch.Tensor, shape: tuple[int, ...]) -> bool:
        """Whether `tensor` agrees with `shape` in rank and, if the leaf has rows, in their number."""
        if tensor.dim() != len(shape):
            return False
        return tensor.shape[self.batch_dim] == shape[self.batch_dim] if self.batch_dim is not None else True

    def rows(self, tensor: torch.Tensor, index: int, pieces: int) -> torch.Tensor:
        """The `index`-th of `pieces` equal cuts of the rows."""
        if self.batch_dim is None:
            return tensor
        size = tensor.shape[self.batch_dim] // pieces
        return tensor.narrow(self.batch_dim, index * size, size)


def check(expected: Mapping[str, Leaf], found: Mapping[str, torch.Tensor], pieces: int) -> bool:
    """Whether `found` has the rows of the global batch (True) or of one data rank (False); other dims may vary.

    Raises BatchError naming the leaf, the local shape that is expected, what was found and how to cut it.
    """
    _check_names(tuple(expected), tuple(found))
    is_global = pieces > 1 and all(leaf.has_rows(found[n], leaf.shape) for n, leaf in expected.items())
    for name, leaf in expected.items():
        local = leaf.shape if is_global else leaf.local_shape(pieces)
        if not leaf.has_rows(found[name], local):
            raise wrong_shape(leaf, tuple(found[name].shape), pieces)
        is_cast = found[name].is_floating_point() and leaf.dtype.is_floating_point
        if found[name].dtype != leaf.dtype and not is_cast:
            raise BatchError(
                f"batch leaf {name}", f"expected dtype {leaf.dtype}, but found {found[name].dtype}", "Cast it."
            )
    return is_global


def _check_names(expected: tuple[str, ...], found: tuple[str, ...]) -> None:
    problems = [
        f"{', '.join(names)} {verb}"
        for names, verb in (
            ([n for n in expected if n not in found], "is missing"),
            ([n for n in found if n not in expected], "is not one of them"),
        )
        if names
    ]
    if problems:
        problem = f"expected the tensors {', '.join(expected)}, but {' and '.join(problems)}"
        raise BatchError("batch", problem, "Pass the same arguments as at the first call.")


def wrong_shape(leaf: Leaf, found: tuple[int, ...], pieces: int, why: str = "") -> BatchError:
    """The refusal of a leaf: what a rank should bring, what it brought, how to cut it."""
    share = ""
    if leaf.batch_dim is not None:
        share = f" ({leaf.shape[leaf.batch_dim]} global rows over {pieces} data ranks)"
    return BatchError(
        f"batch leaf {leaf.name}",
        f"expected local shape {list(leaf.local_shape(pieces))}{share}, but found {list(found)}{why}",
        f"Cut the global batch {list(leaf.shape)} by parallel.local_rows(batch), or draw rows by parallel.sampler(…).",
    )


@dataclass(frozen=True)
class Census:
    """What every rank says of its batch before a step; one row for each rank."""

    table: tuple[tuple[int, ...], ...]

    @staticmethod
    def take(own: list[int], device: torch.device) -> Census:
        """Exchange `own`, a vector of equal length on all ranks. Collective."""
        if dist.get_world_size() == 1:
            return Census((tuple(own),))
        mine = torch.tensor(own, dtype=torch.int64, device=device)
        table = torch.empty(dist.get_world_size(), len(own), dtype=torch.int64, device=device)
        dist.all_gather_single(table.view(-1), mine)
        return Census(tuple(tuple(row) for row in table.tolist()))

    def column(self, index: int) -> tuple[int, ...]:
        return tuple(row[index] for row in self.table)


def signature(found: Mapping[str, torch.Tensor]) -> tuple[tuple[str, tuple[int, ...], str], ...]:
    """Names, shapes and dtypes: what a program is made for."""
    return tuple((name, tuple(t.shape), str(t.dtype)) for name, t in found.items())


def checksum(found: Mapping[str, torch.Tensor]) -> int:
    """A number that differs when any value of the batch does (with chance 2⁻⁶² otherwise); one pass over the data."""
    total = 0
    for index, tensor in enumerate(found.values()):
        if not tensor.numel():
            continue
        flat = tensor.detach().contiguous().view(-1)
        bits = flat if not flat.dtype.is_floating_point else flat.view(_BITS[flat.element_size()])
        values = bits.to(torch.int64)
        weights = torch.arange(1, values.numel() + 1, device=values.device) * 0x9E3779B97F4A7C1 + 2 * index + 1
        total = (total * 31 + int((values * (weights | 1)).sum())) % (1 << 62)
    return total


_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def valid_targets(found: Mapping[str, torch.Tensor], shifts: bool) -> torch.Tensor | None:
    """How many targets count in this batch, as the model's loss counts them; None without labels.

    `shifts`: the loss predicts the next token (Hugging Face's ForCausalLMLoss), so the first label of a row is no
    target; `shift_labels` are labels shifted already.
    """
    if "shift_labels" in found:
        return found["shift_labels"].ne(IGNORE_INDEX).sum()
    if "labels" not in found:
        return None
    labels = found["labels"]
    return (labels[..., 1:] if shifts else labels).ne(IGNORE_INDEX).sum()


def counted(found: Mapping[str, torch.Tensor], targets: Targets | None) -> torch.Tensor | None:
    """How many of `targets` count in this batch; None without."""
    return None if targets is None else found[targets.leaf][..., targets.skipped :].ne(IGNORE_INDEX).sum()


def row_indices(length: int, global_rows: int, index: int, pieces: int, seed: int | None, epoch: int) -> Iterator[int]:
    """Row numbers of a data set of `length` for data rank `index`: whole global batches only, in an order that depends
    on seed and epoch but not on the number of ranks. `seed` None keeps the order of the data set."""
    if seed is None:
        order = torch.arange(length)
    else:
        order = torch.randperm(length, generator=torch.Generator().manual_seed(seed * 1_000_003 + epoch))
    local = global_rows // pieces
    for first in range(0, length - global_rows + 1, global_rows):
        yield from order[first + index * local : first + (index + 1) * local].tolist()


class RowSampler(torch.utils.data.Sampler[int]):
    """Row numbers of a data set for this rank: a `sampler=` for DataLoader with batch_size=parallel.local_batch.

    Ranks of one data rank draw the same rows; call `set_epoch` for another order. Rows that do not fill a global batch
    are left out.
    """

    def __init__(self, length: int, global_rows: int, index: int, pieces: int, seed: int | None) -> None:
        self.length, self.global_rows, self.index, self.pieces, self.seed, self.epoch = (
            length, global_rows, index, pieces, seed, 0,
        )  # fmt: skip
        if length < global_rows:
            raise BatchError("sampler", f"expected at least one global batch of {global_rows} rows, but found {length}")

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return row_indices(self.length, self.global_rows, self.index, self.pieces, self.seed, self.epoch)

    def __len__(self) -> int:
        return self.length // self.global_rows * (self.global_rows // self.pieces)
