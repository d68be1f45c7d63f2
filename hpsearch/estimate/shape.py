"""`ModelShape`: the numbers of a transformer that its cost depends on, and its parameters counted from them.

A model is a row of layers; a layer is a few blocks: `attention`, `mlp`, `moe`, `mamba`. A transformer layer is
(attention, mlp) or (attention, moe); layers of a hybrid have one block each. Counts are checked against public totals.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cached_property

Layer = tuple[str, ...]


@dataclass(frozen=True)
class LatentAttention:
    """Multi-head latent attention: queries and keys/values pass through low ranks."""

    q_lora: int
    """0: queries are projected directly."""
    kv_lora: int
    qk_nope: int
    qk_rope: int
    v_dim: int


@dataclass(frozen=True)
class StateSpace:
    """A Mamba-2 block."""

    heads: int
    head_dim: int
    state: int
    groups: int
    conv: int = 4

    @property
    def inner(self) -> int:
        return self.heads * self.head_dim


@dataclass(frozen=True)
class ModelShape:
    name: str
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    pattern: tuple[Layer, ...]
    """Blocks of every layer, in order."""
    ffn: int = 0
    gated: bool = True
    tied: bool = False
    positions: int = 0
    """Rows of a learned position table; 0 with rotary positions."""
    experts: int = 0
    top_k: int = 0
    expert_groups: int = 1
    most_groups: int = 1
    """Of how many of the groups the experts of a token may be."""
    moe_ffn: int = 0
    shared_ffn: int = 0
    """FFN width of the shared expert; 0 without one."""
    moe_latent: int = 0
    """Width in which tokens reach routed experts; 0: `hidden`."""
    moe_gated: bool = True
    mla: LatentAttention | None = None
    mamba: StateSpace | None = None
    mtp_layers: int = 0
    """Extra-prediction layers behind the last; each has a pass through the head of its own."""
    window: int = 0
    window_layers: int = 0
    bias: bool = False
    """Linears and norms have a bias."""
    qkv_bias: bool = False
    qk_norm: bool = False
    expert_bias: bool = False
    sinks: bool = False
    router_bias: bool = False
    causal: bool = True
    """Queries attend to what stands before them."""
    tokens: int = 0
    """Tokens of one row in these blocks, where that is not the sequence of the batch (a sound encoder's frames)."""
    rest: int = 0
    """Parameters outside blocks, vocabulary and last norm."""
    exact: tuple[tuple[str, int], ...] = ()
    """Parameters of a block without routed experts, where a captured graph counted them."""
    variants: tuple[tuple[str, ModelShape], ...] = ()
    """Blocks named `kind#2`, … in the pattern, with sizes of their own."""

    def of(self, block: str) -> ModelShape:
        """The sizes of one block of the pattern."""
        return dict(self.variants).get(block, self)

    @property
    def layers(self) -> int:
        return len(self.pattern)

    @cached_property
    def counts(self) -> Counter[str]:
        """Blocks of each kind in all layers."""
        return Counter(block for layer in self.pattern for block in layer)

    @property
    def q_width(self) -> int:
        return self.heads * ((self.mla.qk_nope + self.mla.qk_rope) if self.mla else self.head_dim)

    @property
    def v_width(self) -> int:
        return self.heads * (self.mla.v_dim if self.mla else self.head_dim)

    @property
    def kv_width(self) -> int:
        return self.kv_heads * self.head_dim

    @property
    def expert_width(self) -> int:
        return self.moe_latent or self.hidden

    def attention_params(self) -> int:
        """Parameters of the projections, biases and inner norms; the block's norm is not among them."""
        h, m = self.hidden, self.mla
        if m is not None:
            q = h * m.q_lora + m.q_lora + m.q_lora * self.q_width if m.q_lora else h * self.q_width
            kv = h * (m.kv_lora + m.qk_rope) + m.kv_lora + m.kv_lora * self.heads * (m.qk_nope + m.v_dim)
            return q + kv + self.v_width * h
        total = h * (self.q_width + 2 * self.kv_width) + self.q_width * h
        if self.bias or self.qkv_bias:
            total += self.q_width + 2 * self.kv_width
        total += h if self.bias or self.sinks else 0
        return total + (2 * self.head_dim if self.qk_norm else 0) + (self.heads if self.sinks else 0)

    def mlp_params(self) -> int:
        mats = 3 if self.gated else 2
        return mats * self.hidden * self.ffn + ((mats - 1) * self.ffn + self.hidden if self.bias else 0)

    def expert_params(self) -> int:
        """One routed expert."""
        mats = 3 if self.moe_gated else 2
        bias = (mats - 1) * self.moe_ffn + self.expert_width if self.expert_bias else 0
        return mats * self.expert_width * self.moe_ffn + bias

    def moe_rest_params(self) -> int:
        """Router, shared expert and latent projections of one block."""
        counted = dict(self.exact).get("moe")
        if counted is not None:
            return counted - self.hidden
        mats = 3 if self.moe_gated else 2
        latent = 2 * self.hidden * self.moe_latent
        bias = self.experts if self.router_bias else 0
        return self.hidden * self.experts + bias + mats * self.hidden * self.shared_ffn + latent

    def mamba_params(self) -> int:
        m = self.mamba
        if m is None:
            return 0
        conv = m.inner + 2 * m.groups * m.state
        return (
            self.hidden * (conv + m.inner + m.heads) + (m.conv + 1) * conv + 3 * m.heads + m.inner * (1 + self.hidden)
        )

    def block_params(self, block: str) -> int:
        """All parameters of one block with its norm."""
        if (own := self.of(block)) is not self:
            return own.block_params(kind_of(block))
        counted = dict(self.exact).get(block)
        if counted is not None:
            return counted + (self.experts * self.expert_params() if block == "moe" else 0)
        norm = self.hidden * (2 if self.bias else 1)
        if block == "attention":
            return self.attention_params() + norm
        if block == "mlp":
            return self.mlp_params() + norm
        if block == "moe":
            return self.moe_rest_params() + self.experts * self.expert_params() + norm
        return self.mamba_params() + norm

    def rank_params(self, block: str, tp: int) -> float:
        """Parameters of one block on one of `tp` ranks: the norm is whole on each of them."""
        norm = self.hidden * (2 if self.bias else 1)
        return (self.block_params(block) - norm) / tp + norm

    @property
    def embedding_params(self) -> int:
        return (self.vocab + self.positions) * self.hidden + self.rest

    @property
    def head_params(self) -> int:
        """The output projection as a tensor of its own, with the last norm."""
        return (0 if self.tied else self.vocab * self.hidden) + self.hidden * (2 if self.bias else 1)

    @cached_property
    def total_params(self) -> int:
        """Every tensor once; extra-prediction layers are not counted."""
        body = sum(count * self.block_params(block) for block, count in self.counts.items())
        return body + self.embedding_params + self.head_params

    @cached_property
    def active_params(self) -> int:
        """Parameters a token passes through."""
        idle = 0
        for block, count in self.counts.items():
            own = self.of(block)
            if kind_of(block) == "moe":
                idle += count * (own.experts - own.top_k) * own.expert_params()
        return self.total_params - idle


def kind_of(block: str) -> str:
    """attention, mlp, moe or mamba."""
    return block.partition("#")[0]


def transformer(layers: int, dense_layers: int, experts: int) -> tuple[Layer, ...]:
    """The pattern of a decoder whose first `dense_layers` have a plain MLP, the others experts if there are any."""
    if not experts:
        return (("attention", "mlp"),) * layers
    return (("attention", "mlp"),) * dense_layers + (("attention", "moe"),) * (layers - dense_layers)


_LETTERS = {"M": ("mamba",), "*": ("attention",), "-": ("mlp",), "E": ("moe",), "O": ("moe",)}


def hybrid(text: str) -> tuple[Layer, ...]:
    """The pattern of a Nemotron-H string: M mamba, * attention, - MLP, E experts."""
    return tuple(_LETTERS[letter] for letter in text)
