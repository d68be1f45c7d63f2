"""3. Edit a plan by hand and run it.

python examples/03_edit_a_plan.py            # searches for two ranks of this machine, writes and edits the plan
torchrun --nproc-per-node 2 examples/03_edit_a_plan.py
"""

import json
import os
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import hpsearch
from hpsearch.measure import load_cluster

EDITED = Path("edited.json")


def small_llama() -> torch.nn.Module:
    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=256, num_hidden_layers=2, **sizes))


tokens = torch.arange(8 * 32).reshape(8, 32) % 256
batch = {"input_ids": tokens, "labels": tokens}

if "WORLD_SIZE" not in os.environ:
    cluster = load_cluster("local", devices=2)
    fix = {"dp_shard": 2, "model.layers.*.mlp.*.weight": "R"}  # two data ranks, the MLPs whole to begin with
    parallel = hpsearch.compile(small_llama(), cluster, recipe="fp32", fix=fix, example=batch)
    plan = json.loads(parallel.plan.content)
    for parameter in plan["parameters"]:
        if ".mlp." in parameter["pattern"]:  # we want these cut in two at rest, and gathered once a step
            parameter["stored"], parameter["residency"] = "dp_shard:S0", "step"
    EDITED.write_text(json.dumps(plan))
    print(hpsearch.Plan.load(EDITED))
    print("Now: torchrun --nproc-per-node 2 examples/03_edit_a_plan.py")
else:
    parallel = hpsearch.compile(small_llama(), plan=EDITED, recipe="fp32")
    optimizer = None
    for step in range(3):
        loss = parallel.step(batch)
        optimizer = optimizer or torch.optim.AdamW(parallel.parameters(), lr=1e-3)
        optimizer.step()
        optimizer.zero_grad()
        if os.environ["RANK"] == "0":
            print(f"step {step}: loss {loss.item():.4f}")
    mlp = parallel.get_parameter("model.layers.0.mlp.up_proj.weight")
    if os.environ["RANK"] == "0":
        print(parallel.plan)
        print(f"up_proj {tuple(mlp.shape)} is {mlp.placements}: {tuple(mlp.to_local().shape)} on each rank")
