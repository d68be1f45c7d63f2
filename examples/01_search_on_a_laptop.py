"""1. Plan Llama-3.1-8B on 64 GPUs, from a laptop: no GPU, no weights, no network.

python examples/01_search_on_a_laptop.py
"""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import hpsearch

config = LlamaConfig(
    vocab_size=128256,
    hidden_size=4096,
    intermediate_size=14336,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    max_position_embeddings=8192,
    rope_theta=500000.0,
)
with torch.device("meta"):  # shapes alone; nothing of the 16 GB is there
    model = LlamaForCausalLM(config)
    tokens = torch.zeros(128, 8192, dtype=torch.long)

cluster = hpsearch.Cluster.load("h100-sxm-roce400", devices=64)
parallel = hpsearch.compile(model, cluster, example={"input_ids": tokens, "labels": tokens})

print(parallel.plan)
parallel.plan.save("plan.json")
with open("program.py", "w") as file:
    file.write(parallel.program.code)  # what every rank would run, collectives and all
print("Wrote plan.json and program.py. Next: python examples/02_read_a_plan.py")
