"""CPU seconds and peak memory from a config to a plan: Llama-3.1 on 8 to 512 devices of h100-sxm-roce400.

    python -m tests.benchmarks.bench_search [--repeat N] [--only 8b/64]

Every figure is of a fresh process, its children included. The parts (imports, capture, strategy, build, solve) come
from one process that runs them in turn; the totals are `python -m hpsearch plan`, with an empty cache of graphs and
with the graph kept. Medians of N runs, the largest memory. Writes results/search.md.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.benchmarks.machine import described

CLUSTER, SEQ_LEN = "h100-sxm-roce400", 8192
RESULT = Path(__file__).parent / "results" / "search.md"
PARTS = ("imports", "capture", "strategy", "build", "solve", "rest")

LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"], "attention_bias": False, "hidden_act": "silu", "hidden_size": 4096,
    "intermediate_size": 14336, "max_position_embeddings": 131072, "mlp_bias": False, "model_type": "llama",
    "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8, "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0, "tie_word_embeddings": False, "vocab_size": 128256,
}  # fmt: skip
"""https://huggingface.co/meta-llama/Llama-3.1-8B/blob/main/config.json, what shapes the training step."""

LLAMA_405B = LLAMA_8B | {
    "hidden_size": 16384, "intermediate_size": 53248, "num_attention_heads": 128, "num_hidden_layers": 126,
}  # fmt: skip
"""https://huggingface.co/meta-llama/Llama-3.1-405B/blob/main/config.json"""


@dataclass(frozen=True)
class Case:
    model: str
    config: Mapping[str, Any]
    devices: int
    global_batch: int

    @property
    def name(self) -> str:
        return f"{self.model}/{self.devices}"


CASES = (
    Case("8b", LLAMA_8B, 8, 128),
    Case("8b", LLAMA_8B, 64, 128),
    Case("8b", LLAMA_8B, 256, 128),
    Case("405b", LLAMA_405B, 512, 512),
)


def cpu_s() -> float:
    """CPU seconds of this process and of its children that have ended."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


# In the measured process


def run_parts(case: Case) -> dict[str, float]:
    """CPU seconds of each part, in this process, which has imported nothing of ours yet."""
    import hpsearch.capture
    import hpsearch.search
    from hpsearch.cluster import Cluster
    from hpsearch.errors import InfeasibleError

    spent = dict.fromkeys(PARTS, 0.0)
    spent["imports"] = cpu_s()  # the interpreter's own start counts
    cluster = Cluster.load(CLUSTER, devices=case.devices)
    before = cpu_s()
    graph = hpsearch.capture.capture_config(case.config, seq_len=SEQ_LEN).graph
    spent["capture"] = cpu_s() - before
    module = sys.modules["hpsearch.search.search"]
    for part, names in {
        "strategy": ("propagate_all", "enumerate_space"),
        "build": ("build",),
        "solve": ("solve",),
    }.items():
        for name in names:
            setattr(module, name, _timed(getattr(module, name), part, spent))
    before, timed = cpu_s(), sum(spent[p] for p in ("strategy", "build", "solve"))
    try:
        hpsearch.search.search(graph, cluster, global_batch=case.global_batch)
    except InfeasibleError as error:
        print(error, file=sys.stderr)
    timed = sum(spent[p] for p in ("strategy", "build", "solve")) - timed
    spent["rest"] = cpu_s() - before - timed
    return spent


def _timed(function: Callable[..., Any], part: str, spent: dict[str, float]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        before = cpu_s()
        try:
            return function(*args, **kwargs)
        finally:
            spent[part] += cpu_s() - before

    return run


# In the measuring process


@dataclass(frozen=True)
class Run:
    cpu_s: float
    peak_bytes: int
    output: str


def run(command: list[str], cache: Path) -> Run:
    """A command in a fresh process, with graphs kept under `cache`."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("OMP_", "MKL_"))} | {"HPSEARCH_CACHE": str(cache)}
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        process = subprocess.Popen([sys.executable, *command], stdout=out, stderr=err, env=env)
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        out.seek(0)
        err.seek(0)
        output, complaint = out.read(), err.read()
    if process.returncode not in (0, 3):  # 3: nothing fits, an answer too
        raise SystemExit(f"{' '.join(command)} failed ({process.returncode}):\n{complaint}")
    return Run(used.ru_utime + used.ru_stime, used.ru_maxrss * 1024, output or complaint)


