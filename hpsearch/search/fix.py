"""`--fix`: what the user pins, in one spelling everywhere.

`tp=4`, `dp_shard=16`, `dp_replicate=2`, `micro_batches=8`, `recompute=none|full`,
`offload=activations|optimizer|activations+optimizer|none` (to host memory); to cut sequences `cp=2`, and
`cp_kind=gathered|ring|ulysses` for how attention sees keys of other ranks; to spread experts `ep=8`,
`ep_over=data|cp` for whether ranks of cp share them out too (in front of ep), and
`ep_kind=apart|together` for whether copies of a token travel together, `capacity=1.25` for a fixed number of tokens an
expert takes (the factor over an even share; tokens beyond are dropped); for a pipeline `pp=4`, `vpp=2`
(stages on each rank), `schedule=zb-h1` and `cut=3+4+4+2` (repeated blocks of each stage); and `FQN-pattern=layout` for
a parameter's stored layout: `lm_head.weight=R`, `model.layers.*.mlp.up_proj.weight=tp:S0`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf

from hpsearch.cluster.exchange import FORMS
from hpsearch.errors import LegalityError, PlanError
from hpsearch.layout import EXCHANGES, Layout
from hpsearch.layout.mesh import RANK_ORDER
from hpsearch.schedule import KINDS

PIPELINE_KEYS = ("pp", "vpp", "schedule", "cut")
KEYS = (
    *RANK_ORDER,
    "cp_kind",
    "ep_kind",
    "ep_over",
    "capacity",
    *PIPELINE_KEYS,
    "micro_batches",
    "recompute",
    "offload",
)
OFFLOADED = ("none", "activations", "optimizer", "activations+optimizer")


@dataclass(frozen=True)
class Fix:
    degrees: dict[str, int] = field(default_factory=dict)
    micro_batches: int | None = None
    recompute: str | None = None
    stored: dict[str, Layout] = field(default_factory=dict)
    """Parameter pattern → stored layout."""
    text: dict[str, str] = field(default_factory=dict)
    """What was given, for the plan file."""
    cp_kind: str | None = None
    """How attention sees keys of other ranks along cp: one of `layout.EXCHANGES`."""
    ep_kind: str | None = None
    """How tokens go to experts along ep: a form of `Cluster.exchange`."""
    pp: int = 1
    vpp: int | None = None
    schedule: str | None = None
    cut: tuple[int, ...] | None = None
    offload: str | None = None
    """One of OFFLOADED."""
    capacity: float | None = None
    """Slots of all experts over the pairs of a token and an expert (`graph/capacity.py`); None: no token is dropped."""
    over_cp: bool = False
    """Whether experts are spread over cp too."""

    def offloads(self, what: str) -> bool:
        """Whether `what`, activations or optimizer, is pinned to host memory."""
        return self.offload is not None and what in self.offload.split("+")


def parse_fix(given: Mapping[str, object] | None) -> Fix:
    """Reads pins; raises LegalityError naming the key, the value and what would be legal."""
    degrees: dict[str, int] = {}
    stored: dict[str, Layout] = {}
    if given is not None and not isinstance(given, Mapping):
        problem = f"expected a mapping of names to values, but got {given!r}"
        raise LegalityError("fix", problem, 'Write for example fix={"tp": 2}.')
    text = {str(key): str(value) for key, value in (given or {}).items()}
    for key, value in text.items():
        if key in RANK_ORDER:
            degrees[key] = _whole(key, value)
        elif key not in KEYS:
            stored[key] = _stored(key, value)
    recompute = text.get("recompute")
    if recompute not in (None, "none", "full"):
        raise LegalityError(f"fix recompute={recompute}", "expected none or full", "Write --fix recompute=full.")
    cp_kind = text.get("cp_kind")
    if cp_kind is not None and (cp_kind not in EXCHANGES or degrees.get("cp", 1) == 1):
        problem = f"expected one of {', '.join(EXCHANGES)} beside cp of at least 2, but found cp={degrees.get('cp', 1)}"
        raise LegalityError(f"fix cp_kind={cp_kind}", problem, "Write --fix cp=2 --fix cp_kind=ring.")
    ep_kind = text.get("ep_kind")
    if ep_kind not in (None, *FORMS):
        raise LegalityError(f"fix ep_kind={ep_kind}", "expected apart or together", "Leave it out for the quicker one.")
    if ep_kind is not None and degrees.get("ep", 1) == 1:
        problem = f"expected ep of at least 2 beside it, but found ep={degrees.get('ep', 1)}"
        raise LegalityError(f"fix ep_kind={ep_kind}", problem, "Write --fix ep=2 as well.")
    micro = _whole("micro_batches", text["micro_batches"]) if "micro_batches" in text else None
    pp, vpp, kind, cut = _pipeline(text)
    offload = "+".join(sorted(text["offload"].split("+"))) if "offload" in text else None
    if offload not in (None, *OFFLOADED):
        raise LegalityError(f"fix offload={offload}", f"expected one of {', '.join(OFFLOADED)}", "Write one of them.")
    capacity = _capacity(text, degrees, ep_kind)
    over_cp = _over_cp(text, degrees, ep_kind)
    return Fix(
        degrees, micro, recompute, stored, text, cp_kind, ep_kind, pp, vpp, kind, cut, offload, capacity, over_cp
    )


def _over_cp(text: Mapping[str, str], degrees: Mapping[str, int], ep_kind: str | None) -> bool:
    """Whether experts are pinned to cp; a token then goes once to each rank, by cp first."""
    over = text.get("ep_over", "data")
    if over not in ("data", "cp"):
        raise LegalityError(f"fix ep_over={over}", "expected data or cp", "Leave it out for the data ranks alone.")
    if over == "cp" and degrees.get("cp", 1) == 1:
        raise LegalityError("fix ep_over=cp", "expected cp of at least 2 beside it, but found cp=1", "Pin cp=2 too.")
    if over == "cp" and ep_kind == "apart":
        problem = "expected copies of a token to travel together, axis by axis, but found ep_kind=apart"
        raise LegalityError("fix ep_over=cp", problem, "Leave ep_kind out.")
    return over == "cp"


def _capacity(text: Mapping[str, str], degrees: Mapping[str, int], ep_kind: str | None) -> float | None:
    """The pinned factor; it is counted in whole sequences, and every copy of a token has a slot of its own."""
    if "capacity" not in text:
        return None
    subject = f"fix capacity={text['capacity']}"
    try:
        factor = float(text["capacity"])
    except ValueError:
        factor = 0.0
    if not 0 < factor < inf:
        raise LegalityError(subject, "expected a number above 0, of an even share", "Write --fix capacity=1.25.")
    if degrees.get("cp", 1) > 1:
        problem = f"expected whole sequences, in which slots are counted, but found cp={degrees['cp']}"
        raise LegalityError(subject, problem, "Leave one of the two out.")
    if ep_kind == "together":
        problem = "expected each copy of a token on its own, with a slot of its own, but found ep_kind=together"
        raise LegalityError(subject, problem, "Leave one of the two out.")
    return factor


def _pipeline(text: Mapping[str, str]) -> tuple[int, int | None, str | None, tuple[int, ...] | None]:
    """Pins of the pipeline: pp, vpp, schedule, cut."""
    pp = _whole("pp", text.get("pp", "1"))
    kind = text.get("schedule")
    if kind is not None and kind not in KINDS:
        raise LegalityError(f"fix schedule={kind}", f"expected one of {', '.join(KINDS)}", "Write --fix schedule=1f1b.")
    lost = [key for key in PIPELINE_KEYS if key in text and key != "pp"]
    if lost and pp == 1:
        found = f"found pp={pp}" if "pp" in text else "pp is not pinned"
        problem = f"expected pp of at least 2 beside it, but {found}"
        raise LegalityError(f"fix {lost[0]}={text[lost[0]]}", problem, "Write --fix pp=2 as well.")
    cut = tuple(_whole("cut", part) for part in text["cut"].split("+")) if "cut" in text else None
    return pp, _whole("vpp", text["vpp"]) if "vpp" in text else None, kind, cut


def _stored(key: str, value: str) -> Layout:
    """The layout of a parameter's pin. A key without a dot and with no layout for a value is a misspelt degree."""
    try:
        layout = Layout.parse(value)
    except PlanError:
        if "." in key or "*" in key:
            raise
    else:
        unknown = [axis for axis, _ in layout if axis not in RANK_ORDER]
        if unknown:
            problem = f"expected axes out of {', '.join(RANK_ORDER)}, but got {unknown[0]!r}"
            raise LegalityError(f"fix {key}={value}", problem, "Write for example tp:S0.")
        return layout
    raise LegalityError(
        f"fix {key}",
        f"expected one of {', '.join(KEYS)}, or a parameter's name with its layout, but got {key!r} with {value!r}",
        "Write for example --fix tp=4 or --fix lm_head.weight=R.",
    )


def _whole(key: str, value: str) -> int:
    if not (value.isascii() and value.isdecimal()) or int(value) < 1:
        raise LegalityError(f"fix {key}={value}", "expected a whole number of at least 1", f"Write --fix {key}=2.")
    return int(value)
