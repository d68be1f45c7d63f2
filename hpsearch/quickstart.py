"""The main job on one machine: a small Llama, a searched plan, four gloo ranks, next to the single process.

`hpsearch quickstart` runs `search`, then this module under torchrun on every rank, and `train_alone` beside it.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hpsearch.cluster import Cluster
from hpsearch.compiler import compile
from hpsearch.errors import HpsearchError, LaunchError
from hpsearch.plan import Plan

RANKS = 4
ROWS, SEQ_LEN, VOCAB = 16, 64, 512
STEPS = 6
SEED = 0
LEARNING_RATE = 1e-3
TIMEOUT_S = 240.0
"""After which the ranks are ended: they need a fraction of it, so something hangs."""


def small_llama() -> nn.Module:
    """A real Hugging Face Llama, small enough for a laptop: grouped-query attention, four layers, fp32, seeded."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(SEED)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=SEQ_LEN,
        use_cache=False,
    )
    return LlamaForCausalLM(config)


def batch(step: int) -> dict[str, torch.Tensor]:
    """The global batch of one step, the same in every process: counting sequences, which a model can learn."""
    generator = torch.Generator().manual_seed(SEED + step)
    start = torch.randint(VOCAB, (ROWS, 1), generator=generator)
    stride = torch.randint(1, 4, (ROWS, 1), generator=generator)
    tokens = (start + stride * torch.arange(SEQ_LEN)) % VOCAB
    return {"input_ids": tokens, "labels": tokens.clone()}


def search(cluster: Cluster, path: Path) -> Plan:
    """Searches a plan for this machine with four ranks and writes it to `path`.

    On one mesh: ranks that share cores gain little by stages, and gloo of torch 2.13 now and then writes into memory
    that it has freed, the likelier the more messages there are.
    """
    fix = {"pp": 1}
    parallel = compile(small_llama(), cluster, recipe="fp32", global_batch=ROWS, fix=fix, example=batch(0))
    parallel.plan.save(path)
    return parallel.plan


def train_alone() -> list[float]:
    """Losses of the plain model in this process."""
    model = small_llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    losses = []
    for step in range(STEPS):
        loss = model(**batch(step)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def train_here(plan: Path) -> list[float]:
    """Losses of the parallel model; one call on every rank of a launched job."""
    cluster = Cluster.load("local", devices=RANKS)
    parallel = compile(small_llama(), cluster, plan=plan, recipe="fp32", global_batch=ROWS, example=batch(0))
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=LEARNING_RATE)
    losses = []
    for step in range(STEPS):
        loss = parallel.step(parallel.local_rows(batch(step)))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def train_on_ranks(plan: Path) -> list[float]:
    """Losses of `train_here` on four ranks under torchrun. Raises LaunchError when they fail or hang."""
    with tempfile.TemporaryDirectory(prefix="hpsearch-") as folder:
        results = Path(folder) / "losses.json"
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
        command = [*launcher, "-m", "hpsearch.quickstart", str(plan.resolve()), str(results)]
        _run(command)
        found: list[float] = json.loads(results.read_text())
    return found


def _run(command: list[str]) -> None:
    """One launcher in a process group of its own, which ends with it whatever happens."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    process = subprocess.Popen(command, env=environment, text=True, start_new_session=True, **pipes)
    try:
        output, _ = process.communicate(timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        problem = f"the {RANKS} ranks did not end within {TIMEOUT_S:.0f} s"
        raise LaunchError("quickstart", problem, "Is the machine busy? Run it again.") from None
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if process.returncode:
        said = [line for line in output.splitlines() if line.startswith("hpsearch: ")] or output.splitlines()[-15:]
        problem = f"the {RANKS} ranks ended with code {process.returncode}: " + "\n".join(dict.fromkeys(said))
        raise LaunchError("quickstart", problem, "Please report this.")


def main() -> int:
    """One rank: `python -m hpsearch.quickstart PLAN RESULTS` under torchrun."""
    plan, results = map(Path, sys.argv[1:3])
    try:
        losses = train_here(plan)
    except HpsearchError as error:
        print(f"hpsearch: {error}", flush=True)
        return error.exit_code
    if int(os.environ["RANK"]) == 0:
        results.write_text(json.dumps(losses))
    torch.distributed.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
