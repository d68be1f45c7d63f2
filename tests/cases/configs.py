"""Configs of public models, cut to the fields that decide shapes; each with the page it stands on."""

from __future__ import annotations

from typing import Any

Config = dict[str, Any]

LLAMA_8B: Config = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32,
    "num_hidden_layers": 32, "num_key_value_heads": 8, "rope_theta": 500000.0, "vocab_size": 128256,
    "max_position_embeddings": 131072, "tie_word_embeddings": False,
}  # fmt: skip
"""https://huggingface.co/meta-llama/Llama-3.1-8B/blob/main/config.json"""

LLAMA_405B: Config = LLAMA_8B | {
    "hidden_size": 16384, "intermediate_size": 53248, "num_attention_heads": 128, "num_hidden_layers": 126,
}  # fmt: skip
"""https://huggingface.co/meta-llama/Llama-3.1-405B/blob/main/config.json"""

LLAMA_2_13B: Config = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 5120, "intermediate_size": 13824, "num_attention_heads": 40,
    "num_hidden_layers": 40, "num_key_value_heads": 40, "vocab_size": 32000, "rope_theta": 10000.0,
}  # fmt: skip
"""https://huggingface.co/meta-llama/Llama-2-13b-hf/blob/main/config.json"""

QWEN2_7B: Config = {
    "architectures": ["Qwen2ForCausalLM"], "hidden_size": 3584, "intermediate_size": 18944, "num_attention_heads": 28,
    "num_hidden_layers": 28, "num_key_value_heads": 4, "rope_theta": 1000000.0, "vocab_size": 152064,
    "tie_word_embeddings": False,
}  # fmt: skip
"""https://huggingface.co/Qwen/Qwen2.5-7B/blob/main/config.json"""

QWEN3_0_6B: Config = {
    "architectures": ["Qwen3ForCausalLM"], "head_dim": 128, "hidden_size": 1024, "intermediate_size": 3072,
    "num_attention_heads": 16, "num_hidden_layers": 28, "num_key_value_heads": 8, "rope_theta": 1000000,
    "tie_word_embeddings": True, "vocab_size": 151936,
}  # fmt: skip
"""https://huggingface.co/Qwen/Qwen3-0.6B/blob/main/config.json"""

QWEN3_235B: Config = {
    "architectures": ["Qwen3MoeForCausalLM"], "head_dim": 128, "hidden_size": 4096, "intermediate_size": 12288,
    "moe_intermediate_size": 1536, "num_attention_heads": 64, "num_experts": 128, "num_experts_per_tok": 8,
    "num_hidden_layers": 94, "num_key_value_heads": 4, "rope_theta": 1000000.0, "tie_word_embeddings": False,
    "vocab_size": 151936,
}  # fmt: skip
"""https://huggingface.co/Qwen/Qwen3-235B-A22B/blob/main/config.json"""

DEEPSEEK_V3: Config = {
    "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "first_k_dense_replace": 3,
    "hidden_size": 7168, "intermediate_size": 18432, "kv_lora_rank": 512, "moe_intermediate_size": 2048,
    "n_routed_experts": 256, "n_shared_experts": 1, "num_attention_heads": 128, "num_experts_per_tok": 8,
    "num_hidden_layers": 61, "num_key_value_heads": 128, "num_nextn_predict_layers": 1, "q_lora_rank": 1536,
    "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "tie_word_embeddings": False,
    "vocab_size": 129280,
}  # fmt: skip
"""https://huggingface.co/deepseek-ai/DeepSeek-V3/blob/main/config.json"""

GLM_4_5_AIR: Config = {
    "architectures": ["Glm4MoeForCausalLM"], "model_type": "glm4_moe", "attention_bias": True, "head_dim": 128,
    "hidden_size": 4096, "intermediate_size": 10944, "moe_intermediate_size": 1408, "n_routed_experts": 128,
    "n_shared_experts": 1, "num_experts_per_tok": 8, "first_k_dense_replace": 1, "num_attention_heads": 96,
    "num_hidden_layers": 46, "num_key_value_heads": 8, "num_nextn_predict_layers": 1, "tie_word_embeddings": False,
    "use_qk_norm": False, "vocab_size": 151552,
}  # fmt: skip
"""https://huggingface.co/zai-org/GLM-4.5-Air/blob/main/config.json"""

GPT2: Config = {
    "architectures": ["GPT2LMHeadModel"], "n_embd": 768, "n_head": 12, "n_layer": 12, "n_positions": 1024,
    "vocab_size": 50257, "attn_pdrop": 0.1, "embd_pdrop": 0.1, "resid_pdrop": 0.1,
}  # fmt: skip
"""https://huggingface.co/openai-community/gpt2/blob/main/config.json"""

