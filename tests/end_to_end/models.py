"""Small versions of real models whose sizes divide by 2, 3 and 4, each with a global batch of 12 rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

ROWS, LENGTH, VOCAB = 12, 8, 96


@dataclass
class Case:
    model: nn.Module
    batch: Any
    loss: Any = None


def _tokens(**more: Any) -> dict[str, Any]:
    ids = torch.randint(1, VOCAB, (ROWS, LENGTH), generator=torch.Generator().manual_seed(1))
    labels = ids.clone()
    labels[0, :3] = -100
    labels[7, 2:] = -100
    return {"input_ids": ids, "labels": labels, "use_cache": False, **more}


def llama() -> Case:
    from transformers import LlamaConfig, LlamaForCausalLM

    return Case(LlamaForCausalLM(LlamaConfig(**_DECODER, pad_token_id=0)), _tokens())


def qwen2() -> Case:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    return Case(Qwen2ForCausalLM(Qwen2Config(**_DECODER, tie_word_embeddings=True)), _tokens())


_DECODER = {
    "hidden_size": 48, "intermediate_size": 96, "num_attention_heads": 8, "num_key_value_heads": 4,
    "num_hidden_layers": 2, "vocab_size": VOCAB,
}  # fmt: skip


def gpt2() -> Case:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_layer=2, n_embd=48, n_head=4, vocab_size=VOCAB, n_positions=16, attn_pdrop=0.0,
                        resid_pdrop=0.0, embd_pdrop=0.0, bos_token_id=0, eos_token_id=0)  # fmt: skip
    return Case(GPT2LMHeadModel(config), _tokens())


def gemma3() -> Case:
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    config = Gemma3TextConfig(**_DECODER | {"num_hidden_layers": 6}, head_dim=16, sliding_window=4,
                              query_pre_attn_scalar=16, pad_token_id=0)  # fmt: skip
    return Case(Gemma3ForCausalLM(config), _tokens())


def vit() -> Case:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(hidden_size=48, intermediate_size=96, num_attention_heads=4, num_hidden_layers=2, image_size=8,
                       patch_size=4, num_labels=12, hidden_dropout_prob=0.0,
                       attention_probs_dropout_prob=0.0)  # fmt: skip
    return Case(ViTForImageClassification(config), {"pixel_values": _images(), "labels": _classes()})


def t5() -> Case:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(d_model=48, d_kv=12, d_ff=96, num_layers=2, num_heads=4, vocab_size=VOCAB, dropout_rate=0.0,
                      decoder_start_token_id=0, pad_token_id=0)  # fmt: skip
    return Case(T5ForConditionalGeneration(config), _tokens())


class ConvNet(nn.Module):
    """Convolutions and group norm; no loss of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 24, 3, padding=1)
        self.stages = nn.Sequential(*(ConvBlock() for _ in range(2)))
        self.head = nn.Linear(24, 12)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.head(self.stages(self.stem(images)).mean((2, 3)))


class ConvBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(4, 24)
        self.conv = nn.Conv2d(24, 24, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.relu(self.conv(self.norm(x)))


def convnet() -> Case:
    return Case(ConvNet(), (_images(), _classes()), class_loss)


def class_loss(outputs: torch.Tensor, batch: Any) -> torch.Tensor:
    return nn.functional.cross_entropy(outputs, batch[1])


def _images() -> torch.Tensor:
    return torch.randn(ROWS, 3, 8, 8, generator=torch.Generator().manual_seed(1))


def _classes() -> torch.Tensor:
    return torch.randint(0, 12, (ROWS,), generator=torch.Generator().manual_seed(2))


FAMILIES: dict[str, Callable[[], Case]] = {f.__name__: f for f in (llama, qwen2, gpt2, gemma3, vit, t5, convnet)}


def llama_deep() -> Case:
    from transformers import LlamaConfig, LlamaForCausalLM

    return Case(LlamaForCausalLM(LlamaConfig(**_DECODER | {"num_hidden_layers": 5}, pad_token_id=0)), _tokens())


def gpt2_deep() -> Case:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_layer=5, n_embd=48, n_head=4, vocab_size=VOCAB, n_positions=16, attn_pdrop=0.0,
                        resid_pdrop=0.0, embd_pdrop=0.0, bos_token_id=0, eos_token_id=0)  # fmt: skip
    return Case(GPT2LMHeadModel(config), _tokens())


def t5_deep() -> Case:
    """Equally many valid targets in every row, since its own mean is of each micro-batch."""
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(d_model=48, d_kv=12, d_ff=96, num_layers=3, num_heads=4, vocab_size=VOCAB, dropout_rate=0.0,
                      decoder_start_token_id=0, pad_token_id=0)  # fmt: skip
    batch = _tokens()
    batch["labels"] = batch["input_ids"].clone()
    return Case(T5ForConditionalGeneration(config), batch)


class Towers(nn.Module):
    """Three towers: images through a transformer and a projector, then before the text through a language model."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import LlamaConfig, LlamaForCausalLM, ViTConfig, ViTModel

        self.vision = ViTModel(
            ViTConfig(hidden_size=24, intermediate_size=48, num_attention_heads=4, num_hidden_layers=2, image_size=8,
                      patch_size=4, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0),
            add_pooling_layer=False,
        )  # fmt: skip
        self.projector = nn.Sequential(nn.Linear(24, 96), nn.GELU(), nn.Linear(96, 48))
        self.language = LlamaForCausalLM(LlamaConfig(**_DECODER | {"num_hidden_layers": 3}, pad_token_id=0))

    def forward(self, images: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        seen = self.projector(self.vision(images).last_hidden_state)
        told = self.language.get_input_embeddings()(ids)
        hidden = self.language.model(inputs_embeds=torch.cat((seen, told), 1), use_cache=False).last_hidden_state
        return self.language.lm_head(hidden[:, seen.shape[1] :])


def towers() -> Case:
    return Case(Towers(), (_images(), _tokens()["input_ids"]), next_token_loss)


def next_token_loss(outputs: torch.Tensor, batch: Any) -> torch.Tensor:
    return nn.functional.cross_entropy(outputs[:, :-1].flatten(0, 1), batch[1][:, 1:].flatten())


DEEP: dict[str, Callable[[], Case]] = {f.__name__: f for f in (llama_deep, gpt2_deep, t5_deep, towers)}
"""Models with blocks for several stages; they run in the pipelines' tests."""


OTHERS: dict[str, Callable[[], Case]] = {}
"""Families of other files, which add themselves."""


def build(family: str, dtype: torch.dtype) -> Case:
    """The model with every parameter away from zero and one, in `dtype`, the same in every process."""
    torch.manual_seed(0)
    case = (FAMILIES | DEEP | OTHERS)[family]()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in case.model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.add_(noise, alpha=0.05)
    case.model.to(dtype)
    return case
