"""Small mixtures of experts of five families, and routing that is as uneven as can be."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

import hpsearch
from hpsearch.plan import Plan
from tests.end_to_end import parity, pipelined
from tests.end_to_end.models import OTHERS, VOCAB, Case, _tokens, build

_COMMON = {
    "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "num_hidden_layers": 2,
    "vocab_size": VOCAB, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "experts_implementation": "eager",
}  # fmt: skip


def mixtral() -> Case:
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(**_COMMON, intermediate_size=48, num_local_experts=4, num_experts_per_tok=2)
    return Case(MixtralForCausalLM(config), _tokens())


def qwen3_moe() -> Case:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(**_COMMON, intermediate_size=64, moe_intermediate_size=24, num_experts=8,
                            num_experts_per_tok=3, norm_topk_prob=True)  # fmt: skip
    return Case(Qwen3MoeForCausalLM(config), _tokens())


def deepseek_v3() -> Case:
    """Experts in four groups, of which a token meets two; a shared expert; the first layer is dense."""
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    config = DeepseekV3Config(
        **_COMMON | {"num_key_value_heads": 4, "num_hidden_layers": 3, "head_dim": 8}, intermediate_size=64,
        moe_intermediate_size=24, n_routed_experts=8, num_experts_per_tok=2, n_shared_experts=1, n_group=4,
        topk_group=2, first_k_dense_replace=1, kv_lora_rank=16, q_lora_rank=24, qk_rope_head_dim=8,
        qk_nope_head_dim=8, v_head_dim=8,
    )  # fmt: skip
    return Case(DeepseekV3ForCausalLM(config), _tokens())


def gpt_oss() -> Case:
    from transformers import GptOssConfig, GptOssForCausalLM

    config = GptOssConfig(**_COMMON, intermediate_size=24, num_local_experts=4, num_experts_per_tok=2,
                          sliding_window=4)  # fmt: skip
    return Case(GptOssForCausalLM(config), _tokens())


def llama4() -> Case:
    from transformers import Llama4ForCausalLM, Llama4TextConfig

    config = Llama4TextConfig(**_COMMON, intermediate_size=24, intermediate_size_mlp=64, num_local_experts=4,
                              num_experts_per_tok=1, interleave_moe_layer_step=1, use_qk_norm=True,
                              attention_chunk_size=8)  # fmt: skip
    return Case(Llama4ForCausalLM(config), _tokens())


EXPERTS: dict[str, Callable[[], Case]] = {
    f.__name__: f for f in (mixtral, qwen3_moe, deepseek_v3, gpt_oss, llama4)
}  # fmt: skip


def skewed(family: str) -> Case:
    """The family with one expert that every token meets and one that none does: all tokens have a large feature 0."""
    case = EXPERTS[family]()
    with torch.no_grad():
        case.model.get_input_embeddings().weight[:, 0] += 5.0
        for name, module in case.model.named_modules():
            if name.endswith(("gate", "router")):
                module.weight[0, 0] += 20.0
                module.weight[1, 0] -= 20.0
                if hasattr(module, "e_score_correction_bias"):
                    module.e_score_correction_bias[:2] = torch.tensor([4.0, -4.0])
    return case


def llama4_top2() -> Case:
    from transformers import Llama4ForCausalLM

    case = llama4()
    case.model.config.num_experts_per_tok = 2
    return Case(Llama4ForCausalLM(case.model.config), case.batch)


OTHERS.update(EXPERTS | {"llama4_top2": llama4_top2})
OTHERS.update({f"{name}_skewed": partial(skewed, name) for name in EXPERTS})
parity.DOUBLED.update(name for family in EXPERTS for name in OTHERS if name.startswith(family))


def compare(family: str, recipe: str, plan: bytes, path: str) -> dict[str, float]:
    """`parity.compare` for the families of this file; runs on every rank."""
    return compare_all(family, recipe, [plan], path)[0]


def compare_all(family: str, recipe: str, plans: list[bytes], path: str) -> list[dict[str, float]]:
    """`compare` for one plan after the other."""
    if any(Plan.from_bytes(plan).pipeline_ranks > 1 for plan in plans):
        return [errors for errors, _ in pipelined.compare(family, recipe, plans, path)]
    return parity.compare_all(family, recipe, plans, path)


def losses(family: str, steps: int, plan: bytes | None) -> list[float]:
    """Losses of AdamW steps in fp64, by the plain model without a plan, else by every rank."""
    with parity.double_throughout(family, "fp64"):
        case = build(family, torch.float64)
        model: Any = case.model
        batch = case.batch
        if plan is not None:
            model = hpsearch.compile(case.model, plan=Plan.from_bytes(plan), loss=case.loss, recipe="fp64")
            batch = model.local_rows(case.batch)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        found = []
        for _ in range(steps):
            if plan is None:
                loss = parity.plain_loss(model, batch, case.loss)
                loss.backward()
            else:
                loss = model.step(batch)
            found.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
    return found


def compiled(family: str, plan: bytes, inductor: bool) -> tuple[list[float], dict[str, torch.Tensor], dict[str, float]]:
    """Losses of three steps with other rows each, the last gradients, and seconds of compilation.

    Each rank has a cache of its own: Inductor loads what another process may not have written to its end.
    """
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = tempfile.mkdtemp(prefix="hpsearch-inductor-")
    case = build(family, torch.float32)
    made = Plan.from_bytes(plan)
    parallel = hpsearch.compile(case.model, plan=made, loss=case.loss, recipe="fp32", inductor=inductor)
    found = []
    for turn in range(3):
        batch = {k: v.roll(turn, 0) if isinstance(v, torch.Tensor) else v for k, v in case.batch.items()}
        batch["labels"] = batch["input_ids"] = (batch["input_ids"] * (turn + 1)) % VOCAB
        found.append(parallel.step(parallel.local_rows(batch)).item())
    return found, {n: p.grad.full_tensor() for n, p in parallel.named_parameters()}, parallel.compile_s
