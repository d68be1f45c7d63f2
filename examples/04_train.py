"""4. Train on two ranks, from weights that no rank ever holds whole, and save a checkpoint.

torchrun --nproc-per-node 2 examples/04_train.py
"""

import os

import torch
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

import hpsearch

GLOBAL_BATCH, LENGTH, STEPS = 8, 32, 6

sizes = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2}
with torch.device("meta"):
    model = LlamaForCausalLM(LlamaConfig(vocab_size=256, num_hidden_layers=2, **sizes))

rows = [(torch.arange(LENGTH) * (1 + i % 3) + i) % 256 for i in range(512)]
example = {"input_ids": torch.stack(rows[:GLOBAL_BATCH]), "labels": torch.stack(rows[:GLOBAL_BATCH])}

# Rank 0 searches, everybody gets the same plan. Any torch optimizer works on the parameters: they are DTensors.
parallel = hpsearch.compile(model, "local", recipe="fp32", global_batch=GLOBAL_BATCH, example=example)
optimizer = torch.optim.AdamW(parallel.parameters(), lr=1e-3)

# The sampler deals each rank its rows; ranks that share their rows (tp) are dealt the same ones.
loader = DataLoader(rows, batch_size=parallel.local_batch, sampler=parallel.sampler(rows, seed=0))
for step, tokens in zip(range(STEPS), loader, strict=False):
    loss = parallel.step({"input_ids": tokens, "labels": tokens})
    norm = parallel.clip_grad_norm_(1.0)
    optimizer.step()
    optimizer.zero_grad()
    if os.environ["RANK"] == "0":
        print(f"step {step}: loss {loss.item():.4f}, gradient norm {norm.item():.3f}")

parallel.save("checkpoint", optimizer)
if os.environ["RANK"] == "0":
    print(f"{parallel.plan}\nSaved. Next: torchrun --nproc-per-node 2 examples/05_resume_under_another_plan.py")
