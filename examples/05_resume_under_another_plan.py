"""5. Go on from the checkpoint of example 4 under another plan: tensor parallel now. Nothing is lost, moments included.

torchrun --nproc-per-node 2 examples/05_resume_under_another_plan.py
"""

import os

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import hpsearch

GLOBAL_BATCH, LENGTH = 8, 32

sizes = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2}
with torch.device("meta"):
    model = LlamaForCausalLM(LlamaConfig(vocab_size=256, num_hidden_layers=2, **sizes))

rows = [(torch.arange(LENGTH) * (1 + i % 3) + i) % 256 for i in range(48, 48 + 3 * GLOBAL_BATCH)]
batches = [torch.stack(rows[i : i + GLOBAL_BATCH]) for i in range(0, len(rows), GLOBAL_BATCH)]
example = {"input_ids": batches[0], "labels": batches[0]}

fix = {"tp": 2, "model.layers.*.mlp.down_proj.weight": "tp:S1"}
parallel = hpsearch.compile(model, "local", recipe="fp32", fix=fix, example=example)
optimizer = torch.optim.AdamW(parallel.parameters(), lr=1e-3)
parallel.load("checkpoint", optimizer)

for step, tokens in enumerate(batches):
    loss = parallel.step({"input_ids": tokens, "labels": tokens})  # one global batch on every rank works, too
    parallel.clip_grad_norm_(1.0)
    optimizer.step()
    optimizer.zero_grad()
    if os.environ["RANK"] == "0":
        print(f"step {6 + step}: loss {loss.item():.4f}")

# A plain model again: full tensors on rank 0, under the names that Hugging Face knows.
full = parallel.state_dict(full=True)
if os.environ["RANK"] == "0":
    plain = LlamaForCausalLM(model.config)
    plain.load_state_dict(full)
    print(f"{parallel.plan}\nThe plain model has all {len(full)} tensors.")
