"""`--cluster` and `--devices`: what plans are for. Torch only where this machine is measured."""

from __future__ import annotations

from hpsearch.cli.screen import progress_bar
from hpsearch.cluster import LOCAL, Cluster
from hpsearch.errors import LegalityError


def load_machine(name: str, devices: int) -> Cluster:
    """A shipped or described cluster without torch; `local` is measured when it has not been yet."""
    if name != LOCAL:
        return Cluster.load(name, devices=devices)
    from hpsearch.measure import load_cluster

    with progress_bar(f"measuring this machine with {devices} ranks"):
        return load_cluster(name, devices=devices)


def load_parts(name: str, machine: Cluster, counts: tuple[int, ...]) -> dict[int, Cluster]:
    """`machine` with each of these device counts. LegalityError: which of its unlike devices those are would matter."""
    if machine.groups and (some := [count for count in counts if count != machine.devices]):
        there = ", ".join(f"{one.devices} of {one.name!r}" for one in machine.groups)
        raise LegalityError(
            f"cluster {machine.name}", f"expected devices that are alike, to look at {some[0]} of {machine.devices}, "
            f"but its groups differ: {there}", "Describe one group as a cluster of its own.",
        )  # fmt: skip
    return {count: load_machine(name, count) for count in counts}
