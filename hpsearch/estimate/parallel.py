"""`ParallelLayout`: how a training step is split over devices, and which of its parts run how."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from hpsearch.errors import LegalityError
from hpsearch.schedule import KINDS, placement, refusal

RECOMPUTE = ("none", "selective", "full")
OPTIMIZERS = ("adamw", "muon", "momentum", "sgd")
AS_RUN = ("1f1b", "interleaved")
"""Schedules that take any number of micro-batches, as frameworks run them (`pipeline.as_run`)."""

COUNTS = ("devices", "seq_len", "micro_batch", "global_batch", "tp", "pp", "cp", "ep", "etp", "vpp")


@dataclass(frozen=True)
class ParallelLayout:
    """Ranks are placed tp innermost, then cp, then dp, then pp; experts are folded over cp and dp."""

    devices: int
    seq_len: int
    micro_batch: int
    global_batch: int
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int = 1
    vpp: int = 1
    schedule: str = ""
    """Of the pipeline, one of `hpsearch.schedule.KINDS`; "": 1f1b, or interleaved where a rank has virtual stages."""
    sp: bool = False
    """Activations between matmuls are split along the sequence over the tp ranks."""
    cp_kind: str = "ring"
    """ring: keys and values go round beside the computation; gather: they are gathered first; ulysses: heads are
    exchanged for tokens and back."""
    zero: int = 1
    """0: optimizer state on every data rank; 1: sharded; 2: gradients too; 3: parameters too."""
    fsdp: bool = False
    """Parameters are gathered layer by layer, per micro-batch, from fully sharded storage."""
    prefetch: bool = True
    """Gathers of full sharding run ahead, beside compute; else parameter by parameter and waited for, as the first
    versions of ZeRO-3 did."""
    shard_ranks: int = 0
    """Data ranks among which states are sharded (hybrid sharding); 0: all of them."""
    recompute: str = "none"
    """none, selective (what `recompute_parts` names), or full (every layer keeps its input only)."""
    recompute_parts: frozenset[str] = frozenset({"attention"})
    """Of selective recompute: attention (the score matrix), mlp, moe, activation, norm, mla_up; or ops: everything but
    the layer's input and the results of attention and of every second matmul."""
    recompute_share: float = 1.0
    """Share of layers that a full recompute covers."""
    cut: tuple[int, ...] = ()
    """Layers of each of the pp·vpp chunks in model order; (): as even as `stages.chunks` makes them."""
    recomputed: tuple[int, ...] = ()
    """Under full recompute: how many layers of each chunk, its first ones, are computed again; (): the share above."""
    stage_groups: tuple[str, ...] = ()
    """Where a cluster has groups of unlike nodes: of each pipeline rank the group it stands on, several joined by +;
    (): ranks fill the groups in the cluster's order."""
    uneven: tuple[tuple[int, int], ...] = ()
    """(data ranks, micro-batches of each) of the groups in the cluster's order, where they differ; the most of them are
    those of `global_batch`, which then counts rows that nobody has."""
    precision: str = "bf16"
    """bf16, fp16, fp8, mxfp8 or nvfp4: of the matmuls of linear layers. Everything else is 16 bit."""
    optimizer: str = "adamw"
    """adamw, muon, momentum or sgd."""
    moment_element_bytes: int = 4
    """Bytes of one element of a moment: 4, 2, or 1 in 8-bit optimizers."""
    grad_bytes: int = 4
    """Bytes of one element of the accumulated gradient, and of its reduction."""
    flash: bool = True
    """Fused attention; else the score matrix is written out."""
    flash_rate: float = 1.0
    """Rate of the fused kernel over the one the device is described with: first-generation kernels are slower."""
    fused_softmax: bool = True
    """Without flash: mask, scale and softmax in one kernel."""
    fused_norm: bool = True
    fused: bool = True
    """Element-wise chains run as one kernel each (hand-fused or compiled), not op by op; projections of one input
    (query, key and value; gate and up) are one matmul."""
    fused_loss: bool = True
    """Cross-entropy of vocabulary-parallel logits in a kernel or two; else op by op in fp32. Counts where `fused`."""
    dropout: bool = False
    overlap_grad_reduce: bool = False
    overlap_param_gather: bool = False
    overlap_tp: bool = False
    overlap_p2p: bool = True
    overlap_ep: bool = False
    dedup: bool = False
    """Expert dispatch sends a token once to each domain, and arranges tokens by expert as it sends."""
    imbalance: float = 1.0
    """Tokens of the expert rank that has most, over the average of its group: the others wait for it."""
    capacity: float = 0.0
    """Rows that experts have, filled or not, over an even share of the tokens; 0: as many as tokens chose them."""
    graphed: frozenset[str] = frozenset()
    """Blocks whose kernels are captured and issued as one: attention, mlp, mamba, router; all: the whole step."""
    lora: bool = False
    """Only small adapters are trained: no weight gradients of the matrices."""
    trained_parts: str = "step"
    """step; or layer: forward and backward of the layers alone, no optimizer, head or reduction."""
    offload_share: float = 0.0
    """Share of saved activations that live in host memory between forward and backward."""
    loss_kernel: bool = False
    """Fully sharded code that is not compiled: one kernel computes the loss and its gradient in 16 bit."""
    qkv_views: bool = False
    """Values are kept as a view of the projection of queries, keys and values, which so lives as long as they do,
    beside rotated queries and keys; else the attention kernel gets tensors of their own."""
    expandable: bool = True
    """The allocator grows its segments (torch's `expandable_segments`): freed blocks of any size serve again."""

    def __post_init__(self) -> None:
        self._check_numbers()
        inner = self.tp * self.pp * self.cp
        if self.devices % inner:
            raise LegalityError(
                "layout", f"expected tp·pp·cp to divide {self.devices} devices, but {self.tp}·{self.pp}·{self.cp} = "
                f"{inner} does not", "Change one degree.",
            )  # fmt: skip
        if self.global_batch % (self.micro_batch * self.dp):
            raise LegalityError(
                "layout", f"expected whole micro-batches, but {self.global_batch} sequences are not a multiple of "
                f"{self.micro_batch} a micro-batch on {self.dp} data ranks", "Change the batch.",
            )  # fmt: skip
        if self.cp * self.dp * self.tp % (self.ep * self.etp):
            raise LegalityError(
                "layout", f"expected ep·etp to divide dp·cp·tp = {self.dp * self.cp * self.tp}, but ep = {self.ep}, "
                f"etp = {self.etp}", "Lower ep.",
            )  # fmt: skip
        if self.schedule:
            self._check_schedule()
        if self.uneven:
            self._check_uneven()
        if self.recompute not in RECOMPUTE:
            raise LegalityError("layout", f"expected recompute in {RECOMPUTE}, but got {self.recompute!r}", "")
        for name in ("cut", "recomputed"):
            if (found := len(getattr(self, name))) not in (0, self.chunks):
                raise LegalityError(
                    f"layout, {name}", f"expected {self.chunks} numbers (pp·vpp = {self.pp}·{max(self.vpp, 1)}), but "
                    f"found {found}", "Give one for each chunk, or none.",
                )  # fmt: skip
        if self.recomputed and (self.recompute != "full" or self.recompute_share != 1.0):
            how = f"{self.recompute} with a share of {self.recompute_share}"
            raise LegalityError(
                "layout, recomputed", f"expected recompute = full with a share of 1.0 beside it, but found {how}",
                "Legal: recomputed with full recompute, or a share without it.",
            )  # fmt: skip

    def _check_numbers(self) -> None:
        """Made often, so all at once; which one it is only matters when it is refused."""
        counts = (
            self.devices, self.seq_len, self.micro_batch, self.global_batch, self.tp, self.pp, self.cp, self.ep,
            self.etp, self.vpp,
        )  # fmt: skip
        shares = self.recompute_share, self.offload_share
        is_sound = min(counts) >= 1 and 0 <= shares[0] <= 1 and 0 <= shares[1] <= 1 and self.imbalance >= 1
        if is_sound and self.imbalance < inf and 0 <= self.capacity < inf and bool not in map(type, counts):
            return
        for name, found in zip(COUNTS, counts, strict=True):
            if isinstance(found, bool) or found < 1:
                raise LegalityError(
                    f"layout, {name}", f"expected a whole number of 1 or more, but found {found!r}",
                    f"Legal: {name} of 1 and more.",
                )  # fmt: skip
        for name, share in zip(("recompute_share", "offload_share"), shares, strict=True):
            if not 0 <= share <= 1:
                raise LegalityError(f"layout, {name}", f"expected a share of 0 to 1, but found {share}", "0.5 is half.")
        if not 0 <= self.capacity < inf:
            raise LegalityError(
                "layout, capacity", f"expected rows over an even share, 0 for none, but found {self.capacity}",
                "1.25 is usual.",
            )  # fmt: skip
        raise LegalityError(
            "layout, imbalance", f"expected the most over the average, 1 or more, but found {self.imbalance}",
            "1 is even.",
        )  # fmt: skip

    def _check_uneven(self) -> None:
        ranks, most = sum(one for one, _ in self.uneven), max(count for _, count in self.uneven)
        if ranks != self.dp or most != self.micro_batches or self.pp > 1 or self.zero > 1:
            raise LegalityError(
                "layout, uneven", f"expected {self.dp} data ranks with at most {self.micro_batches} micro-batches, pp "
                f"= 1 and ZeRO-0 or 1, but found {ranks} with {most}, pp = {self.pp} and ZeRO-{self.zero}",
                "Give all as many.",
            )  # fmt: skip

    @property
    def rows(self) -> int:
        """Sequences of a step, rows of micro-batches that nobody has not counted."""
        counted = sum(ranks * count for ranks, count in self.uneven) * self.micro_batch
        return counted if self.uneven else self.global_batch

    def _check_schedule(self) -> None:
        """1f1b and interleaved as frameworks run them, whatever the micro-batches; all others as `make_schedule`."""
        kind, pp, vpp = self.schedule, self.pp, max(self.vpp, 1)
        named = f"layout, schedule = {kind}"
        if kind not in KINDS:
            raise LegalityError(named, f"expected one of {', '.join(KINDS)}", "")
        if pp == 1 and kind != "1f1b":
            raise LegalityError(named, "expected a pipeline, but pp = 1", "Legal: 1f1b, or pp of 2 and more.")
        if kind in AS_RUN and pp > 1 and (kind == "interleaved") != (vpp > 1):
            wanted = "vpp = 1" if kind == "1f1b" else "vpp of 2 and more"
            raise LegalityError(named, f"expected {wanted}, but vpp = {vpp}", f"Legal: {wanted}, or another schedule.")
        if kind not in AS_RUN and (refused := refusal(kind, pp, vpp, self.micro_batches)) is not None:
            raise refused

    @property
    def schedule_kind(self) -> str:
        """The schedule by name."""
        return self.schedule or ("interleaved" if self.vpp > 1 and self.pp > 1 else "1f1b")

    @property
    def is_split(self) -> bool:
        """Whether backwards are split into input and weight parts."""
        return KINDS[self.schedule_kind].split

    @property
    def is_vee(self) -> bool:
        """Whether chunks stand in a V, the first and the last on rank 0."""
        return KINDS[self.schedule_kind].vee

    def chunks_of(self, rank: int) -> tuple[int, ...]:
        """Which chunks a pipeline rank has, in model order."""
        if not self.is_vee:
            return tuple(range(rank, self.chunks, self.pp))
        ranks = placement(self.schedule_kind, self.pp, self.vpp)
        return tuple(i for i, other in enumerate(ranks) if other == rank)

    @property
    def dp(self) -> int:
        return self.devices // (self.tp * self.pp * self.cp)

    @property
    def chunks(self) -> int:
        """Runs of layers: one for each virtual stage of each pipeline rank."""
        return self.pp * max(self.vpp, 1)

    @property
    def micro_batches(self) -> int:
        return self.global_batch // (self.micro_batch * self.dp)

    @property
    def tokens(self) -> int:
        """Tokens of one micro-batch on one cp rank."""
        return self.micro_batch * self.seq_len // self.cp

    @property
    def data_ranks(self) -> int:
        """Ranks that hold the same dense parameters: data and context ranks."""
        return self.dp * self.cp

    @property
    def shards(self) -> int:
        return self.shard_ranks or self.data_ranks

    @property
    def expert_data_ranks(self) -> int:
        """Ranks that hold the same experts."""
        return max(1, self.data_ranks * self.tp // (self.ep * self.etp))

    @property
    def routed_share(self) -> float:
        """Rows of the fullest expert rank over an even share of the tokens."""
        return self.capacity or self.imbalance

    @property
    def low_precision(self) -> bool:
        return self.precision not in ("bf16", "fp16")
