"""Whether a profile finds the two nodes of a machine that is emulated here: four gloo ranks in two network namespaces.

    python -m tests.benchmarks.bench_tiers [--mbit N]

Two ranks stand in each namespace and talk over its loopback; between the namespaces lies one link of `--mbit`. All
ranks see one host name, so messages alone can tell. Needs root and iproute2 (Linux); prints the tiers that were found,
and fails if they are not two nodes of two ranks. Nothing is left behind: the namespaces go with this process.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hpsearch.cluster import Cluster

NODES, RANKS_A_NODE = 2, 2
PORT = 29871
TIMEOUT_S = 400


def _run(*command: str) -> None:
    subprocess.run(command, check=True, timeout=30)


@contextmanager
def two_nodes(mbit: int) -> Iterator[list[str]]:
    """Names of two namespaces with a link between them, gone at the end."""
    names = [f"hps{os.getpid()}{end}" for end in "ab"]
    try:
        for name in names:
            _run("ip", "netns", "add", name)
        links = [f"v{os.getpid()}{end}" for end in "ab"]
        _run("ip", "link", "add", links[0], "netns", names[0], "type", "veth", "peer", links[1], "netns", names[1])
        for index, (name, link) in enumerate(zip(names, links, strict=True), start=1):
            inside = ("ip", "-n", name)
            _run(*inside, "link", "set", link, "name", "node0")
            _run(*inside, "addr", "add", f"10.99.0.{index}/24", "dev", "node0")
            _run(*inside, "link", "set", "node0", "up")
            _run(*inside, "link", "set", "lo", "up")
            shape = ("rate", f"{mbit}mbit", "burst", "64kb", "latency", "200ms")
            _run("tc", "-n", name, "qdisc", "add", "dev", "node0", "root", "tbf", *shape)
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False, stderr=subprocess.DEVNULL, timeout=30)


def profile(folder: Path, names: list[str]) -> None:
    """`hpsearch profile --quick` with each rank in the namespace of its node."""
    world = NODES * RANKS_A_NODE
    shared = {
        "WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(RANKS_A_NODE), "MASTER_ADDR": "10.99.0.1",
        "MASTER_PORT": str(PORT), "GLOO_SOCKET_IFNAME": "node0", "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    ranks = []
    try:
        for rank in range(world):
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank % RANKS_A_NODE), **shared}
            command = ["ip", "netns", "exec", names[rank // RANKS_A_NODE], sys.executable, "-m", "hpsearch", "profile"]
            command += ["-o", str(folder), "--quick", "--most-spread", "10"]
            ranks.append(subprocess.Popen(command, env=os.environ | own))
        codes = [rank.wait(TIMEOUT_S) for rank in ranks]
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    if any(codes):
        sys.exit(f"ranks ended with codes {codes}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mbit", type=int, default=400, help="of the link between the nodes")
    given = parser.parse_args()
    if os.geteuid() or not shutil.which("ip") or not shutil.which("tc"):
        sys.exit("needs root, ip and tc")
    with tempfile.TemporaryDirectory(prefix="hpsearch-tiers-") as scratch, two_nodes(given.mbit) as names:
        profile(Path(scratch) / "mine", names)
        cluster = Cluster.load(Path(scratch) / "mine", devices=NODES * RANKS_A_NODE)
    for tier in cluster.tiers:
        print(f"{tier.name}: {tier.size} ranks, {tier.bytes_per_s / 1e6:.0f} MB/s, {tier.latency_s * 1e6:.0f} us")
    sizes = [tier.size for tier in cluster.tiers]
    if sizes != [RANKS_A_NODE, NODES * RANKS_A_NODE]:
        sys.exit(f"expected tiers of {RANKS_A_NODE} and {NODES * RANKS_A_NODE} ranks, but found {sizes}")


if __name__ == "__main__":
    main()
