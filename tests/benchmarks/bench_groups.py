"""Searches on clusters of unlike nodes: `python -m tests.benchmarks.bench_groups`.

Beside the best layout: the best if every device were as the weakest (what an equal split without a pipeline takes), the
same mesh with equal stages where the weakest gates, and the best if every device were as the best.
"""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

from hpsearch.cli.search import in_words
from hpsearch.cluster import Cluster
from hpsearch.cluster.efficiency import efficiency_of
from hpsearch.estimate import ModelShape, ParallelLayout, price
from hpsearch.estimate.shape import transformer
from hpsearch.estimate.stands import tightest
from hpsearch.space import Found, Space, best
from tests.benchmarks.machine import described
from tests.space.naive import step_s
from tests.space.test_groups import JOB, LLAMA_8B, slow_node, two_memories

RESULT = Path(__file__).parent / "results" / "groups.md"
LLAMA_13B = ModelShape("Llama 2 13B", 5120, 40, 40, 128, 32000, transformer(40, 0, 0), ffn=13824)
GAP = 0.01
HEAD = ("model, cluster", "best", "gap", "CPU s", "layout", "stages on", "as if all the weakest", "same mesh, equal",
        "all the best")  # fmt: skip


def searched(shape: ModelShape, cluster: Cluster) -> tuple[Found, float]:
    began = time.process_time()
    found = best(Space(shape, cluster, replace(JOB, dedup=True)), gap=GAP)
    return found, time.process_time() - began


def equal_s(shape: ModelShape, layout: ParallelLayout, cluster: Cluster) -> str:
    """The same mesh with stages of as many layers, and micro-batches for all alike; nothing where it is that itself."""
    even = tuple(shape.layers // layout.chunks + (i < shape.layers % layout.chunks) for i in range(layout.chunks))
    batch = -(-JOB.global_batch // (layout.dp * layout.micro_batch)) * layout.dp * layout.micro_batch
    equal = replace(layout, cut=even, recomputed=(), uneven=(), global_batch=batch)
    if equal == replace(layout, recomputed=()):
        return ""
    held, room = tightest(shape, equal, cluster)
    took = step_s(price(shape, equal, cluster), efficiency_of(cluster.device.name))
    return f"{took:.2f} s" + ("" if held.peak_bytes <= room else ", does not fit")


def row(shape: ModelShape, cluster: Cluster) -> tuple[str, ...]:
    found, cpu_s = searched(shape, cluster)
    layout, names = found.best.layout, tuple(group.name for group in cluster.groups)
    weakest, _ = searched(shape, cluster.among(names))
    alike, _ = searched(shape, replace(cluster, groups=()))
    stands = ", ".join(layout.stage_groups)
    cut = f" {'+'.join(map(str, layout.cut))}" if layout.pp > 1 else ""
    others = (f"{one.best.step_s:.2f} s" for one in (weakest, alike))
    weak, strong = others
    return (
        f"{shape.name}, {' + '.join(names)}", f"{found.best.step_s:.2f} s", f"{found.certificate.gap:.1%}",
        f"{cpu_s:.1f}", in_words(layout) + cut, stands, weak, equal_s(shape, layout, cluster), strong,
    )  # fmt: skip


def main() -> None:
    lines = [f"# Unlike nodes\n\n{described('numpy')}\n", f"{__doc__.partition(chr(10) * 2)[2]}"]
    lines += ["| " + " | ".join(HEAD) + " |", "|" + "---|" * len(HEAD)]
    for shape in (LLAMA_8B, LLAMA_13B):
        for cluster in (two_memories(), slow_node()):
            lines.append("| " + " | ".join(row(shape, cluster)) + " |")
            print(lines[-1], flush=True)
    RESULT.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
