"""`--cluster` and `--devices`: what plans are for. Torch only where this machine is measured."""

from __future__ import annotations

from hpsearch.cli.screen import progress_bar
from hpsearch.cluster import LOCAL, Cluster


def load_machine(name: str, devices: int) -> Cluster:
    """A shipped or described cluster without torch; `local` is measured when it has not been yet."""
    if name != LOCAL:
        return Cluster.load(name, devices=devices)
    from hpsearch.measure import load_cluster

    with progress_bar(f"measuring this machine with {devices} ranks"):
        return load_cluster(name, devices=devices)