@dataclass(frozen=True)
class Row:
    case: Case
    parts: dict[str, float]
    cold: Run
    kept: Run
    answer: str


def measure(case: Case, repeat: int, folder: Path) -> Row:
    config, plan = folder / "config.json", folder / "plan.json"
    config.write_text(json.dumps(case.config))
    command = ["-m", "hpsearch", "plan", "--model", str(config), "--cluster", CLUSTER, "--devices", str(case.devices)]
    command += ["--global-batch", str(case.global_batch), "--seq-len", str(SEQ_LEN), "-o", str(plan)]
    parts, cold, kept = [], [], []
    for index in range(repeat):
        alone = run(["-m", "tests.benchmarks.bench_search", "--parts", case.name], folder / f"parts{index}")
        parts.append(json.loads(alone.output.splitlines()[-1]))
        cache = folder / f"plan{index}"
        cold.append(run(command, cache))
        kept.append(run(command, cache))
    medians = {part: statistics.median(p[part] for p in parts) for part in PARTS}
    answer = _answer(json.loads(plan.read_text())) if plan.exists() else "nothing fits"
    return Row(case, medians, _middle(cold), _middle(kept), answer)


def _middle(runs: list[Run]) -> Run:
    """Median seconds, largest memory."""
    return Run(statistics.median(r.cpu_s for r in runs), max(r.peak_bytes for r in runs), runs[-1].output)


def _answer(plan: dict[str, Any]) -> str:
    axes = " x ".join(f"{a['name']}={a['size']}" for a in plan["mesh"])
    again = ", recompute" if "full" in plan["job"]["recompute"].values() else ""
    proof = plan["certificate"]
    gap = "" if proof["status"] == "optimal" else f" gap {proof['gap']:.2%}"
    return (
        f"{axes}, {plan['job']['micro_batches']} micro-batches{again}: {plan['predicted']['step_s']:.3f} s, "
        f"{plan['predicted']['peak_bytes'] / 1e9:.1f} GB, {proof['status']}{gap}"
    )


def table(rows: list[Row]) -> str:
    """Markdown; CPU seconds, and GB of peak resident memory."""
    head = ["model/devices", *PARTS, "plan, cold", "GB", "plan, graph kept", "GB", "answer"]
    lines = [head, ["---"] + ["---:"] * (len(head) - 2) + ["---"]]
    for row in rows:
        figures = [f"{row.parts[p]:.2f}" for p in PARTS]
        totals = [f"{r.cpu_s:.1f}" for r in (row.cold, row.kept)]
        memory = [f"{r.peak_bytes / 1e9:.2f}" for r in (row.cold, row.kept)]
        lines.append([row.case.name, *figures, totals[0], memory[0], totals[1], memory[1], row.answer])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--only", help="one case, by model/devices; the result file is left alone")
    parser.add_argument("--parts", help=argparse.SUPPRESS)
    given = parser.parse_args()
    named = {case.name: case for case in CASES}
    if given.parts:
        print(json.dumps(run_parts(named[given.parts])))
        return
    rows = []
    for case in [named[given.only]] if given.only else CASES:
        with tempfile.TemporaryDirectory() as folder:
            rows.append(measure(case, given.repeat, Path(folder)))
        print(table(rows[-1:]), flush=True)
    if not given.only:
        RESULT.parent.mkdir(exist_ok=True)
        text = f"{described('torch', 'transformers', 'ortools')}\n\nMedians of {given.repeat} runs. {table.__doc__}"
        RESULT.write_text(f"# From a config to a plan\n\n{text}\n\n{table(rows)}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
