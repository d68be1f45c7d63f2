"""A plan that is given decides; what is asked for beside it may only agree."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from hpsearch.errors import PlanError
from hpsearch.layout import Layout
from hpsearch.plan import Plan, matches
from hpsearch.search.fix import Fix, parse_fix


@dataclass(frozen=True)
class Asked:
    """Arguments of `compile` that the search would have kept; None where nothing was asked."""

    fix: Mapping[str, object] | None = None
    global_batch: int | None = None
    optimizer: str | None = None

    def check(self, plan: Plan, subject: str) -> None:
        """Raises PlanError naming what was asked and what the plan says; LegalityError for a pin that is none."""
        for name, wanted, found in self._pairs(plan):
            if wanted is not None and wanted != found:
                raise PlanError(
                    subject,
                    f"{name}={wanted} was asked for, but the plan has {name}={found}",
                    f"Leave {name} out to run this plan, or search again for it without plan=.",
                )

    def _pairs(self, plan: Plan) -> Iterator[tuple[str, object, object]]:
        job, fix = plan.file.job, parse_fix(self.fix)
        yield "global_batch", self.global_batch, job.global_batch
        yield "optimizer", self.optimizer, job.optimizer
        for axis, size in fix.degrees.items():
            yield axis, size, plan.mesh.size(axis)
        yield "micro_batches", fix.micro_batches, job.micro_batches
        yield "pp", fix.pp if "pp" in fix.text else None, plan.pipeline_ranks
        if (pipeline := plan.file.pipeline) is not None:
            yield "vpp", fix.vpp, len(pipeline.stages) // pipeline.ranks
            yield "schedule", fix.schedule, pipeline.kind
            yield "cut", fix.cut, tuple(len(stage.blocks) for stage in pipeline.stages)
        kept = ", ".join(sorted(set(job.recompute.values()))) or "none"
        # A model without block classes has nothing to run again, whatever is pinned.
        yield "recompute", fix.recompute if job.recompute else None, kept
        yield "offload", fix.offload, _offload(plan)
        if "ep_over" in fix.text:
            yield "ep_over", fix.text["ep_over"], _over(plan)
        yield "capacity", fix.capacity, job.capacity_factor
        yield from _stored(plan, fix)


def _over(plan: Plan) -> str:
    """What experts are spread over, as a pin says it."""
    return "cp" if any(axis.name == "cp" for axis in plan.mesh.expert_axes) else "data"


def _offload(plan: Plan) -> str:
    """As a pin says it."""
    entry = plan.file.job.offload
    words = (
        []
        if entry is None
        else [name for name, is_ in (("activations", entry.blocks), ("optimizer", entry.optimizer)) if is_]
    )
    return "+".join(words) or "none"


def _stored(plan: Plan, fix: Fix) -> Iterator[tuple[str, object, object]]:
    """Pins of stored layouts, by the names that the search takes: a parameter, a pattern, or a module above it."""
    for pin, layout in fix.stored.items():
        touched = [
            entry
            for entry in plan.file.parameters
            if any(pin == n or matches(pin, n) or n.startswith(f"{pin}.") for n in (entry.pattern, *entry.aliases))
        ]
        if not touched:
            plan.parameter(pin)  # says which there are
        for entry in touched:
            if dict(Layout.parse(entry.stored)) != dict(layout):
                yield pin, str(layout), f"{entry.stored} for {entry.pattern}"