WHISPER: Config = {
    "architectures": ["WhisperForConditionalGeneration"], "d_model": 1280, "decoder_attention_heads": 20,
    "decoder_ffn_dim": 5120, "decoder_layers": 32, "encoder_attention_heads": 20, "encoder_ffn_dim": 5120,
    "encoder_layers": 32, "max_source_positions": 1500, "max_target_positions": 448, "num_hidden_layers": 32,
    "num_mel_bins": 128, "vocab_size": 51866, "pad_token_id": 50256, "decoder_start_token_id": 50258,
}  # fmt: skip
"""https://huggingface.co/openai/whisper-large-v3/blob/main/config.json"""

VIT: Config = {
    "architectures": ["ViTForImageClassification"], "hidden_size": 768, "image_size": 224, "intermediate_size": 3072,
    "num_attention_heads": 12, "num_channels": 3, "num_hidden_layers": 12, "patch_size": 16,
    "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
}  # fmt: skip
"""https://huggingface.co/google/vit-base-patch16-224/blob/main/config.json"""

GEMMA3_4B: Config = {
    "architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "mm_tokens_per_image": 256,
    "text_config": {
        "hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text", "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024,
    },
    "vision_config": {
        "hidden_size": 1152, "image_size": 896, "intermediate_size": 4304, "model_type": "siglip_vision_model",
        "num_attention_heads": 16, "num_hidden_layers": 27, "patch_size": 14, "vision_use_head": False,
    },
}  # fmt: skip
"""https://huggingface.co/google/gemma-3-4b-it/blob/main/config.json"""

T5_11B: Config = {
    "architectures": ["T5ForConditionalGeneration"], "d_ff": 65536, "d_kv": 128, "d_model": 1024, "dropout_rate": 0.1,
    "feed_forward_proj": "relu", "num_heads": 128, "num_layers": 24, "relative_attention_num_buckets": 32,
    "vocab_size": 32128, "decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 1,
}  # fmt: skip
"""https://huggingface.co/google-t5/t5-11b/blob/main/config.json"""

MAMBA: Config = {
    "architectures": ["MambaForCausalLM"], "hidden_size": 2560, "intermediate_size": 5120, "num_hidden_layers": 64,
    "state_size": 16, "vocab_size": 50280,
}  # fmt: skip
"""https://huggingface.co/state-spaces/mamba-2.8b-hf/blob/main/config.json"""

NEMOTRON_H = """{
  "architectures": ["NemotronHForCausalLM"], "attention_head_dim": 128, "chunk_size": 128, "conv_kernel": 4,
  "expand": 2, "hidden_size": 8192,
  "hybrid_override_pattern": "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-",
  "intermediate_size": 32768, "mamba_head_dim": 64, "mamba_num_heads": 256, "mlp_hidden_act": "relu2", "n_groups": 8,
  "num_attention_heads": 64, "num_hidden_layers": 118, "num_key_value_heads": 8, "ssm_state_size": 256,
  "tie_word_embeddings": false, "time_step_limit": [0.0, Infinity], "vocab_size": 131072
}"""  # noqa: E501 - the pattern is one word
"""https://huggingface.co/nvidia/Nemotron-H-56B-Base-8K/blob/main/config.json, as text: it has a bare Infinity."""

_QWEN25_VL_TEXT: Config = {
    "hidden_size": 3584, "intermediate_size": 18944, "num_attention_heads": 28, "num_hidden_layers": 28,
    "num_key_value_heads": 4, "rope_theta": 1000000.0, "vocab_size": 152064, "use_sliding_window": False,
}  # fmt: skip
_QWEN25_VL_VISION: Config = {
    "depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16, "in_chans": 3,
    "out_hidden_size": 3584, "patch_size": 14, "spatial_merge_size": 2, "spatial_patch_size": 14, "window_size": 112,
    "fullatt_block_indexes": [7, 15, 23, 31], "temporal_patch_size": 2, "tokens_per_second": 2,
}  # fmt: skip
QWEN25_VL_FLAT: Config = {
    "architectures": ["Qwen2_5_VLForConditionalGeneration"], "model_type": "qwen2_5_vl", **_QWEN25_VL_TEXT,
    "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}, "tie_word_embeddings": False,
    "vision_config": _QWEN25_VL_VISION,
}  # fmt: skip
"""https://huggingface.co/Qwen/Qwen2.5-VL-7B-Instruct/blob/main/config.json"""
QWEN25_VL_NESTED: Config = {
    "architectures": ["Qwen2_5_VLForConditionalGeneration"], "model_type": "qwen2_5_vl",
    "text_config": _QWEN25_VL_TEXT
    | {
        "model_type": "qwen2_5_vl_text",
        "rope_scaling": {"mrope_section": [16, 24, 24], "rope_type": "default", "type": "default"},
    },
    "vision_config": _QWEN25_VL_VISION | {"model_type": "qwen2_5_vl"}, "tie_word_embeddings": False,
    "vocab_size": 152064,
}  # fmt: skip
"""The same model as transformers 4.53 and later write it: https://github.com/huggingface/transformers/issues/48392"""
