"""The plan file, field by field. Everything that lowering and running need is in it; nothing in it is recomputed.

Layouts are text (`tp:S1 dp_shard:S0`, `R`), placements too (`R,S0->S1`: inputs -> outputs on one axis).
"""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

from hpsearch.schedule import Schedule

SCHEMA = "hpsearch.plan/1"


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class ModelEntry(_Frozen):
    name: str
    fingerprint: str
    """Digest of the captured graph: parameters, shapes, ops, wiring; not of the batch rows."""
    parameters: int
    """Elements, tied tensors once."""
    source: str = ""
    """What `--model` was: a config's file name or module:callable; information only."""


class ClusterEntry(_Frozen):
    name: str
    digest: str
    devices: int
    device: str
    memory_bytes: int
    """Memory of one device that plans may fill."""


class AxisEntry(_Frozen):
    name: str
    size: int
    stride: int
    tier: str
    exchange: str | None = None
    """Of cp: gathered, ring or ulysses, see `layout.EXCHANGES`."""
    order: str | None = None
    """Of cp: head-tail, or absent where a rank has consecutive positions."""
    hops: tuple[int, ...] | None = None
    """Of ep: hops of one copy a domain, outermost first; absent where each copy travels on its own. Of cp, where
    experts are spread over it too: the hops in front of those of ep."""


class InputEntry(_Frozen):
    name: str
    shape: tuple[int, ...]
    """Global shape of one micro-batch."""
    dtype: str
    layout: str


class OffloadEntry(_Frozen):
    """What rests in host memory while it is not needed."""

    blocks: tuple[str, ...] = ()
    """Block classes whose kept activations leave after their forward and are back for their backward."""
    optimizer: bool = False
    """Whether optimizer states are on the device for the update only."""


class CapacityEntry(_Frozen):
    """A fixed number of rows for each expert; see `graph/capacity.py`."""

    factor: float
    """Slots of all experts over the pairs of a token and an expert."""
    slots: dict[str, int]
    """Graph → slots of each of its experts for a row of the batch; they follow from the factor and the model."""


class JobEntry(_Frozen):
    global_batch: int
    """Rows of the batch of one optimizer step, over all ranks and micro-batches."""
    micro_batches: int
    recipe: str
    optimizer: str = "adamw"
    fix: dict[str, str] = {}
    """What the user pinned with --fix."""
    recompute: dict[str, str] = {}
    """Block class → none or full."""
    offload: OffloadEntry | None = None
    """Absent where everything stays on the device."""
    capacity: CapacityEntry | None = None
    """Absent where no token is dropped."""

    @property
    def capacity_factor(self) -> float | None:
        return self.capacity.factor if self.capacity else None


class ParamEntry(_Frozen):
    pattern: str
    """FQN with `*` where instances of a block class differ: `model.layers.*.self_attn.q_proj.weight`."""
    graph: str
    """`outer` or the block class."""
    local: str
    """Parameter name inside that graph."""
    shape: tuple[int, ...]
    count: int
    """How many parameters the pattern stands for."""
    trainable: bool
    stored: str
    """Layout at rest: the master copy, its gradient and its optimizer state."""
    used: str
    """Layout at the op, after the gather."""
    residency: str
    """`stored`: used as stored, no gather. `step`: gathered once a step and kept. `micro_batch`: gathered for forward
    and again for backward of each micro-batch, freed in between."""
    gradient: str
    """Layout in which backward leaves the gradient (P = to be summed over that axis)."""
    reduce: str
    """`step`: accumulate locally, reduce once a step. `micro_batch`: reduce after each backward."""
    aliases: tuple[str, ...] = ()
    """Further names of the same tensors (tied weights): `lm_head.weight` for `model.embed_tokens.weight`."""


class CollectiveEntry(_Frozen):
    kind: str
    axis: str
    phase: str
    """gather, forward, backward or reduce; `step` for the loss itself."""
    what: str
    """Parameter pattern, or graph/value name."""
    dtype: str
    nbytes: int
    """Bytes of one call by the convention of layout/redistribute.py."""
    calls: int
    """Calls in one step on one rank, micro-batches and instances included."""
    seconds: float
    """Predicted seconds of one call, before overlap."""


