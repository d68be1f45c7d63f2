"""Do the numbers of a plan agree with each other? A prediction adds up, and a certificate proves what it claims.

A certificate that contradicts itself would be believed by whoever reads the plan; it is refused instead.
"""

from __future__ import annotations

from collections.abc import Iterator

from hpsearch.plan.schema import PlanFile

STATUS = ("optimal", "feasible")
ROUNDING = 1e-9
"""Largest relative difference of two floats that say the same."""
ORIGINAL = "These numbers are the search's own; restore them, or search again with `hpsearch plan`."

Fault = tuple[str, str]


def prediction(file: PlanFile) -> Iterator[Fault]:
    """Faults of the predicted step and memory."""
    predicted, cluster = file.predicted, file.cluster
    if not predicted.priced:
        yield "predicted.priced is empty", "Write the plan with hpsearch; the field tells an edit by hand."
    for name, value in (("cluster.memory_bytes", cluster.memory_bytes), ("cluster.devices", cluster.devices)):
        if value < 1:
            yield f"{name}: expected a positive number, but found {value}", "Correct it."
    yield from _negative(
        {f"predicted.{name}": getattr(predicted, name) for name in ("step_s", "compute_s", "communication_s")}
        | {"predicted.exposed_s": predicted.exposed_s, "predicted.peak_bytes": predicted.peak_bytes}
        | {f"predicted.bytes.{name}": value for name, value in predicted.bytes.items()}
    )
    parts = predicted.compute_s + predicted.exposed_s
    if not same(parts, predicted.step_s):
        yield f"predicted.step_s: expected compute_s + exposed_s = {parts:g}, but found {predicted.step_s:g}", ORIGINAL
    total_s = sum(entry.calls * entry.seconds for entry in file.collectives)
    if not same(total_s, predicted.communication_s):
        problem = f"predicted.communication_s: expected calls x seconds of collectives = {total_s:g}, but found"
        yield f"{problem} {predicted.communication_s:g}", ORIGINAL
    filled = sum(predicted.bytes.values())
    if filled != predicted.peak_bytes:
        problem = f"predicted.peak_bytes: expected the sum of predicted.bytes = {filled}, but found"
        yield f"{problem} {predicted.peak_bytes}", ORIGINAL
    if predicted.peak_bytes > cluster.memory_bytes:
        problem = f"predicted.peak_bytes: expected at most cluster.memory_bytes = {cluster.memory_bytes}, but found"
        yield f"{problem} {predicted.peak_bytes}", "A plan fits its devices. " + ORIGINAL


def proof(file: PlanFile) -> Iterator[Fault]:
    """Faults of the certificate."""
    certificate, step_s = file.certificate, file.predicted.step_s
    status, gap = certificate.status, certificate.gap
    objective_s, bound_s = certificate.objective_s, certificate.bound_s
    names = ("objective_s", "bound_s", "gap", "considered", "solved", "pruned")
    yield from _negative({f"certificate.{name}": getattr(certificate, name) for name in names})
    seen = f"{certificate.solved} solved and {certificate.pruned} pruned"
    if not 1 <= certificate.solved <= certificate.considered - certificate.pruned:
        problem = f"certificate: expected one or more solved, and at most {certificate.considered} considered in all"
        yield f"{problem}, but found {seen}", ORIGINAL
    if status not in STATUS:
        yield f"certificate.status: expected {' or '.join(STATUS)}, but found {status!r}", ORIGINAL
    if not same(objective_s, step_s):
        yield f"certificate.objective_s: expected predicted.step_s = {step_s:g}, but found {objective_s:g}", ORIGINAL
    if bound_s > objective_s and not same(bound_s, objective_s):
        problem = f"certificate.bound_s: expected at most objective_s = {objective_s:g}, but found {bound_s:g}"
        yield problem, "A lower bound above the objective bounds nothing. " + ORIGINAL
    right = max(0.0, (objective_s - bound_s) / objective_s) if objective_s else 0.0
    if abs(gap - right) > ROUNDING:
        problem = f"certificate.gap: expected (objective_s - bound_s) / objective_s = {right:g}, but found {gap:g}"
        yield problem, ORIGINAL
    if status == "optimal" and gap:
        yield f"certificate.status: optimal, but the gap is {gap:g}", ORIGINAL


def same(a: float, b: float) -> bool:
    """Equal up to rounding."""
    return abs(a - b) <= ROUNDING * max(abs(a), abs(b))


def _negative(numbers: dict[str, float]) -> Iterator[Fault]:
    for name, number in numbers.items():
        if number < 0:
            yield f"{name}: expected no negative number, but found {number}", "Correct it."
