"""CPU seconds, memory and proof of `hpsearch search`: large jobs, growth with devices and depth, planning again.

    python -m tests.benchmarks.bench_space [--only NAME] [--growth]

Every figure is of a fresh process. "Cold" starts with an empty cache of graphs (imports and capture included), "kept"
with the graph kept. "In buildings" is a cluster beyond the largest that is published: its outer tier is assumed, for
growth alone. Writes results/space.md.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.benchmarks.bench_search import LLAMA_8B, LLAMA_405B
from tests.benchmarks.machine import described

RESULT = Path(__file__).parent / "results" / "space.md"
REPO = Path(__file__).parents[2]
LLAMA_70B = LLAMA_8B | {
    "hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64, "num_hidden_layers": 80,
}  # fmt: skip
"""https://huggingface.co/meta-llama/Llama-3.1-70B/blob/main/config.json"""
QWEN3_30B = {
    "architectures": ["Qwen3MoeForCausalLM"], "attention_bias": False, "decoder_sparse_step": 1, "head_dim": 128,
    "hidden_act": "silu", "hidden_size": 2048, "intermediate_size": 6144, "max_position_embeddings": 40960,
    "mlp_only_layers": [], "model_type": "qwen3_moe", "moe_intermediate_size": 768, "norm_topk_prob": True,
    "num_attention_heads": 32, "num_experts": 128, "num_experts_per_tok": 8, "num_hidden_layers": 48,
    "num_key_value_heads": 4, "rms_norm_eps": 1e-06, "rope_theta": 1000000.0, "tie_word_embeddings": False,
    "vocab_size": 151936,
}  # fmt: skip
"""https://huggingface.co/Qwen/Qwen3-30B-A3B/blob/main/config.json"""
DEEPSEEK_V3 = {
    "architectures": ["DeepseekV3ForCausalLM"], "first_k_dense_replace": 3, "hidden_act": "silu", "hidden_size": 7168,
    "intermediate_size": 18432, "kv_lora_rank": 512, "max_position_embeddings": 163840, "model_type": "deepseek_v3",
    "moe_intermediate_size": 2048, "n_group": 8, "n_routed_experts": 256, "n_shared_experts": 1,
    "norm_topk_prob": True, "num_attention_heads": 128, "num_experts_per_tok": 8, "num_hidden_layers": 61,
    "num_key_value_heads": 128, "num_nextn_predict_layers": 1, "q_lora_rank": 1536, "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64, "rms_norm_eps": 1e-06, "rope_theta": 10000, "routed_scaling_factor": 2.5,
    "tie_word_embeddings": False, "topk_group": 4, "v_head_dim": 128, "vocab_size": 129280,
}  # fmt: skip
"""https://huggingface.co/deepseek-ai/DeepSeek-V3/blob/main/config.json"""


@dataclass(frozen=True)
class Job:
    name: str
    config: dict[str, Any]
    cluster: str
    devices: int
    global_batch: int
    seq_len: int = 4096
    more: tuple[str, ...] = ()


