"""All ranks of a program in one process, one thread each; collectives meet at a board under a lock.

Only the transport is simulated: the emitted text, the executor and every local op are the real ones.
What `torch.ops._c10d_functional` promises is restated here in plain torch; test_gloo.py holds the real one to it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from hpsearch.lower import ParallelProgram, context, exchange
from hpsearch.lower.executor import Bound


class Board:
    def __init__(self) -> None:
        self.turn = threading.Condition()
        self.posts: dict[Any, dict[int, tuple[Any, Tensor]]] = {}
        self.failed = False

    def exchange(self, key: Any, group: tuple[int, ...], rank: int, what: Any, tensor: Tensor) -> list[Tensor]:
        """The tensors of all ranks of `group`, in order; all must come with the same `what`."""
        with self.turn:
            post = self.posts.setdefault(key, {})
            with _disable_current_modes():  # what lies on the board is no memory of the rank
                post[rank] = (what, tensor.clone())
            self.turn.notify_all()
            met = self.turn.wait_for(lambda: len(post) == len(group) or self.failed, timeout=60)
        assert met, f"rank {rank} waited too long in {what} {key}"
        assert not self.failed, f"rank {rank} was left alone in {what} {key}"
        assert len({w for w, _ in post.values()}) == 1, f"ranks disagree: {post}"
        return [post[r][1] for r in group]


class Collectives:
    """Stands for `torch.ops._c10d_functional` on one rank; a group is its tuple of ranks."""

    def __init__(self, board: Board, rank: int) -> None:
        self.board, self.rank = board, rank
        self.count: dict[tuple[int, ...], int] = {}
        self.log: list[tuple[str, tuple[int, ...], int]] = []
        self.sent: dict[int, int] = {}
        """Rank → bytes handed over for it, in exchanges; its own included."""

    def _meet(self, kind: str, group: tuple[int, ...], x: Tensor, *what: Any) -> list[Tensor]:
        assert x.is_contiguous(), f"{kind} of a tensor that is not contiguous"
        turn = self.count[group] = self.count.get(group, 0) + 1
        return self.board.exchange((group, turn), group, self.rank, (kind, tuple(x.shape), x.dtype, *what), x)

    def all_gather_into_tensor(self, x: Tensor, size: int, group: tuple[int, ...]) -> Tensor:
        assert size == len(group)
        self.log.append(("all_gather", group, x.nbytes * size))
        return torch.cat(self._meet("all_gather", group, x), 0)

    def reduce_scatter_tensor(self, x: Tensor, op: str, size: int, group: tuple[int, ...]) -> Tensor:
        assert size == len(group)
        assert op == "sum"
        assert x.shape[0] % size == 0
        self.log.append(("reduce_scatter", group, x.nbytes))
        total = sum(self._meet("reduce_scatter", group, x))
        return total.chunk(size, 0)[group.index(self.rank)].clone()  # type: ignore[union-attr]

    def all_reduce(self, x: Tensor, op: str, group: tuple[int, ...]) -> Tensor:
        assert op in ("sum", "max")
        self.log.append(("all_reduce", group, x.nbytes))
        if op == "max":
            return torch.stack(self._meet("all_reduce", group, x)).amax(0)
        return sum(self._meet("all_reduce", group, x))  # type: ignore[return-value]

    def all_to_all_single(self, x: Tensor, out: list[int], into: list[int], group: tuple[int, ...]) -> Tensor:
        assert len(out) == len(into) == len(group)
        assert sum(into) == x.shape[0]
        assert x.is_contiguous()
        self.log.append(("all_to_all", group, x.nbytes))
        row_bytes = x[:1].nbytes if len(x) else 0
        for to, rows in zip(group, into, strict=True):
            self.sent[to] = self.sent.get(to, 0) + rows * row_bytes
        turn, mine = self.count.get(group, 0) + 1, group.index(self.rank)
        self.count[group] = turn
        what = ("all_to_all", tuple(x.shape[1:]), x.dtype)
        splits = torch.tensor(into)
        all_splits = self.board.exchange((group, turn, "splits"), group, self.rank, what, splits)
        assert [int(s[mine]) for s in all_splits] == out, f"rank {self.rank} expects other rows than are sent to it"
        met = self.board.exchange((group, turn), group, self.rank, what, x)
        return torch.cat([t.split(s.tolist(), 0)[mine] for t, s in zip(met, all_splits, strict=True)], 0)

    def wait_tensor(self, x: Tensor) -> Tensor:
        return x


class OfThread:
    """Stands for `torch.ops._c10d_functional` in a module that all ranks share: the collectives of whoever calls."""

    def __init__(self) -> None:
        self.thread = threading.local()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.thread.collectives, name)


def run_ranks(program: ParallelProgram, work: Callable[[int, Bound], Any]) -> list[Any]:
    """`work(rank, bound)` on every rank of the program's mesh; results by rank. The first failure is raised."""

    def bind(rank: int, collectives: Collectives) -> Any:
        names = (*program.mesh.names, *(hop.name for hop in program.mesh.hops))
        groups = {name: program.mesh.group(name, rank) for name in names}
        bound = program.bind(groups, program.mesh.coordinate(rank), "cpu")
        bound.functions["c10d"] = collectives
        return work(rank, bound)

    return on_ranks(program.mesh.num_ranks, bind)


def on_ranks(count: int, work: Callable[[int, Collectives], Any]) -> list[Any]:
    """`work(rank, collectives)` in one thread for each rank; results by rank. The first failure is raised."""
    board = Board()
    results: list[Any] = [None] * count
    errors: list[BaseException] = []
    shared = OfThread()

    def run(rank: int) -> None:
        try:
            shared.thread.collectives = collectives = Collectives(board, rank)
            results[rank] = work(rank, collectives)
        except BaseException as error:  # noqa: BLE001 - the main thread raises it
            errors.append(error)
            with board.turn:
                board.failed = True
                board.turn.notify_all()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(count)]
    with (
        patch.object(exchange, "c10d", shared),
        patch.object(exchange, "group_size", len),
        patch.object(context, "c10d", shared),
    ):
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    if errors:
        raise errors[0]
    return results
