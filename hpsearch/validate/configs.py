"""A published row's `model` field as a Hugging Face config: the class of transformers that is built like it.

What is predicted is a captured model, the same way as any other; this names the class and its sizes. Latent attention
is DeepSeek-V3's, attention sinks are gpt-oss's, a pattern with Mamba layers is Nemotron-H's; experts with a shared one
or with leading dense layers are GLM-4.5's, without Qwen3's, without a gate Nemotron-H's; a dense model with a gated MLP
is Llama, without one GPT-2 where positions are learned, else Nemotron.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hpsearch.errors import CaptureError

Model = Mapping[str, Any]
Config = dict[str, Any]

_NANO: Config = {
    "architectures": ["NemotronHForCausalLM"], "model_type": "nemotron_h", "vocab_size": 131072, "hidden_size": 2688,
    "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME", "num_attention_heads": 32,
    "num_key_value_heads": 2, "head_dim": 128, "intermediate_size": 1856, "ssm_state_size": 128,
    "mamba_num_heads": 64, "mamba_head_dim": 64, "n_groups": 8, "n_routed_experts": 128, "num_experts_per_tok": 6,
    "moe_intermediate_size": 1856, "moe_shared_expert_intermediate_size": 3712,
}  # fmt: skip
"""https://huggingface.co/nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16 (config.json)"""
_SUPER: Config = _NANO | {
    "hidden_size": 4096, "hybrid_override_pattern": "MEMEMEMEM*E" * 8, "intermediate_size": 2688,
    "mamba_num_heads": 128, "n_routed_experts": 512, "num_experts_per_tok": 22, "moe_intermediate_size": 2688,
    "moe_shared_expert_intermediate_size": 5376, "moe_latent_size": 1024,
}  # fmt: skip
"""https://huggingface.co/nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-BF16 (config.json): 40 Mamba, 40 expert and 8
attention layers; here spread evenly."""
PUBLISHED: dict[str, tuple[Config, int]] = {"Nemotron 3 Nano 30B-A3B": (_NANO, 0), "Nemotron 3 Super": (_SUPER, 1)}
"""Configs of public models that tables of results name without restating them, and their extra-prediction layers."""
SEQ_LEN = 2048
"""Tokens at which models are captured: shapes do not depend on it, but for a learned table of positions (`shapes`)."""
VOCABULARY = 51200
"""Where a row has none because it trained layers alone."""


def config_of(model: Model) -> Config:
    """The config to capture. CaptureError when the row states no shape and the name is not known."""
    if any(model.get(name) is None for name in ("layers", "hidden", "heads")):
        if model.get("name") in PUBLISHED:
            return dict(PUBLISHED[str(model["name"])][0])
        raise CaptureError(f"model {model.get('name')}", "expected its shape, but the row states none", "Fill it in.")
    if model.get("experts") and not (model.get("moe_ffn") or model.get("ffn")):
        raise CaptureError(
            f"model {model.get('name')}", "expected the width of its experts, but the row states none", "Fill it in."
        )
    if model.get("mla"):
        return _latent(model)
    if model.get("experts"):
        return _experts(model)
    if model.get("gated_mlp"):
        return _config("LlamaForCausalLM", "llama", model) | _attention(model)
    return _gpt2(model) if _is_gpt2(model) else _ungated(model)


def _config(architecture: str, kind: str, model: Model, **more: Any) -> Config:
    return {
        "architectures": [architecture],
        "model_type": kind,
        "hidden_size": int(model["hidden"]),
        "num_hidden_layers": int(model["layers"]),
        "vocab_size": int(model.get("vocab") or VOCABULARY),
        "intermediate_size": int(model.get("ffn") or 4 * model["hidden"]),
        "tie_word_embeddings": bool(model.get("tied_embeddings")),
        **more,
    }