JOBS = (
    Job("405b/1024", LLAMA_405B, "h100-sxm-roce400", 1024, 1024),
    Job("70b/1024", LLAMA_70B, "h100-sxm-roce400", 1024, 2048),
    Job("70b/1016", LLAMA_70B, "h100-sxm-roce400", 1016, 2048),
    Job("qwen3-30b-a3b/256", QWEN3_30B, "h100-sxm-roce400", 256, 1024),
    Job("qwen3-30b-a3b/768 dies", QWEN3_30B, "atlas-800-a3", 768, 1536),
    Job("deepseek-v3/2048", DEEPSEEK_V3, "h800-sxm-ib400", 2048, 15360, more=("--precision", "fp8")),
)
BUILDINGS = "h100-sxm-roce400, buildings"
GROWTH = tuple(
    Job(f"405b/{n} in buildings", LLAMA_405B, BUILDINGS, n, max(n, 1024))
    for n in (8, 64, 512, 1024, 8192, 24576, 131072)
)
"""A sequence for each device, so that data ranks have work whatever their number."""
FABRIC = 'size = { value = 24576, unit = "devices", kind = "published", source = "llama3"'
OUTER = """
[[tiers]]
name = "buildings"
size = { value = 131072, unit = "devices", kind = "published", source = "llama3", note = "eight: a question" }
link = "roce"
bandwidth = { value = 46, unit = "GB/s", kind = "measured", source = "nt290" }
efficiency = { value = 0.143, unit = "fraction", kind = "published", source = "llama3", note = "1 to 7, as among pods" }
latency = { value = 20, unit = "us", kind = "specification", source = "llama3", note = "2 km of fibre and back" }
"""
"""An assumption: nobody has published such a tier. Between parts of 16,384 devices, as many as trained 405B, with the
oversubscription that the same paper states between pods of 3,072 (https://arxiv.org/abs/2407.21783, section 3.3.1)."""
DEPTH = tuple(
    Job(f"70b, {n} layers/1024", LLAMA_70B | {"num_hidden_layers": n}, "h100-sxm-roce400", 1024, 2048)
    for n in (80, 160, 800)
)
HEAD = ("job", "considered", "solved", "gap", "cold, CPU s", "kept, CPU s", "memory, GB", "best")
CONSIDERED = re.compile(r"\(gap (\S+)\), by this cost model\. ([\d,]+) considered, [\d,]+ excluded by bounds, ([\d,]+)")


def measured(job: Job, folder: Path) -> tuple[str, ...]:
    """One row of the table."""
    config = folder / "config.json"
    config.write_text(json.dumps(job.config))
    cache = folder / f"cache {job.name.replace('/', ' ')}"
    command = [
        sys.executable, "-m", "hpsearch", "search", "--model", str(config), "--cluster", job.cluster, "--devices",
        str(job.devices), "--global-batch", str(job.global_batch), "--seq-len", str(job.seq_len), *job.more,
    ]  # fmt: skip
    if job.cluster == BUILDINGS:
        text = (REPO / "cost_models" / "h100-sxm-roce400" / "cluster.toml").read_text()
        assert FABRIC in text
        told = folder / "cluster.toml"
        told.write_text(text.replace(FABRIC, FABRIC.replace("24576", "16384")) + OUTER)
        command[command.index(BUILDINGS)] = str(told)
    seconds = []
    for _ in ("cold", "kept"):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        environment = {**os.environ, "HPSEARCH_CACHE": str(cache), "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    if done.returncode:
        return job.name, "", "", "", *(f"{one:.1f}" for one in seconds), "", done.stderr.strip().splitlines()[-1]
    found = CONSIDERED.search(" ".join(done.stdout.split()))
    assert found is not None, done.stdout
    gap, considered, solved = found.groups()
    best = " ".join(done.stdout.split("\n\n")[0].split("Solved on the way")[0].partition(": ")[2].split())
    memory_gb = after.ru_maxrss * 1024 / 1e9
    return job.name, considered, solved, gap, *(f"{one:.1f}" for one in seconds), f"{memory_gb:.2f}", best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="part of a job's name")
    parser.add_argument("--growth", action="store_true", help="devices and depth too")
    given = parser.parse_args()
    jobs = [job for job in (*JOBS, *((*GROWTH, *DEPTH) if given.growth else ())) if given.only in job.name]
    lines = ["# `hpsearch search`", "", described("numpy"), "", __doc__.split("\n\n")[2].strip(), ""]
    lines += ["| " + " | ".join(HEAD) + " |", "|" + "---|" * len(HEAD)]
    with tempfile.TemporaryDirectory() as folder:
        for job in jobs:
            lines.append("| " + " | ".join(measured(job, Path(folder))) + " |")
            print(lines[-1], flush=True)
    if not given.only:
        RESULT.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
