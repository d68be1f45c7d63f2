"""`Space`: which layouts of a training step are considered, and by which rules others are not.

A layout has an inside (how one layer of one micro-batch is split: tp, sp, cp, ep, etp, rows of a micro-batch, kind of
recompute) and an outside (pipeline, virtual stages, data ranks, ZeRO level, hybrid sharding). Blocks are priced once
for each inside; its outsides are arrays.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from math import isqrt
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpsearch.cluster import Cluster
from hpsearch.errors import LegalityError
from hpsearch.estimate import ModelShape, ParallelLayout
from hpsearch.estimate.shape import kind_of
from hpsearch.schedule import KINDS
from hpsearch.space.rules import MOST_MICRO_BATCHES, Rules

Ints = NDArray[np.int64]

IN_WORDS = (
    "tp x cp (ring, gathered keys, or Ulysses) x pp x dp, ep and expert-tp folded over dp, cp and tp; tp innermost, "
    "then cp, dp, pp; sequence sharding on or off; 1F1B, GPipe or ZB-H1 with any cut of the layers into stages, or "
    "interleaved 1F1B, interleaved ZB, ZB-V or DualPipeV with even chunks; micro-batches of 1 to 32 rows by doubling, "
    "or of any divisor of the batch up to 128 rows and 131,072 tokens a rank; ZeRO 0, 1, 2 (without pipeline) and 3, "
    "sharded over all data ranks or over one tier; recompute of any number of layers of each stage, spread evenly over "
    "its chunks, or of one part of all layers; tp, cp (up to 64) and ep of factors 2, 3, 5 and 7; as many data ranks "
    "as there are devices for, or the most that share the batch evenly; up to 8 virtual stages"
)
"""What a certificate is about."""
ON_GROUPS = (
    "; on groups of unlike nodes, stages in any sequence if there are at most 24, else a group's stages together and "
    "groups in any order (of more than 4: as in the file, and backwards); a stage over several groups waits for the "
    "slowest; data ranks have equal shares of the batch, or without pipeline, ZeRO-2 and 3 and offload as many "
    "micro-batches as are over first"
)
"""And where nodes differ."""
ROWS = (1, 2, 4, 8, 16, 32)
"""Of a micro-batch, whether or not they divide the batch."""
MOST_ROWS, MOST_TOKENS = 128, 2**17
"""Of a micro-batch that divides the batch; tokens on one cp rank."""
PARTS = ("attention", "mlp", "moe", "norm+activation", "mla_up")
"""Of selective recompute, one at a time."""
MOST_VIRTUAL = 8
MOST_IDLE = 0.04
"""Share of the devices that may stand idle because data ranks do not come out even."""
PINS = ("tp", "sp", "cp", "cp_kind", "ep", "etp", "micro_batch", "recompute", "pp", "vpp", "schedule", "dp", "zero",
        "shard_ranks")  # fmt: skip


Row = tuple[int, int, int, int, int, int, int]
"""An outside: pp, vpp, dp, micro-batches, ZeRO level, shard ranks, and its schedules as bits: many are outsides of one
form, until they are told apart."""
SCHEDULES = tuple(KINDS)


def bits_of(names: Iterable[str]) -> int:
    """A set of schedules as bits."""
    return sum(1 << SCHEDULES.index(name) for name in set(names))


def names_of(bits: int) -> list[str]:
    """The schedules of a row."""
    return [name for i, name in enumerate(SCHEDULES) if bits >> i & 1]


def layouts(rows: Ints) -> int:
    """Layouts: one for each schedule of each row."""
    return int(BITS[rows[:, 6]].sum())


BITS = np.array([number.bit_count() for number in range(1 << len(SCHEDULES))])
"""How many schedules a set has."""


def apart(rows: Ints) -> Ints:
    """Rows of one schedule each."""
    found = []
    for i in range(len(SCHEDULES)):
        some = rows[rows[:, 6] >> i & 1 > 0]
        some[:, 6] = 1 << i
        found.append(some)
    return np.concatenate(found)


@dataclass(frozen=True)
class Inside:
    """What the price of a block depends on."""

    tp: int
    sp: bool
    cp: int
    cp_kind: str
    ep: int
    etp: int
    micro_batch: int
    recompute: str
    """full: any number of layers of each stage, none among them; none, where it is pinned; else the part that every
    layer computes again."""

    def layout(self, base: ParallelLayout) -> ParallelLayout:
        """A smallest layout with this inside and the switches of `base`."""
        ranks = self.ep * self.etp
        by_layers = self.recompute in ("full", "none")
        return replace(
            base, devices=self.tp * self.cp * ranks, pp=1, vpp=1, cut=(), recomputed=(), recompute_share=1.0,
            micro_batch=self.micro_batch, global_batch=self.micro_batch * ranks, tp=self.tp, sp=self.sp, cp=self.cp,
            cp_kind=self.cp_kind, ep=self.ep, etp=self.etp, zero=1, fsdp=False, shard_ranks=0,
            recompute=self.recompute if by_layers else "selective",
            recompute_parts=base.recompute_parts if by_layers else frozenset(self.recompute.split("+")),
        )  # fmt: skip


@dataclass(frozen=True)
class Slot:
    """Insides that differ in kind of context parallelism, experts and recompute: every combination of them."""

    tp: int
    sp: bool
    cp: int
    micro_batch: int
    kinds: tuple[str, ...]
    experts: tuple[tuple[int, int], ...]
    """(ep, etp)."""
    recomputes: tuple[str, ...]

    @staticmethod
    def of(inside: Inside) -> Slot:
        """A slot of one inside."""
        experts, kinds, recomputes = ((inside.ep, inside.etp),), (inside.cp_kind,), (inside.recompute,)
        return Slot(inside.tp, inside.sp, inside.cp, inside.micro_batch, kinds, experts, recomputes)

    @property
    def count(self) -> int:
        return len(self.kinds) * len(self.experts) * len(self.recomputes)

    def inside(self, number: int) -> Inside:
        """`number`: in an array [experts, kinds, recomputes]."""
        rest, recompute = divmod(number, len(self.recomputes))
        which, kind = divmod(rest, len(self.kinds))
        ep, etp = self.experts[which]
        return Inside(
            self.tp, self.sp, self.cp, self.kinds[kind], ep, etp, self.micro_batch, self.recomputes[recompute]
        )


@dataclass(frozen=True)
class Space:
    """All layouts of `shape` on `cluster` for one global batch, with the switches of `base`.

    `pins`: dimension → the values it may have; any other dimension has all legal ones.
    """

    shape: ModelShape
    cluster: Cluster
    base: ParallelLayout
    pins: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    cut: tuple[int, ...] = ()
    """Layers of each chunk, where they are given."""

    def __post_init__(self) -> None:
        if self.cut and (sum(self.cut) != self.shape.layers or min(self.cut) < 1):
            told, layers = "+".join(map(str, self.cut)), self.shape.layers
            problem = f"expected the {layers} layers of {self.shape.name} in chunks of at least 1, but {told} are"
            raise LegalityError("pin cut", f"{problem} {sum(self.cut)}", f"Legal: numbers that add up to {layers}.")
        if unknown := sorted(set(self.pins) - set(PINS)):
            raise LegalityError(f"pin {unknown[0]!r}", f"expected one of {', '.join(PINS)}", "")

    @property
    def devices(self) -> int:
        return self.cluster.devices

    @property
    def global_batch(self) -> int:
        return self.base.global_batch

    def values(self, name: str, legal: Any) -> list[Any]:
        """Of the legal values, those that are not pinned away."""
        return [value for value in legal if value in self.pins[name]] if name in self.pins else list(legal)

    def insides(self, rules: Rules) -> Iterator[Inside]:
        """Every inside that is legal, small ones first; `rules` notes those that are not."""
        for slot in self.slots(rules):
            yield from (slot.inside(number) for number in range(slot.count))

    def slots(self, rules: Rules) -> Iterator[Slot]:
        """The same, those together that have attention's split and rows in common."""
        shape = self.shape
        for cp in self.values("cp", rules.legal_cp(shape, self.base.seq_len, self.devices)):
            for tp in self.values("tp", rules.legal_tp(shape, self.devices // cp, self.base.precision)):
                kinds = tuple(self.values("cp_kind", rules.legal_cp_kinds(shape, tp, cp)))
                experts = tuple(self._experts(rules, tp))
                recomputes = tuple(self.values("recompute", [*self.recomputes(), *self._no_recompute()]))
                for sp in self.values("sp", rules.legal_sp(self.base.seq_len, tp, cp)):
                    for rows in self.values("micro_batch", self.pins.get("micro_batch", self.rows(cp))):
                        slot = Slot(tp, sp, cp, rows, kinds, experts, recomputes)
                        if slot.count and rows <= self.global_batch:
                            yield slot

    def _experts(self, rules: Rules, tp: int) -> Iterator[tuple[int, int]]:
        for etp in self.values("etp", rules.legal_etp(self.shape, tp, self.base.precision)):
            for ep in self.values("ep", rules.legal_ep(self.shape, self.devices // etp)):
                yield ep, etp

    def rows(self, cp: int) -> list[int]:
        """Rows of a micro-batch, for a degree of cp."""
        most = min(MOST_ROWS, MOST_TOKENS * cp // self.base.seq_len)
        return sorted({*ROWS, *(n for n in range(1, most + 1) if self.global_batch % n == 0)})

    def recomputes(self) -> list[str]:
        """full, and the parts that there are: a written score matrix, experts, dense layers, latent attention."""
        kinds = {kind_of(name) for name in self.shape.counts}
        there = {
            "attention": "attention" in kinds and not self.base.flash,
            "mlp": "mlp" in kinds,
            "moe": "moe" in kinds,
            "norm+activation": True,
            "mla_up": any(self.shape.of(name).mla for name in self.shape.counts),
        }
        return ["full", *(part for part in PARTS if there[part])]

    def _no_recompute(self) -> list[str]:
        """Only pinned: `full` has it among others."""
        return ["none"] if "none" in self.pins.get("recompute", ()) else []

    def outsides(self, inside: Inside, rules: Rules) -> Ints:
        """Everything around `inside`: rows of pp, vpp, dp, micro-batches, ZeRO level, shard ranks, schedules."""
        key = inside.tp, inside.cp, inside.micro_batch
        if key not in rules.outsides:
            rules.outsides[key] = self._outsides(inside, rules)
        found, experts = rules.outsides[key], inside.ep * inside.etp
        if experts == 1:
            return found
        folds = found[:, 2] * (inside.cp * inside.tp) % experts == 0
        if not folds.all():
            rules.refuse("fold", f"ep={inside.ep}", len(np.unique(found[~folds, 2])))
            found = found[folds]
        return found

    def _outsides(self, inside: Inside, rules: Rules) -> Ints:
        """Wherever experts are."""
        found, hows = list[tuple[int, ...]](), list[list[tuple[int, int]]]()
        for pp in self.values("pp", rules.legal_pp(self.shape, self.devices // (inside.tp * inside.cp))):
            for dp in self._data_ranks(inside, pp, rules):
                rows = dp * inside.micro_batch
                count = -(-self.global_batch // rows)
                if count > MOST_MICRO_BATCHES:
                    rules.refuse("rounds", f"{count} micro-batches")
                    continue
                how = self._sharding(inside, dp, pp, rules)
                for vpp in self.values("vpp", rules.legal_vpp(self.shape, pp, count, MOST_VIRTUAL)):
                    if self.cut and pp * vpp != len(self.cut):
                        continue
                    if bits := self._schedules(pp, vpp, count, rules):
                        found.append((pp, vpp, dp, count, bits))
                        hows.append(how)
        each = np.array(found, dtype=np.int64).reshape(-1, 5).repeat([len(how) for how in hows], axis=0)
        shared = np.array([one for how in hows for one in how], dtype=np.int64).reshape(-1, 2)
        return np.hstack([each[:, :4], shared, each[:, 4:]])

    def _data_ranks(self, inside: Inside, pp: int, rules: Rules) -> list[int]:
        """As many as there are devices for, and the most that share the batch evenly."""
        inner = inside.tp * inside.cp * pp
        most = self.devices // inner
        least = (1 - MOST_IDLE) * self.devices
        even = self._even(most, inside.micro_batch, int(least) // inner)
        found = []
        for dp in dict.fromkeys((most, even)):
            if dp * inner < least:
                rules.refuse("idle", f"dp={dp}")
            elif dp * inside.micro_batch > self.global_batch and dp > 1:
                rules.refuse("batch", f"dp={dp}")
            else:
                found.append(dp)
        return self.values("dp", found)

    def _even(self, most: int, rows: int, least: int) -> int:
        """The most data ranks up to `most` that share the batch evenly; `most` where there are none above `least`."""
        if self.global_batch % rows:
            return most
        divisors = _divisors(self.global_batch // rows)
        found = divisors[bisect_right(divisors, most) - 1] if most else 0
        return found if found >= max(least, 1) else most

    def _schedules(self, pp: int, vpp: int, count: int, rules: Rules) -> int:
        """Legal schedules as bits."""
        return bits_of(self.values("schedule", rules.legal_schedules(pp, vpp, count)))

    def _sharding(self, inside: Inside, dp: int, pp: int, rules: Rules) -> list[tuple[int, int]]:
        """(ZeRO level, ranks that share states; 0 for all)."""
        ranks = dp * inside.cp
        if ranks == 1:
            return [(zero, part) for zero in self.values("zero", (0,)) for part in self.values("shard_ranks", (0,))]
        found = []
        for zero in self.values("zero", (0, 1, 2, 3) if pp == 1 else (0, 1, 3)):
            parts = [0]
            if zero == 3:
                sizes = (size // inside.tp for size in domains(self.cluster) if size % inside.tp == 0)
                parts += sorted({n for n in sizes if 1 < n < ranks and ranks % n == 0})
            for part in self.pins.get("shard_ranks", ()):
                if part not in parts:
                    rules.refuse("shards", f"shard_ranks={part}")
            found += [(zero, part) for part in self.values("shard_ranks", parts)]
        return found

    def layout(self, inside: Inside, outside: Row, cut: Any = (), recomputed: Any = ()) -> ParallelLayout:
        """The layout as the estimate takes it. `outside`: of one schedule, or of none that is told."""
        pp, vpp, dp, count, zero, shard_ranks, schedules = outside
        made = inside.layout(self.base)
        again = "none" if made.recompute == "full" and not any(recomputed) else made.recompute
        return replace(
            made, devices=inside.tp * inside.cp * dp * pp, global_batch=count * dp * inside.micro_batch, pp=pp, vpp=vpp,
            schedule="".join(names_of(schedules)[:1]), zero=zero, fsdp=zero == 3, shard_ranks=shard_ranks,
            cut=tuple(cut), recompute=again,
            recomputed=tuple(recomputed) if again == "full" else (),
        )  # fmt: skip


@lru_cache(maxsize=64)
def _divisors(number: int) -> list[int]:
    low = [n for n in range(1, isqrt(number) + 1) if number % n == 0]
    return sorted({*low, *(number // n for n in low)})


def domains(cluster: Cluster) -> list[int]:
    """Devices of one domain of every tier but the outermost."""
    return [tier.size for tier in cluster.tiers[:-1]]
