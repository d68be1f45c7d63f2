"""What happens to a batch before the first collective of the model: every rank tells, every rank agrees."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist

from hpsearch.errors import BatchError
from hpsearch.run.batch import Census, check, checksum, counted, signature, valid_targets
from hpsearch.run.ranks import Ranks, data_index
from hpsearch.run.stepper import NUM_ITEMS, Built, check_equal_targets


@dataclass(frozen=True)
class Intake:
    """Checks local batches against what the plan expects of them."""

    built: Built
    ranks: Ranks
    shifts: bool
    """Whether the loss leaves the first label of a row out (`batch.valid_targets`)."""

    def receive(self, found: Mapping[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], int | None]:
        """This rank's rows, and the valid targets of the global batch. Collective: one vector of integers each.

        Raises BatchError on every rank if any rank's batch is wrong.
        """
        error, local, vector = None, {}, [0] * (3 + self.built.micro_batches)
        try:
            local, is_global = self._own_rows(found)
            shape = int.from_bytes(hashlib.sha256(repr(signature(local)).encode()).digest()[:7], "little") + 1
            vector = [shape, is_global, checksum(found), *self._targets(local)]
        except BatchError as own:
            error = own
        table = Census.take(vector, self.ranks.device)
        if error is not None:
            raise error
        self._compare(table)
        return local, self._count(table)

    def _own_rows(self, found: Mapping[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], bool]:
        pieces = self.ranks.mesh.num_data_ranks
        is_global = check(self.built.leaves, found, pieces)
        if not is_global:
            return dict(found), False
        return {n: self.built.leaves[n].rows(t, self.ranks.data_index, pieces) for n, t in found.items()}, True

    def _targets(self, local: Mapping[str, torch.Tensor]) -> list[int]:
        """Valid targets of each micro-batch, as the loss counts them; zeros where it counts none."""
        count, targets = self.built.micro_batches, self.built.graph.targets
        if not self._counts_items and (count == 1 or targets is None):
            return [0] * count
        found = []
        for index in range(count):
            rows = {n: self.built.leaves[n].rows(t, index, count) for n, t in local.items()}
            valid = valid_targets(rows, self.shifts) if self._counts_items else counted(rows, targets)
            if valid is None:
                raise BatchError(
                    "batch", f"the loss needs {NUM_ITEMS}, but found no labels to count", f"Pass {NUM_ITEMS}."
                )
            found.append(int(valid))
        return found

    @property
    def _counts_items(self) -> bool:
        """Whether the count that the loss takes is ours to give."""
        return any(i.name == NUM_ITEMS for i in self.built.graph.inputs) and NUM_ITEMS not in self.built.leaves

    def _compare(self, census: Census) -> None:
        shapes, sums, world = census.column(0), census.column(2), dist.get_world_size()
        failed = [rank for rank in range(world) if shapes[rank] == 0]
        if failed:
            raise BatchError(
                "batch", f"expected a batch that fits on every rank, but rank(s) {failed} found one that does not"
            )
        if len(set(shapes)) > 1 or len(set(census.column(1))) > 1:
            odd = [rank for rank in range(world) if census.table[rank][:2] != census.table[0][:2]]
            problem = f"expected equal local shapes on all ranks, but rank(s) {odd} differ from rank 0"
            raise BatchError("batch", problem, "Pad every rank's rows to the same length.")
        if census.column(1)[0]:
            if len(set(sums)) > 1:
                leaf = next(iter(self.built.leaves.values()))
                rows = f"{list(leaf.local_shape(self.ranks.mesh.num_data_ranks))} of leaf {leaf.name}"
                problem = f"the ranks passed different batches of the global shape, but a rank's own rows are {rows}"
                raise BatchError(
                    "batch", problem, "Cut them with parallel.local_rows(batch), or pass one batch to all."
                )
            return
        for rank in range(world):
            twin = next(r for r in range(world) if data_index(self.ranks.mesh, r) == data_index(self.ranks.mesh, rank))
            if sums[rank] != sums[twin]:
                problem = f"ranks {twin} and {rank} share one data rank, but brought different rows"
                raise BatchError("batch", problem, "Cut rows with parallel.local_rows(batch) or parallel.sampler(...).")

    def _count(self, census: Census) -> int | None:
        """Valid targets of the global batch; each data rank counts once."""
        mesh = self.ranks.mesh
        first = {data_index(mesh, rank): row for rank, row in reversed(list(enumerate(census.table)))}
        by_micro_batch = tuple(sum(row[3 + i] for row in first.values()) for i in range(self.built.micro_batches))
        if self._counts_items:
            return sum(by_micro_batch)
        check_equal_targets(by_micro_batch)
        return None
