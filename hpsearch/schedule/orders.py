"""In which order the ranks do their actions, for every kind of schedule; as rows, because texts are long.

Orders are those of the papers as torch.distributed.pipelining 2.13 runs them, so that a plan's text is what a reader
of either expects:
  gpipe         all forwards, all backwards (Huang et al. 2019)
  1f1b          as few forwards ahead as keep all ranks busy (Narayanan et al. 2019, "PipeDream-flush")
  interleaved   1f1b over several stages a rank, in groups of micro-batches (Narayanan et al. 2021)
  zb-h1         1f1b with a split backward: rank r does its weight parts r micro-batches later, which fills the end with
                what waits for nobody, and keeps no more alive than rank 0 of 1f1b (Qi et al. 2024, arXiv:2401.10241)
  interleaved-zb  the same over several stages a rank
  zbv           two stages a rank in a V, so that the last stage stands on rank 0 (Qi et al. 2024, section 6)
  dualpipev     DeepSeek's DualPipe folded to a V: a forward runs with another micro-batch's backward
                (arXiv:2412.19437; github.com/deepseek-ai/DualPipe)
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hpsearch.schedule.schedule import KIND_ORDER, Ints, Rows

F, INPUT, W, B = (KIND_ORDER[kind] for kind in "FIWB")


def loop(ranks: int, virtual: int) -> tuple[int, ...]:
    """The rank of each stage: around and around."""
    return tuple(stage % ranks for stage in range(ranks * virtual))


def vee(ranks: int) -> tuple[int, ...]:
    """The rank of each of 2·ranks stages: down and up again."""
    return (*range(ranks), *reversed(range(ranks)))


def paired(ranks: int, virtual: int, micro_batches: int, warm: list[int], late: list[int] | None = None) -> Rows:
    """On each rank `warm` forwards, then a forward and a backward in turn, then the remaining backwards. With `late`
    the backward is split, and weight parts come `late` backwards behind their input parts.

    Over several stages a rank, micro-batches go in groups of `ranks` through each of them; the last group may be
    smaller.
    """
    total = micro_batches * virtual
    chunk, micro = _slots(ranks, virtual, micro_batches)
    ahead, i = np.array(warm)[:, None], np.arange(total)
    turn, left = i - ahead, total - ahead  # a forward's turn, below 0 while it is ahead; turns that have a forward
    behind = np.full_like(ahead, total) if late is None else np.array(late)[:, None]

    def weights(turns: Ints) -> Ints:
        """Weight parts before a turn."""
        return np.asarray(np.maximum(turns - behind, 0))

    places = [np.where(turn < 0, i, ahead + 2 * turn + weights(turn)), ahead + np.minimum(i + 1, left) + i + weights(i)]
    if late is not None:
        soon = ahead + np.minimum(i + behind + 1, left) + 2 * i + behind + 1
        places.append(np.where(i + behind < total, soon, 2 * total + i))
    parts = len(places)
    at = np.concatenate(places, axis=1) + parts * total * np.arange(ranks)[:, None]
    chunks = np.concatenate([chunk, *[virtual - 1 - chunk] * (parts - 1)])
    kinds = np.repeat([F, B if late is None else INPUT, W][:parts], total)
    rank, stage, kind, micros = (np.empty(at.size, dtype=np.int64) for _ in range(4))
    rank[at], kind[at], micros[at] = np.arange(ranks)[:, None], kinds, np.tile(micro, parts)
    stage[at] = chunks * ranks + np.arange(ranks)[:, None]
    return Rows.of(rank, np.arange(at.size), stage, kind, micros, ranks)


def _slots(ranks: int, virtual: int, micro_batches: int) -> tuple[Ints, Ints]:
    """Which of a rank's stages, and micro-batch, in the order of the forwards."""
    group = micro_batches if virtual == 1 else ranks
    micro = np.tile(np.arange(micro_batches), virtual)
    chunk = np.repeat(np.arange(virtual), micro_batches)
    order = np.lexsort((micro, chunk, micro // group))
    return chunk[order], micro[order]


def order_of_chunks(ranks: int, virtual: int, micro_batches: int) -> tuple[Ints, Ints]:
    """Which of a rank's stages, in the order of forwards and of backwards."""
    chunk, _ = _slots(ranks, virtual, micro_batches)
    return chunk, virtual - 1 - chunk


def turns(kind: str, ranks: int, virtual: int, micro_batches: int) -> tuple[list[int], list[int] | None]:
    """`warm` and `late` of `paired`."""
    every = range(ranks)
    total, late = micro_batches * virtual, list(every) if kind in ("zb-h1", "interleaved-zb") else None
    if kind == "gpipe":
        ahead = [total] * ranks
    elif kind == "interleaved":
        ahead = [interleaved_ahead(rank, ranks, virtual) for rank in every]
    else:
        ahead = [(virtual - 1) * ranks + ranks - 1 - rank for rank in every]
    return [min(one, total) for one in ahead], late


def interleaved_ahead(rank: int, ranks: int, virtual: int) -> int:
    """Forwards ahead: all stages but the last for one group, and two a rank behind this one."""
    return (virtual - 1) * ranks + 2 * (ranks - 1 - rank)


Word = tuple[int, int]
"""A rank's first (0) or second (1) stage, and what it does."""
F0, F1, I0, I1, W0, W1, B0, B1 = ((chunk, kind) for kind in (F, INPUT, W, B) for chunk in (0, 1))


def zbv(ranks: int, micro_batches: int) -> Rows:
    """Zero bubble if F, I and W take equally long. With fewer than 2·ranks - 1 micro-batches the order has holes."""
    full, found = max(2 * ranks - 1, micro_batches), []
    for rank in range(ranks):
        back = ranks - rank
        steady = full - (2 * ranks - rank - 1)  # rounds with a forward of the first stage; then there are none left
        words = _words(
            ([F0], 2 * back - 1), ([F1, F0], rank), ([F1, I1, W1], back), ([F0, I0, W0, F1, I1, W1], steady),
            ([I0, W0, F1, I1, W1], full - ranks - steady), ([I0, I1], rank), ([I0, W0], back), ([W1], rank),
            ([W0], rank),
        )  # fmt: skip
        found.append((words, np.ones(len(words), dtype=bool)))
    return _in_a_vee(found, micro_batches, is_owed=False)


def dualpipev(ranks: int, micro_batches: int) -> Rows:
    """The eight steps of DeepSeek's `dualpipev.py`; needs 2·ranks micro-batches. The weight part that has waited
    longest comes first."""
    found = []
    for rank in range(ranks):
        behind, rounds = ranks - rank - 1, micro_batches - 2 * ranks + rank + 1
        apart = 0 if behind else min(rounds, 1)  # the last rank's first pair is none
        begin = _words(([F0], 2 * behind), ([F0, F1], rank + 1), ([I1, W0, F1], behind))
        pairs = _words(([F0, B1, F1, B0], rounds), ([B1, F1, B0], behind))
        words = np.concatenate([begin, pairs, _folded(rank, behind)])
        new = np.ones(len(words), dtype=bool)
        new[len(begin) + 1 : len(begin) + 4 * rounds : 2] = False
        new[len(begin) + 4 * rounds + 2 : len(begin) + len(pairs) : 3] = False
        new[len(begin) + 1 : len(begin) + 2 * apart] = True
        found.append((words, new))
    return _in_a_vee(found, micro_batches, is_owed=True)


def _folded(rank: int, behind: int) -> Ints:
    """The end of DualPipeV: from the middle of the last backwards on, weight parts are put off to fill the holes."""
    half, parity = (rank + 1) // 2, rank % 2
    first = [(B1, B0)] * half + [(I1 if parity else B1, I0)] + [(I1, I0)] * (rank - half)
    return _words(([word for pair in first for word in pair], 1), ([W0, I0], behind), ([W0], rank + 1))


def _words(*runs: tuple[list[Word], int]) -> Ints:
    """[actions, 2]: words, each repeated so many times."""
    parts = [np.tile(np.array(words, dtype=np.int64).reshape(-1, 2), (times, 1)) for words, times in runs if times > 0]
    return np.concatenate([np.empty((0, 2), dtype=np.int64), *parts])


def _in_a_vee(ranks: list[tuple[Ints, NDArray[np.bool_]]], micro_batches: int, *, is_owed: bool) -> Rows:
    """Rows of words of each rank; and whether a word begins a step, or is the second of a pair.

    Micro-batches count up: forwards, backwards and weight parts of each stage. `is_owed`: weight parts are those of the
    input parts that have waited longest, of either stage.
    """
    count, parts, steps = len(ranks), list[Ints](), 0
    for rank, (words, new) in enumerate(ranks):
        chunk, kind = words.T
        micro, chunk = np.empty(len(words), dtype=np.int64), chunk.copy()
        for one in (0, 1):
            for kinds in ([F], [INPUT, B], [W]):
                some = np.flatnonzero((chunk == one) & np.isin(kind, kinds))
                micro[some] = np.arange(len(some))
        if is_owed:
            inputs, weights = np.flatnonzero(kind == INPUT), np.flatnonzero(kind == W)
            chunk[weights], micro[weights] = chunk[inputs], micro[inputs]
        stage = np.where(chunk == 0, rank, 2 * count - 1 - rank)
        kept = micro < micro_batches
        step = np.cumsum(new[kept]) - 1 + steps
        steps = int(step[-1]) + 1
        parts.append(np.stack([np.full(len(step), rank), step, stage[kept], kind[kept], micro[kept]]))
    return Rows(np.concatenate(parts, axis=1).T, count)