def _attention(model: Model) -> Config:
    heads = int(model["heads"])
    return {
        "num_attention_heads": heads,
        "num_key_value_heads": int(model.get("kv_heads") or heads),
        "head_dim": int(model.get("head_dim") or model["hidden"] // heads),
    }


def _is_gpt2(model: Model) -> bool:
    heads, hidden = int(model["heads"]), int(model["hidden"])
    plain = (
        int(model.get("kv_heads") or heads) == heads and int(model.get("head_dim") or hidden // heads) * heads == hidden
    )
    return model.get("position") == "learned" and plain


def _gpt2(model: Model) -> Config:
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "n_embd": int(model["hidden"]),
        "n_layer": int(model["layers"]),
        "n_head": int(model["heads"]),
        "n_inner": int(model.get("ffn") or 4 * model["hidden"]),
        "n_positions": SEQ_LEN,
        "vocab_size": int(model.get("vocab") or VOCABULARY),
        "tie_word_embeddings": bool(model.get("tied_embeddings")),
        **dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0),
    }


def _ungated(model: Model) -> Config:
    return _config("NemotronForCausalLM", "nemotron", model) | _attention(model)


def _experts(model: Model) -> Config:
    count, top_k, width = int(model["experts"]), int(model.get("top_k") or 1), int(model.get("moe_ffn") or model["ffn"])
    shared, dense = int(model.get("shared_expert_ffn") or 0), int(model.get("dense_layers") or 0)
    if "sink" in str(model.get("attention")):
        return _sinks(model, count, top_k, width)
    if model.get("gated_mlp") is False:
        pattern = "*-" * dense + "*E" * (int(model["layers"]) - dense)
        found = _config("NemotronHForCausalLM", "nemotron_h", model) | _attention(model)
        del found["num_hidden_layers"]
        return found | {
            "hybrid_override_pattern": pattern, "n_routed_experts": count, "num_experts_per_tok": top_k,
            "moe_intermediate_size": width, "moe_shared_expert_intermediate_size": shared or width,
            "n_shared_experts": 1 if shared else 0,
        }  # fmt: skip
    if shared or dense:
        return _config("Glm4MoeForCausalLM", "glm4_moe", model) | _attention(model) | {
            "n_routed_experts": count, "num_experts_per_tok": top_k, "moe_intermediate_size": width,
            "n_shared_experts": max(shared // width, 1), "first_k_dense_replace": dense, "n_group": 1, "topk_group": 1,
        }  # fmt: skip
    return _config("Qwen3MoeForCausalLM", "qwen3_moe", model) | _attention(model) | {
        "num_experts": count, "num_experts_per_tok": top_k, "moe_intermediate_size": width,
    }  # fmt: skip


def _sinks(model: Model, count: int, top_k: int, width: int) -> Config:
    layers, windowed = int(model["layers"]), int(model.get("swa_layers") or 0)
    step = layers // windowed if windowed else layers + 1
    kinds = ["sliding_attention" if windowed and i % step == 0 else "full_attention" for i in range(layers)]
    return _config("GptOssForCausalLM", "gpt_oss", model) | _attention(model) | {
        "intermediate_size": width, "num_local_experts": count, "num_experts_per_tok": top_k,
        "sliding_window": int(model.get("sliding_window") or 128), "layer_types": kinds,
    }  # fmt: skip


def _latent(model: Model) -> Config:
    mla, heads = model["mla"], int(model["heads"])
    width = int(model.get("moe_ffn") or model.get("ffn") or 0)
    found = _config("DeepseekV3ForCausalLM", "deepseek_v3", model) | {
        "num_attention_heads": heads, "num_key_value_heads": heads, "q_lora_rank": mla.get("q_lora") or None,
        "kv_lora_rank": int(mla["kv_lora"]), "qk_nope_head_dim": int(mla["qk_nope"]),
        "qk_rope_head_dim": int(mla["qk_rope"]), "v_head_dim": int(mla["v_dim"]),
    }  # fmt: skip
    if not model.get("experts"):
        return found | {"first_k_dense_replace": int(model["layers"])}
    return found | {
        "n_routed_experts": int(model["experts"]), "num_experts_per_tok": int(model.get("top_k") or 1),
        "moe_intermediate_size": width, "n_shared_experts": max(int(model.get("shared_expert_ffn") or 0) // width, 0),
        "first_k_dense_replace": int(model.get("dense_layers") or 0), "n_group": 1, "topk_group": 1,
    }  # fmt: skip