class PredictedEntry(_Frozen):
    step_s: float
    compute_s: float
    communication_s: float
    exposed_s: float
    """Communication not hidden under compute; step_s = compute_s + exposed_s."""
    bytes: dict[str, int]
    """Peak bytes a device by category: parameters, gradients, optimizer, gathered, buffers, activations, workspace."""
    peak_bytes: int
    priced: str = ""
    """Digest of the whole file but this field, filled in by `Plan`. Any edit by hand changes the file and not this
    field, and so shows: these numbers and the certificate are then of the original."""


class StageEntry(_Frozen):
    blocks: tuple[str, ...]
    """FQN prefixes of the repeated modules that it holds, in call order. Everything else follows from them."""
    parameters: tuple[str, ...]
    """Parameters outside of those that it uses; one that several stages use stands on each of them."""
    takes: tuple[str, ...] = ()
    """Values of the outer graph that come from the stage before, in forward."""
    takes_back: tuple[str, ...] = ()
    """Values that come from the stage behind, in backward."""
    forward_s: float = 0.0
    """Predicted seconds of one micro-batch's forward, and of the two halves of its backward."""
    input_s: float = 0.0
    weight_s: float = 0.0
    step_s: float = 0.0
    """Predicted seconds that it spends once a step: reductions and gathers that nothing hides, the update."""
    hop_s: float = 0.0
    """Predicted seconds until what it gives one micro-batch is at the next stage."""
    bytes: dict[str, int] = {}
    """Peak bytes of a device that holds the stage alone, by category, activations of all micro-batches in flight."""


class PipelineEntry(_Frozen):
    """Pipeline ranks are outermost: the devices of one are neighbours, and each has the plan's mesh."""

    ranks: int
    tier: str
    kind: str
    """The schedule that the actions were made as: gpipe, 1f1b, interleaved, zb-h1, interleaved-zb, zbv, dualpipev."""
    actions: tuple[str, ...]
    """What runs: one line for each pipeline rank, `0F0 0F1 0B0 …` (see hpsearch.schedule)."""
    stages: tuple[StageEntry, ...]

    @property
    def schedule(self) -> Schedule:
        return Schedule.parse("\n".join(self.actions))


class Refusal(_Frozen):
    candidate: str
    """`tp=8 dp_shard=8 micro_batches=4`."""
    reason: str


class CertificateEntry(_Frozen):
    status: str
    """optimal, or feasible with a gap."""
    objective_s: float
    bound_s: float
    gap: float
    space: str
    """The space over which the bound holds, in one sentence."""
    considered: int
    solved: int
    pruned: int
    refused: tuple[Refusal, ...]
    runners_up: tuple[Refusal, ...] = ()
    """The next best candidates with their objective as the reason they lost."""


class PlanFile(_Frozen):
    schema_version: str
    model: ModelEntry
    cluster: ClusterEntry
    mesh: tuple[AxisEntry, ...]
    """Axes in split order, sizes of 1 left out."""
    job: JobEntry
    inputs: tuple[InputEntry, ...]
    parameters: tuple[ParamEntry, ...]
    placements: dict[str, dict[str, dict[str, str]]]
    """graph → step or placeholder name → axis → rule text. Ops: `R,S0->S1`. Placeholders: `->S1`. Axes where everything
    replicates are left out."""
    collectives: tuple[CollectiveEntry, ...]
    predicted: PredictedEntry
    certificate: CertificateEntry
    pipeline: PipelineEntry | None = None
    """Stages and schedule; absent where one mesh holds the whole model."""
    environment: dict[str, str] = {}
    """Variable of the launch → what it may be if it is set, where the plan's overlap rests on it; see
    `hpsearch.plan.environment`."""
    versions: dict[str, str] = {}
    """hpsearch, torch, transformers that made the graph; a difference is reported, not refused."""
