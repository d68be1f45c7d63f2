"""Tiny models of the families that the compiler is held to, with a batch for each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

ROWS, LENGTH, VOCAB = 4, 8, 64


@dataclass
class Case:
    model: nn.Module
    batch: Any
    loss: Any = None
    recipe: str = "fp64"
    """fp32 for models that compute in fp32 whatever their parameters are, bf16 where torch has no other kernel."""


def _tokens(**more: Any) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, VOCAB, (ROWS, LENGTH), generator=generator)
    labels = ids.clone()
    labels[0, :3] = -100
    return {"input_ids": ids, "labels": labels, **more}


def llama() -> Case:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(hidden_size=32, intermediate_size=48, num_attention_heads=4, num_key_value_heads=2,
                         num_hidden_layers=3, vocab_size=VOCAB, pad_token_id=0)  # fmt: skip
    return Case(LlamaForCausalLM(config), _tokens(use_cache=False))


def qwen2() -> Case:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(hidden_size=32, intermediate_size=48, num_attention_heads=4, num_key_value_heads=2,
                         num_hidden_layers=3, vocab_size=VOCAB, tie_word_embeddings=True)  # fmt: skip
    return Case(Qwen2ForCausalLM(config), _tokens(use_cache=False))


def gpt2() -> Case:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_layer=3, n_embd=32, n_head=4, vocab_size=VOCAB, n_positions=16, attn_pdrop=0.0,
                        resid_pdrop=0.0, embd_pdrop=0.0, bos_token_id=0, eos_token_id=0)  # fmt: skip
    return Case(GPT2LMHeadModel(config), _tokens(use_cache=False))


def gemma3() -> Case:
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    config = Gemma3TextConfig(hidden_size=32, intermediate_size=48, num_attention_heads=4, num_key_value_heads=2,
                              num_hidden_layers=6, vocab_size=VOCAB, head_dim=16, sliding_window=4,
                              query_pre_attn_scalar=16, pad_token_id=0)  # fmt: skip
    return Case(Gemma3ForCausalLM(config), _tokens(use_cache=False))


def vit() -> Case:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(hidden_size=32, intermediate_size=48, num_attention_heads=4, num_hidden_layers=3, image_size=8,
                       patch_size=4, num_labels=5, hidden_dropout_prob=0.0,
                       attention_probs_dropout_prob=0.0)  # fmt: skip
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(ROWS, 3, 8, 8, generator=generator)
    return Case(ViTForImageClassification(config), {"pixel_values": images, "labels": torch.tensor([0, 1, 4, 2])})


def t5() -> Case:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(d_model=32, d_kv=8, d_ff=48, num_layers=3, num_heads=4, vocab_size=VOCAB, dropout_rate=0.0,
                      decoder_start_token_id=0, pad_token_id=0)  # fmt: skip
    return Case(T5ForConditionalGeneration(config), _tokens(use_cache=False))


class ConvNet(nn.Module):
    """Convolutions and group norm, no loss of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.stages = nn.Sequential(*(ConvBlock() for _ in range(3)))
        self.head = nn.Linear(8, 5)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.head(self.stages(self.stem(images)).mean((2, 3)))


class ConvBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(2, 8)
        self.conv = nn.Conv2d(8, 8, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.relu(self.conv(self.norm(x)))


def convnet() -> Case:
    generator = torch.Generator().manual_seed(1)
    batch = torch.randn(ROWS, 3, 8, 8, generator=generator), torch.tensor([0, 1, 4, 2])
    return Case(ConvNet(), batch, lambda outputs, batch: nn.functional.cross_entropy(outputs, batch[1]))


def mixtral() -> Case:
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(hidden_size=32, intermediate_size=48, num_attention_heads=4, num_key_value_heads=2,
                           num_hidden_layers=3, vocab_size=VOCAB, num_local_experts=4,
                           num_experts_per_tok=2)  # fmt: skip
    return Case(MixtralForCausalLM(config), _tokens(use_cache=False), recipe="bf16")


def qwen35() -> Case:
    from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

    config = Qwen3_5TextConfig(hidden_size=32, intermediate_size=48, num_attention_heads=4, num_key_value_heads=2,
                               num_hidden_layers=4, vocab_size=VOCAB, head_dim=16, linear_num_key_heads=2,
                               linear_num_value_heads=4, linear_key_head_dim=8, linear_value_head_dim=8,
                               pad_token_id=0)  # fmt: skip
    return Case(Qwen3_5ForCausalLM(config), _tokens(use_cache=False), recipe="fp32")


def whisper() -> Case:
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    config = WhisperConfig(d_model=32, encoder_layers=3, decoder_layers=3, encoder_attention_heads=4,
                           decoder_attention_heads=4, encoder_ffn_dim=48, decoder_ffn_dim=48, vocab_size=VOCAB,
                           num_mel_bins=8, max_source_positions=10, max_target_positions=LENGTH, pad_token_id=0,
                           bos_token_id=1, eos_token_id=2, decoder_start_token_id=1, dropout=0.0,
                           attention_dropout=0.0, activation_dropout=0.0)  # fmt: skip
    generator = torch.Generator().manual_seed(1)
    sound = torch.randn(ROWS, 8, 20, generator=generator)
    return Case(WhisperForConditionalGeneration(config), {"input_features": sound, "labels": _tokens()["labels"]})


def padded_llama() -> Case:
    """A batch as data collators make it: with a padding mask."""
    case = llama()
    mask = torch.ones(ROWS, LENGTH, dtype=torch.long)
    mask[1, 5:] = 0
    return Case(case.model, {**case.batch, "attention_mask": mask})


def bart() -> Case:
    from transformers import BartConfig, BartForConditionalGeneration

    config = BartConfig(vocab_size=VOCAB, d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
                        decoder_attention_heads=4, encoder_ffn_dim=48, decoder_ffn_dim=48, dropout=0.0,
                        max_position_embeddings=32)  # fmt: skip
    return Case(BartForConditionalGeneration(config), _tokens())


FAMILIES = {
    f.__name__: f
    for f in (
        llama, qwen2, gpt2, gemma3, vit, t5, convnet, mixtral, qwen35, whisper, padded_llama, bart,
    )
}  # fmt: skip
