"""A published row as a case to predict: shape, layout and cluster, every default that was filled in, or why not."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hpsearch.cluster import Cluster
from hpsearch.cluster.efficiency import generation
from hpsearch.errors import CaptureError, ClusterError, HpsearchError
from hpsearch.estimate import ModelShape, ParallelLayout
from hpsearch.validate.machine import machine

Row = Mapping[str, Any]
NEEDED = ("tp", "pp", "dp", "micro_batch", "global_batch")
PREFETCH_YEAR, FLASH_YEAR, OVERLAP_YEAR, DEDUP_YEAR = 2022, 2023, 2024, 2025
"""From when prefetched gathers, fused attention without dropout (but in GPT-2's blocks, whose recipe has it),
overlapped reductions, and dispatchers that send a token to a node once are what training code does by default."""
LOSS_KERNEL_YEAR = 2023
"""Until when sharded code took its loss kernel along with FlashAttention; later it leaves the loss to torch."""
OWN_TENSORS_YEAR = 2025
"""From when attention takes queries, keys and values as tensors of their own (Transformer Engine), and
recipes set the allocator's expandable segments."""
GRAPH_MONTH = (2026, 6)
"""From when training code for Blackwell captures whole iterations of expert models and overlaps their exchange."""
PARTS = {
    "core_attn": "attention", "attention": "attention", "mlp": "mlp", "moe": "moe", "moe_act": "activation",
    "layernorm": "norm", "mla_up_proj": "mla_up", "op": "ops",
}  # fmt: skip
WRITTEN, BY_OPS = ("torch", "eager", "math", "naive", "local", "fused", "unfused"), ("torch", "eager", "math", "naive")
"""Attention kernels that write the score matrix out ("fused" is the softmax alone), and of those the ones without a
fused softmax."""
PRECISIONS = (
    ("mxfp8", "mxfp8"), ("fp8", "fp8"), ("float8", "fp8"), ("fp4", "nvfp4"), ("bf16", "bf16"), ("bfloat16", "bf16"),
    ("fp16", "fp16"), ("float16", "fp16"), ("half", "fp16"),
)  # fmt: skip
GRAPHS = {"attn": "attention", "mlp": "mlp", "mamba": "mamba", "moe_router": "router", "moe_preprocess": "router"}


FIRST_FLASH, HOPPER_FLASH = 0.5, 1.5
"""Fused attention of the first generation, and the one written for Hopper, over FlashAttention-2 (arXiv 2307.08691,
arXiv 2407.08608)."""


@dataclass(frozen=True)
class _Attention:
    flash: bool
    rate: float
    fused_softmax: bool
    dropout: bool


@dataclass(frozen=True)
class Case:
    row: Row
    shape: ModelShape
    layout: ParallelLayout
    cluster: Cluster
    filled: tuple[str, ...]
    """Defaults, as `name = value`."""

    @property
    def measured_s(self) -> float | None:
        return step_seconds(self.row)

    @property
    def measured_peak_bytes(self) -> float | None:
        found = value(self.row, "result", "peak_mem_GiB")
        return None if found is None else float(found) * 2**30


def value(row: Row, part: str, name: str) -> Any:
    """What the row states, else what its `derived` field computes."""
    stated = row[part].get(name)
    if stated is None:
        stated = row["derived"].get(f"{part}.{name}", {}).get("value")
    return stated


def step_seconds(row: Row) -> float | None:
    found = value(row, "result", "step_time_s")
    return None if found is None else float(found)


def full_layout(row: Row) -> bool:
    """tp, pp, dp, micro-batch and global batch are given or follow from what is given."""
    return all(value(row, "parallel", name) is not None for name in NEEDED)


def scored(row: Row) -> bool:
    """Whether a row counts for step time: a completed run of tier A or B with a step time and a full layout."""
    finished = row["result"]["status"] == "ok" and row["tier"] in ("A", "B")
    return finished and full_layout(row) and step_seconds(row) is not None


def year(row: Row) -> int:
    """When the run was published (round 5 of MLPerf Training was 2025's); by the device's generation where the row does
    not say."""
    text = str(row["source"].get("published") or "")
    if found := re.search(r"20\d\d", text):
        return int(found[0])
    if found := re.match(r"(\d\d)\.(\d\d)", text):
        return 2000 + int(found[1])
    if found := re.match(r"(\d)\.\d$", text):
        return 2020 + int(found[1])
    return {"volta": 2020, "ampere": 2022}.get(generation(row["hardware"]["device"]), 2024)


def month(row: Row) -> tuple[int, int]:
    """Year and month of publication; January where the row gives the year alone."""
    text = str(row["source"].get("published") or "")
    found = re.match(r"(?:20)?(\d\d)[.-](\d\d)", text)
    return (2000 + int(found[1]), int(found[2])) if found else (year(row), 1)


def case(row: Row, shape: ModelShape | str) -> Case | str:
    """The case with the shape of its captured model, or one line that says why the row cannot be predicted."""
    if isinstance(shape, str):
        return shape
    filled: list[str] = []
    try:
        cluster = machine(row["hardware"], filled)
        layout = _Reader(row, filled).layout()
    except (CaptureError, ClusterError, HpsearchError) as error:
        return str(error)
    except _Missing as missing:
        return str(missing)
    return Case(row, shape, layout, cluster, tuple(filled))


class _Missing(Exception):
    pass


@dataclass
class _Reader:
    row: Row
    filled: list[str]

    def given(self, name: str, default: Any) -> Any:
        found = value(self.row, "parallel", name)
        if found is None and default is not None:
            self.filled.append(f"{name} = {default}")
            return default
        return found

    def degree(self, name: str) -> int:
        found = value(self.row, "parallel", name)
        if found is None:
            raise _Missing(f"layout: {name} is not given")
        return int(found)

    def layout(self) -> ParallelLayout:
        row, parallel = self.row, self.row["parallel"]
        if not row.get("seq_len"):
            raise _Missing("sequence length is not given")
        when = year(row)
        tp, pp, cp = self.degree("tp"), self.degree("pp"), int(self.given("cp", 1))
        devices = int(row["hardware"]["devices"])
        sharded = self._sharded()
        attention = self._attention(when)
        recompute, parts, share = self._recompute(when)
        precision = self._precision()
        overlap, extra = parallel.get("overlap") or {}, parallel.get("extra") or {}
        late, compiled = when >= OVERLAP_YEAR, parallel.get("torch_compile")
        vpp = int(self.given("vpp", 1)) if pp > 1 else 1
        return ParallelLayout(
            devices=devices,
            seq_len=int(row["seq_len"]),
            micro_batch=int(self.given("micro_batch", 1)),
            global_batch=self.degree("global_batch"),
            tp=tp,
            pp=pp,
            cp=cp,
            ep=int(parallel.get("ep") or 1),
            etp=int(parallel.get("etp") or 1),
            vpp=vpp,
            sp=bool(self.given("sp", when >= 2022)) and tp > 1,
            zero=self._zero(when, sharded),
            fsdp=sharded,
            prefetch=when >= PREFETCH_YEAR,
            shard_ranks=int(parallel.get("hsdp_shard") or 0),
            recompute=recompute,
            recompute_parts=parts,
            recompute_share=share,
            precision=precision,
            grad_bytes=self._grad_bytes(when, sharded, precision),
            fused_norm=not (compiled is False and "RMS" not in str(extra.get("attention_kernel"))),
            fused=not (compiled is False or (sharded and "torch" in str(parallel.get("fsdp")) and not compiled)),
            fused_loss=late,
            overlap_grad_reduce=bool(_flag(overlap.get("grad_reduce"), late)),
            overlap_param_gather=bool(_flag(overlap.get("param_gather"), late)),
            overlap_tp=bool(_flag(overlap.get("tp_comm"), late and not self._routed())),
            overlap_ep=bool(_flag(overlap.get("ep_a2a"), self._late() and row["kind"] == "moe")),
            dedup=bool(_flag(_deduplicates(extra), when >= DEDUP_YEAR)),
            graphed=self._graphed(),
            lora=row.get("workload") == "lora",
            trained_parts="layer" if str(row.get("workload")).startswith("single-layer") else "step",
            offload_share=self._offload(extra),
            loss_kernel=sharded and when <= LOSS_KERNEL_YEAR,
            qkv_views=when < OWN_TENSORS_YEAR,
            expandable=when >= OWN_TENSORS_YEAR,
            flash=attention.flash,
            flash_rate=attention.rate,
            fused_softmax=attention.fused_softmax,
            dropout=attention.dropout,
        )

    def _precision(self) -> str:
        """The layout's name for what linear layers compute in."""
        stated = str(self.row["precision"].get("compute") or "bf16").lower()
        found = next((name for mark, name in PRECISIONS if mark in stated), None)
        if found is None:
            raise _Missing(f"precision {stated} is not priced")
        return found

    def _sharded(self) -> bool:
        fsdp = str(self.row["parallel"].get("fsdp") or "none").lower()
        return fsdp not in ("none", "false") or self.row["parallel"].get("zero_stage") == 3

    def _graphed(self) -> frozenset[str]:
        """Captured blocks: an implementation, then its scopes."""
        stated = self.row["parallel"].get("cuda_graph")
        if stated is None and self._late():
            return frozenset({"all"} if self.row["kind"] == "moe" else {"attention", "mamba", "router"})
        words = re.findall(r"[a-z_]+", str(stated or "none").lower())
        if words[0] == "none":
            return frozenset()
        if "full_iteration" in words:
            return frozenset({"all"})
        return frozenset(GRAPHS[word] for word in words if word in GRAPHS) or frozenset({"attention", "router"})

    def _late(self) -> bool:
        """Whether the run is one of those that capture whole iterations of experts unless they say otherwise."""
        new = generation(self.row["hardware"]["device"]) == "blackwell" and month(self.row) >= GRAPH_MONTH
        return new and self._routed()

    def _routed(self) -> bool:
        """Experts, or layers of other kinds. Recipes of such models leave the overlap of tensor parallelism off
        (Megatron Bridge: `CommOverlapConfig(tp_comm_overlap=False)`)."""
        return bool(self.row["model"].get("experts")) or self.row["kind"] == "hybrid"

    def _zero(self, when: int, sharded: bool) -> int:
        stage = self.row["parallel"].get("zero_stage")
        if sharded:
            return 3 if stage is None else int(stage)
        if stage is not None:
            return int(stage)
        state = self.row["parallel"].get("distributed_optimizer")
        return int(bool(self.given("distributed_optimizer", when >= FLASH_YEAR) if state is None else state))

    def _grad_bytes(self, when: int, sharded: bool, precision: str) -> int:
        detail = str(self.row["precision"].get("detail") or "")
        if sharded:
            return 4 if "DEFAULT" in detail else 2
        parallel = self.row["parallel"]
        if parallel.get("zero_stage") and not parallel.get("distributed_optimizer"):
            return 2
        if when >= OVERLAP_YEAR and precision not in ("bf16", "fp16"):
            return 2
        return 2 if precision == "fp16" and when < 2022 else 4

    def _offload(self, extra: Mapping[str, Any]) -> float:
        layers = self.row["model"].get("layers")
        if extra.get("cpu_offloading_num_layers") and layers:
            return min(1.0, float(extra["cpu_offloading_num_layers"]) / float(layers))
        return float(extra.get("activation_offload_ratio") or 0.0)

    def _attention(self, when: int) -> _Attention:
        extra = self.row["parallel"].get("extra") or {}
        kernel = str(extra.get("attention_kernel") or extra.get("attention") or "").lower()
        dropout = when < FLASH_YEAR or (self.row["model"].get("position") == "learned" and not self._sharded())
        new = "3" in kernel or (when > FLASH_YEAR and "2" not in kernel)
        rate = 1.0 if "2" in kernel or new else FIRST_FLASH
        if new and generation(self.row["hardware"]["device"]) == "hopper":
            rate = HOPPER_FLASH
        if kernel:
            return _Attention(kernel not in WRITTEN, rate, kernel not in BY_OPS, False)
        return _Attention(when >= FLASH_YEAR, rate, True, dropout)

    def _recompute(self, when: int) -> tuple[str, frozenset[str], float]:
        """(kind, parts of selective, share of layers under full)."""
        stated = self.row["parallel"].get("recompute")
        if stated is None:
            stated = self.given("recompute", "full" if when < 2022 else "none")
        text = str(stated).lower()
        if text.startswith(("none", "no ", "off", "false")):
            return "none", frozenset(), 0.0
        if text.startswith(("full", "true", "all", "every layer")):
            return "full", frozenset(), 1.0
        if text.startswith("selective"):
            words = re.findall(r"[a-z_]+", text.removeprefix("selective"))
            return "selective", frozenset(PARTS[word] for word in words or ["attention"] if word in PARTS), 1.0
        self.filled.append("recompute_share = 0.4")
        return "full", frozenset(), 0.4


def _deduplicates(extra: Mapping[str, Any]) -> bool | None:
    """Whether the named dispatcher sends a token once to each node; None when the row names none."""
    name = str(extra.get("moe_flex_dispatcher_backend") or extra.get("dispatcher") or "").lower()
    return None if not name else "ep" in name


def _flag(stated: Any, default: bool) -> bool:
    return default if stated is None else bool(stated)
