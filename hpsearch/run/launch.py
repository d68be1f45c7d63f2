"""Ranks: starting the process group, agreeing on one plan, and failing together.

Whatever can fail on one rank alone (reading a plan, capturing a model, a batch of the wrong shape) is put to a vote
before the first collective of the model, so that every rank raises and none waits for one that has gone.
"""

from __future__ import annotations

import atexit
import hashlib
import os
from collections.abc import Callable, Mapping
from typing import TypeVar

import torch
import torch.distributed as dist

from hpsearch.errors import HpsearchError, LaunchError

T = TypeVar("T")


def is_launched() -> bool:
    """Whether this process is one rank of a launched job, or has a process group of several ranks.

    A group of one is what a plan for one device makes for itself; it says nothing about the next plan.
    """
    return "WORLD_SIZE" in os.environ or (dist.is_initialized() and dist.get_world_size() > 1)


def device_type() -> str:
    """The kind of device this process computes on: the accelerator torch was built for and finds, else `cpu`."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return accelerator.type if accelerator is not None else "cpu"


def start() -> None:
    """Join the process group if a launcher started this process and nobody joined yet.

    gloo carries CPU tensors; an accelerator gets its own backend beside it. Raises LaunchError when the environment is
    half a launcher's.
    """
    if is_launched() and not dist.is_initialized():
        _check_environment(os.environ)
        if device_type() != "cpu":
            torch.accelerator.set_device_index(local_device().index)
        dist.init_process_group("gloo" if device_type() == "cpu" else None)
        if device_type() == "cpu":
            atexit.register(_leave)


def _leave() -> None:
    """Ends the group that `start` made, if nobody did: gloo's threads must not outlive the interpreter, or the process
    may abort after its last line. Other backends wait for what is under way when a group ends, so they are left."""
    if dist.is_initialized():
        dist.destroy_process_group()


def _check_environment(found: Mapping[str, str]) -> None:
    """What torchrun sets is there and makes sense; torch itself would wait for ranks that never come."""
    remedy = "Start it with torchrun, or unset WORLD_SIZE to run without a launcher."
    missing = [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if not found.get(name)]
    if missing:
        problem = f"WORLD_SIZE={found['WORLD_SIZE']} is set as by a launcher, but not {', '.join(missing)}"
        raise LaunchError("launch", problem, remedy)
    rank, size = found["RANK"], found["WORLD_SIZE"]
    if not (rank.isdecimal() and size.isdecimal() and int(rank) < int(size)):
        raise LaunchError("launch", f"expected a RANK from 0 to WORLD_SIZE - 1, but found {rank} of {size}", remedy)


def local_device() -> torch.device:
    """The device of this rank."""
    kind = device_type()
    return torch.device(kind) if kind == "cpu" else torch.device(kind, int(os.environ.get("LOCAL_RANK", "0")))


def num_processes() -> int:
    """Ranks of the launched job; 1 outside a launcher."""
    return dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))


def is_first() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


def require(num_ranks: int) -> None:
    """Make sure that exactly the ranks of the plan are here. One rank needs no launcher.

    Raises LaunchError, with the command to type, when they are not.
    """
    start()
    if num_ranks > 1 and not is_launched():
        problem = f"the plan needs {num_ranks} ranks, but no launcher started this process"
        raise LaunchError("launch", problem, how_to_launch(num_ranks))
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    found = dist.get_world_size()
    if found != num_ranks:
        problem = f"expected {num_ranks} ranks as in the plan, but found {found}"
        raise LaunchError("launch", problem, f"{how_to_launch(num_ranks)} Or search a plan for {found} devices.")


def how_to_launch(num_ranks: int) -> str:
    return f"Start it with: torchrun --nproc-per-node {num_ranks} your_script.py (on several nodes, --nnodes N)."


def together(subject: str, work: Callable[[], T]) -> T:
    """Run `work` on every rank and go on only if it went well on all of them.

    Raises the rank's own error where it failed, and LaunchError naming the failed ranks on the others.
    """
    result, error = None, None
    try:
        result = work()
    except HpsearchError as found:
        error = found
    if dist.is_initialized() and dist.get_world_size() > 1:
        errors: list[str | None] = [None] * dist.get_world_size()
        dist.all_gather_object(errors, None if error is None else str(error))
        _raise_if_failed(subject, errors, error)
    if error is not None:
        raise error
    return result  # type: ignore[return-value]


def _raise_if_failed(subject: str, errors: list[str | None], own: HpsearchError | None) -> None:
    failed = {rank: text for rank, text in enumerate(errors) if text is not None}
    if own is None and failed:
        rank, text = next(iter(failed.items()))
        raise LaunchError(
            subject,
            f"expected all {len(errors)} ranks to succeed, but rank(s) {_join(failed)} failed; rank {rank}: {text}",
        )


def agree(own: bytes | None, solve: Callable[[], bytes]) -> bytes:
    """The plan's bytes, the same on every rank; `own` is what this rank was given, if anything.

    Given plans are compared by content. If no rank was given one, rank 0 solves and hands out the bytes.
    Raises LaunchError on every rank when they differ, or when only some ranks were given a plan.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return own if own is not None else solve()
    digests: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(digests, None if own is None else _digest(own))
    if len(set(digests)) > 1:
        _refuse(digests)
    if own is not None:
        return own
    box = [together("search on rank 0", solve if dist.get_rank() == 0 else bytes)]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def _refuse(digests: list[str | None]) -> None:
    groups: dict[str, list[int]] = {}
    for rank, digest in enumerate(digests):
        groups.setdefault(digest or "no plan", []).append(rank)
    found = "; ".join(f"rank(s) {_join(ranks)}: {digest}" for digest, ranks in groups.items())
    raise LaunchError(
        "plan",
        f"expected the same plan on all {len(digests)} ranks, but found {found}",
        "Give every rank the same file.",
    )


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def _join(ranks: object) -> str:
    return ", ".join(str(rank) for rank in ranks)  # type: ignore[attr-defined]
