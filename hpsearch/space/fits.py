"""Whether layouts fit in memory somehow, many at once: a test that all pass that fit, however cut and recomputed."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hpsearch.space.space import bits_of

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
Ints = NDArray[np.int64]


def fits_somehow(
    rows: Ints, counts: Floats, held: Floats, kept: Floats, room_bytes: float, way_s: Floats, best_s: float
) -> Bools:
    """[insides, rows] of `rows` of outsides.

    A layer of kind k has `held[k]` bytes of states ([kinds, 1, rows]) and keeps `kept[k]` ([kinds, insides, 1]) for
    each micro-batch alive; there are `counts[k]` of them. On stage s, with a_s micro-batches alive at once,

        sum of held + a_s * kept <= room,   with rho <= kept / held of any kind   sum of held <= room / (1 + a_s * rho)

    and the stages together must hold what all layers do. Schedules of one chunk a rank have min(m, p - s) alive; the
    sum of a falling function over 1, 2, ... is at most its integral from 0. Any schedule has one, of every chunk: the
    first backward comes behind the forward of the whole model.

    Interleaved ones have (v - 1)·p + 1 chunks of v alive on every rank, or all of m. Under any other a micro-batch
    stays with a layer for its way through those behind and back, `way_s` ([insides, 1]) a layer; in a pipeline of
    `best_s` a layer has m·way_s·(layers - 1) / (2·best_s) of them on average, and at some moment at least that.
    """
    pp, vpp, m = (rows[:, column].astype(np.float64) for column in (0, 1, 3))
    total, all_kept = np.einsum("k,kir->ir", counts, held), np.einsum("k,kir->ir", counts, kept)
    rho = np.min(kept / np.maximum(held, 1.0), axis=0)
    falling = np.where(vpp == 1, np.minimum(m, pp) - 1, 0.0)
    last = falling + 1
    with np.errstate(divide="ignore", invalid="ignore"):
        before = np.where(rho > 0, np.log1p(falling * rho) / rho, falling)
    fits = total <= room_bytes * (before + (pp - falling) / (1 + last * rho)) * (1 + 1e-9)
    interleaved = np.minimum(m, ((vpp - 1) * pp + 1) / vpp)
    layers, least = counts.sum(), kept.min(axis=0) * counts.sum()
    by_order, by_time = interleaved * all_kept, m * way_s * ((layers - 1) / 2 / best_s) * least
    bit = bits_of(("interleaved",))
    alike = np.where(rows[:, 6] & bit, np.minimum(by_order, by_time), by_time)
    alike = np.where(rows[:, 6] == bit, by_order, alike)
    return np.asarray(fits & ((total + alike <= room_bytes * pp * (1 + 1e-9)) | (pp == 1)))
