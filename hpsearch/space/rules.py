"""What makes a layout illegal: each rule once, with its reason, and how often it struck.

`hpsearch rules` prints them. Legal degrees of a field come from here, and so does the text of a refusal.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from hpsearch.estimate import ModelShape
from hpsearch.estimate.parallel import AS_RUN
from hpsearch.estimate.scaled import block_of, is_whole
from hpsearch.estimate.shape import kind_of
from hpsearch.schedule import KINDS


@dataclass(frozen=True)
class Rule:
    name: str
    field: str
    text: str


RULES = (
    Rule("heads", "tp", "tp divides the attention heads: each rank computes whole heads"),
    Rule("kv-heads", "tp", "tp divides the key/value heads, or is a multiple of them: a rank holds whole ones"),
    Rule("ffn", "tp", "tp divides the feed-forward width: ranks multiply equal pieces"),
    Rule("blocks", "tp", "in formats with a scale for each block of elements (mxfp8: 32, nvfp4: 16), ranks have whole "
         "blocks of the width of attention, feed-forward and experts"),
    Rule("ssm-heads", "tp", "tp divides the heads of state-space blocks"),
    Rule("sequence", "cp", "2·cp divides the sequence: a rank has a piece of its head and one of its tail, or causal "
         "attention is out of balance"),
    Rule("sequence-tp", "sp", "sequence sharding needs tp to divide the tokens that a cp rank has of a sequence"),
    Rule("ulysses", "cp_kind", "Ulysses needs cp to divide the heads, and the key/value heads, of a tp rank"),
    Rule("state-space", "cp", "state-space blocks are not cut along the sequence: cp is 1"),
    Rule("experts", "ep", "ep divides the experts: ranks hold equally many"),
    Rule("expert-width", "etp", "expert-tp is 1 or tp, and divides the experts' width"),
    Rule("fold", "ep", "ep·etp divides dp·cp·tp: experts are folded over these ranks"),
    Rule("layers", "pp", "pp is at most the number of layers: no stage is empty"),
    Rule("interleave", "vpp", "virtual stages need a pipeline, pp·vpp layers, and but for a V micro-batches in whole "
         "groups of pp"),
    Rule("schedule", "schedule", "gpipe, 1f1b and zb-h1 have one stage a rank, zbv and dualpipev two, in a V; "
         "interleaved kinds take whole groups of pp micro-batches, zb-h1 at least pp, dualpipev 2·pp: fewer do not "
         "fill all ranks"),
    Rule("batch", "dp", "dp·micro-batch is at most the global batch: no data rank has nothing to do"),
    Rule("shards", "shard_ranks", "states are sharded over all data ranks, or (ZeRO-3) over those of one domain of a "
         "tier, if these divide the data ranks"),
    Rule("rounds", "micro_batch", "at most 16,384 micro-batches in a step: each is on the timeline"),
    Rule("idle", "dp", "at most 4 % of the devices stand idle"),
)  # fmt: skip


EXAMPLES = 6
"""Of what broke a rule that are shown."""
MOST_MICRO_BATCHES = 2**14


@dataclass
class Rules:
    """Legal values of each field; counts what they kept out."""

    refused: Counter[tuple[str, str]] = field(default_factory=Counter)
    """(rule, what) → how often."""
    outsides: dict[tuple[int, ...], NDArray[np.int64]] = field(default_factory=dict)
    """Of a space: (tp, cp, rows) → what may stand around, so that nothing is counted twice."""

    def refuse(self, rule: str, what: str, times: int = 1) -> None:
        self.refused[rule, what] += times

    def _kept(self, name: str, candidates: Iterable[int], broken: dict[str, list[int]]) -> list[int]:
        """Candidates that break no rule. `broken`: rule → candidates that break it."""
        bad: set[int] = set()
        for rule, values in broken.items():
            for value in values:
                if value not in bad:
                    self.refuse(rule, f"{name}={value}")
                bad.add(value)
        return [value for value in candidates if value not in bad]

    def legal_tp(self, shape: ModelShape, devices: int, precision: str = "bf16") -> list[int]:
        owns = [(kind_of(name), shape.of(name)) for name in shape.counts]
        heads = [own.heads for kind, own in owns if kind == "attention"]
        states = [own.mamba.heads for kind, own in owns if kind == "mamba" and own.mamba]
        most = min([devices, *heads, *states])
        candidates = [t for t in range(1, most + 1) if t == 1 or _smooth(t)]
        plain = [own for kind, own in owns if kind == "attention" and own.mla is None]
        widths = [own.v_width if kind == "attention" else own.ffn for kind, own in owns if kind in ("attention", "mlp")]
        block = block_of(precision)
        broken = {
            "heads": [t for t in candidates if any(h % t for h in heads)],
            "kv-heads": [t for t in candidates if any(o.kv_heads % t and t % o.kv_heads for o in plain)],
            "ffn": [t for t in candidates if any(o.ffn % t for kind, o in owns if kind == "mlp")],
            "blocks": [t for t in candidates if not all(is_whole(width, t, block) for width in widths)],
            "ssm-heads": [t for t in candidates if any(h % t for h in states)],
        }
        return self._kept("tp", candidates, broken)

    def legal_cp(self, shape: ModelShape, seq_len: int, devices: int) -> list[int]:
        candidates = [c for c in range(1, max(min(devices, seq_len // 2, 64), 1) + 1) if c == 1 or _smooth(c)]
        states = any(kind_of(name) == "mamba" for name in shape.counts)
        broken = {
            "sequence": [c for c in candidates if c > 1 and seq_len % (2 * c)],
            "state-space": [c for c in candidates if c > 1 and states],
        }
        return self._kept("cp", candidates, broken)

    def legal_sp(self, seq_len: int, tp: int, cp: int) -> list[bool]:
        if tp == 1:
            return [False]
        if seq_len % (cp * tp):
            self.refuse("sequence-tp", f"tp={tp}")
            return [False]
        return [True, False]

    def legal_cp_kinds(self, shape: ModelShape, tp: int, cp: int) -> list[str]:
        if cp == 1:
            return ["ring"]
        owns = [shape.of(name) for name in shape.counts if kind_of(name) == "attention"]
        if all((o.heads // tp) % cp == 0 and max(o.kv_heads // tp, 1) % cp == 0 for o in owns):
            return ["ring", "gather", "ulysses"]
        self.refuse("ulysses", f"cp={cp}")
        return ["ring", "gather"]

    def legal_etp(self, shape: ModelShape, tp: int, precision: str = "bf16") -> list[int]:
        owns = [shape.of(name) for name in shape.counts if kind_of(name) == "moe"]
        if not owns or tp == 1:
            return [1]
        if any(own.moe_ffn % tp for own in owns):
            self.refuse("expert-width", f"etp={tp}")
            return [1]
        if not all(is_whole(own.moe_ffn, tp, block_of(precision)) for own in owns):
            self.refuse("blocks", f"etp={tp}")
            return [1]
        return [1, tp]

    def legal_ep(self, shape: ModelShape, devices: int) -> list[int]:
        owns = [shape.of(name) for name in shape.counts if kind_of(name) == "moe"]
        if not owns:
            return [1]
        most = min([devices, *(own.experts for own in owns)])
        candidates = [e for e in range(1, most + 1) if e == 1 or _smooth(e)]
        return self._kept("ep", candidates, {"experts": [e for e in candidates if any(o.experts % e for o in owns)]})

    def legal_pp(self, shape: ModelShape, devices: int) -> list[int]:
        if devices > shape.layers:
            self.refuse("layers", f"pp>{shape.layers}")
        return list(range(1, min(shape.layers, devices) + 1))

    def legal_vpp(self, shape: ModelShape, pp: int, micro_batches: int, most: int) -> list[int]:
        if pp == 1:
            return [1]
        if micro_batches % pp:
            self.refuse("interleave", f"pp={pp}")
            most = min(most, 2)
        return list(range(1, min(most, shape.layers // pp) + 1))

    def legal_schedules(self, pp: int, vpp: int, micro_batches: int) -> list[str]:
        legal, refused = _schedules(pp, vpp, micro_batches)
        for name in refused:
            self.refuse("schedule", f"{name} of {micro_batches} micro-batches on {pp} ranks")
        return list(legal)

    def rows(self) -> list[tuple[str, str, int]]:
        """(rule, examples, how often), the most frequent first."""
        grouped: dict[str, list[str]] = {}
        counts: Counter[str] = Counter()
        for (rule, what), count in sorted(self.refused.items()):
            grouped.setdefault(rule, []).append(what)
            counts[rule] += count
        shown = {rule: ", ".join(what[:EXAMPLES]) + ", …" * (len(what) > EXAMPLES) for rule, what in grouped.items()}
        return [(rule, shown[rule], count) for rule, count in counts.most_common()]


@lru_cache(maxsize=1 << 16)
def _schedules(pp: int, vpp: int, micro_batches: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Schedules that are legal; and those that only the micro-batches keep out."""
    if pp == 1:
        return ("1f1b",), ()
    usual, legal, refused = "interleaved" if vpp > 1 else "1f1b", [], []
    for name, kind in KINDS.items():
        if name in AS_RUN:
            is_legal = name == usual and not (vpp > 1 and micro_batches % pp)
        else:
            is_legal = kind.takes(pp, vpp, micro_batches)
        if is_legal:
            legal.append(name)
        elif kind.least_virtual <= vpp and (kind.most_virtual is None or vpp <= kind.most_virtual):
            refused.append(name)
    return tuple(legal), tuple(refused)


def _smooth(number: int) -> bool:
    """Whether it is made of 2, 3, 5 and 7: what group sizes of real clusters and models are made of."""
    for prime in (2, 3, 5, 7):
        while number % prime == 0:
            number //= prime
    return number == 1
