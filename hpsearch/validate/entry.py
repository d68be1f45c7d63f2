"""What a published row must look like to be read: the fields that a prediction reads, by type and range.

Fields may be missing or null: then they are not given. What stands there must be what it says it is, because a degree
of 2.5 or a bandwidth of -1 would be priced as something else.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError


def _no_flag(found: Any) -> Any:
    """`true` is no number, whatever Python says."""
    if isinstance(found, bool):
        raise ValueError("should be a number")
    return found


LARGEST = 10**12
"""Above any size of a model, a batch or a machine."""
Count = Annotated[int, BeforeValidator(_no_flag), Field(ge=1, le=LARGEST)]
Size = Annotated[int, BeforeValidator(_no_flag), Field(ge=0, le=LARGEST)]
Rate = Annotated[float, BeforeValidator(_no_flag), Field(ge=0, allow_inf_nan=False)]
Measured = Annotated[float, BeforeValidator(_no_flag), Field(gt=0, allow_inf_nan=False)]
Words = dict[str, Any] | None


class _Entry(BaseModel):
    model_config = ConfigDict(frozen=True, extra="allow")


class LatentEntry(_Entry):
    q_lora: Size | None = None
    kv_lora: Count
    qk_nope: Count
    qk_rope: Count
    v_dim: Count


class ModelEntry(_Entry):
    layers: Count | None = None
    hidden: Count | None = None
    heads: Count | None = None
    kv_heads: Count | None = None
    head_dim: Count | None = None
    ffn: Count | None = None
    vocab: Size | None = None
    experts: Size | None = None
    top_k: Count | None = None
    moe_ffn: Count | None = None
    shared_expert_ffn: Size | None = None
    dense_layers: Size | None = None
    mtp_layers: Size | None = None
    swa_layers: Size | None = None
    sliding_window: Size | None = None
    mla: LatentEntry | None = None


class HardwareEntry(_Entry):
    device: str
    devices: Size | None = None
    devices_per_node: Count | None = None
    memory_GB: Rate | None = None
    hbm_GBps: Rate | None = None
    peak_dense_tflops: dict[str, Rate | None] | None = None
    intra_node_GBps_per_device_one_way: Rate | None = None
    inter_node_GBps_per_device: Rate | None = None


class ExtraEntry(_Entry):
    cpu_offloading_num_layers: Size | None = None
    activation_offload_ratio: Annotated[float, Field(ge=0, le=1)] | None = None


class ParallelEntry(_Entry):
    tp: Count | None = None
    pp: Count | None = None
    dp: Count | None = None
    cp: Count | None = None
    ep: Size | None = None
    etp: Size | None = None
    vpp: Count | None = None
    micro_batch: Count | None = None
    global_batch: Count | None = None
    hsdp_shard: Size | None = None
    zero_stage: Annotated[int, Field(ge=0, le=3)] | None = None
    overlap: Words = None
    extra: ExtraEntry | None = None


class ResultEntry(_Entry):
    status: str
    step_time_s: Measured | None = None
    peak_mem_GiB: Measured | None = None


class DerivedEntry(_Entry):
    value: Any = None


class PublishedEntry(_Entry):
    family: str
    tier: str
    kind: str
    workload: str | None = None
    seq_len: Count | None = None
    source: dict[str, Any]
    model: ModelEntry
    hardware: HardwareEntry
    parallel: ParallelEntry
    precision: dict[str, Any]
    result: ResultEntry
    derived: dict[str, DerivedEntry]


def wrong(row: Any) -> str | None:
    """Why this is no published row, in one line with the field; None if it is one."""
    if not isinstance(row, Mapping):
        return f"expected a JSON object, but found {type(row).__name__}"
    try:
        entry = PublishedEntry.model_validate(row)
        for name, kind in (("parallel", ParallelEntry), ("result", ResultEntry)):
            stated = {key.removeprefix(f"{name}."): one.value for key, one in entry.derived.items()}
            known = {key: stated[key] for key in kind.model_fields if key in stated}
            kind.model_validate({"status": entry.result.status} | known)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field = ".".join(map(str, first["loc"]))
        if first["type"] == "missing":
            return f"{field}: expected this field, but the row has none"
        message = first["msg"].removeprefix("Input ").removeprefix("Value error, ")
        return f"{field}: {message}, but found {str(first['input'])[:40]!r}"
    return None
