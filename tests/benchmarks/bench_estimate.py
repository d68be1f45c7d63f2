"""Layouts priced in a CPU second, together and one by one: `python -m tests.benchmarks.bench_estimate`."""

from __future__ import annotations

import time

from hpsearch.cluster import Cluster
from hpsearch.estimate import estimate
from hpsearch.estimate.many import estimate_all
from tests.benchmarks.machine import described
from tests.estimate.test_many import EXPERTS, LLAMA, layouts

COUNT = 3000


def main() -> None:
    print(described())
    cluster = Cluster.load("h100-sxm-ib400", devices=256)
    for shape, experts in ((LLAMA, False), (EXPERTS, True)):
        some = layouts(COUNT, 1, experts)
        began = time.process_time()
        estimate_all(shape, some, cluster)
        together = time.process_time() - began
        began = time.process_time()
        for layout in some[: COUNT // 10]:
            estimate(shape, layout, cluster)
        alone = (time.process_time() - began) * 10
        print(f"{shape.name}: {COUNT / together:,.0f} layouts a CPU second, {COUNT / alone:,.0f} one by one")


if __name__ == "__main__":
    main()
