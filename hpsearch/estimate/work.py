"""`Work`: what one block of a layer makes one device do for one micro-batch, in FLOPs, bytes and calls.

Matmuls by their local (m, n, k); element-wise chains by the bytes that enter and leave the kernel they run in;
collectives by kind and bytes. Saved bytes are what the backward needs, counted from shapes: matmul inputs, norm
inputs, attention's q, k, v, output and log-sum-exp (or the score matrix), activation inputs.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from hpsearch.estimate.experts import arranged_bytes, clamped_bytes, expert_stalls, quantised_bytes
from hpsearch.estimate.logits import LOSS, LOSS_BY_OPS, LOSS_TORCH, logit_bytes
from hpsearch.estimate.parallel import ParallelLayout
from hpsearch.estimate.ring import ring_bytes, ring_kernels
from hpsearch.estimate.shape import ModelShape, kind_of
from hpsearch.estimate.softmax import softmax_is_fused

Gemm = tuple[float, float, float, float]
"""m, n, k, batch of one product [m, k] @ [k, n]."""


@dataclass
class Work:
    linears: list[Gemm] = field(default_factory=list)
    """Forward products of trained linear layers, in the layout's precision; experts as one batched product."""
    grouped: list[Gemm] = field(default_factory=list)
    """Forward products of routed experts, m rows each of `batch` experts; in the layout's precision."""
    plains: list[Gemm] = field(default_factory=list)
    """Forward products in 16 bit whatever the precision: head, router."""
    core_flops: float = 0.0
    """Attention core, forward; the causal half where the kernel computes only it."""
    core_bytes: float = 0.0
    """What the attention core reads and writes, forward; the score matrix too when it is written out."""
    product_bytes: float = 0.0
    """Of those, what the two products of a written score matrix write and read while they compute."""
    fused_softmax: bool = True
    """Whether mask, scale and softmax of a written score matrix are one kernel."""
    core_sequence: float = 0.0
    """Tokens one query attends to, on average, times local query tokens: kernels are less efficient on few."""
    moved_forward: float = 0.0
    moved_backward: float = 0.0
    moved_weight: float = 0.0
    """Of `moved_backward`, the accumulation of gradients."""
    routed_forward: float = 0.0
    """Of the bytes moved, those of tokens on their way to, through and back from experts."""
    routed_backward: float = 0.0
    routed_activation: float = 0.0
    """Of `routed_forward`, what passes through the experts' non-linearity."""
    kernels_forward: float = 0.0
    kernels_backward: float = 0.0
    stalls_forward: float = 0.0
    """Of the host's work, in kernels, what the device always waits for."""
    stalls_backward: float = 0.0
    tp_forward: list[tuple[str, float]] = field(default_factory=list)
    tp_backward: list[tuple[str, float]] = field(default_factory=list)
    cp_bytes: float = 0.0
    """Keys and values that pass a cp rank in the forward."""
    cp_heads_bytes: float = 0.0
    """What a cp rank sends in the forward to have all tokens of some heads, and to have its tokens back."""
    ep_bytes: float = 0.0
    """Bytes a rank sends in dispatch, and again in combine, of the forward; one copy for each chosen expert."""
    ep_spread: tuple[int, int, int, int] = (1, 1, 1, 1)
    """Experts, how many a token goes to, groups of them, and of how many groups these are at most."""
    saved: float = 0.0
    saved_parts: dict[str, float] = field(default_factory=dict)
    """Of `saved`, what selective recompute of a part drops."""
    copies: float = 0.0
    """Kept besides `saved`: tensors that only live because a view of a part of them does, or twice in two orders."""
    params: float = 0.0
    """Held by one device, dense."""
    expert_params: float = 0.0

    def add(self, moved: tuple[float, float], kernels: tuple[float, float]) -> None:
        """Memory-bound kernels: bytes and launches, each (forward, backward)."""
        self.moved_forward += moved[0]
        self.moved_backward += moved[1]
        self.kernels_forward += kernels[0]
        self.kernels_backward += kernels[1]


def add_norm(work: Work, layout: ParallelLayout, width: float, tokens: float) -> None:
    """A norm over `tokens` rows; unfused: some ten element-wise kernels in fp32."""
    size = width * tokens
    if layout.fused_norm:
        work.add((4 * size, 8 * size), (1, 2))
        extra = 0.0
    else:
        work.add((52 * size, 92 * size), (6, 12))
        extra = 8.0
    work.saved += (2 + extra) * size
    work.saved_parts["norm"] = work.saved_parts.get("norm", 0.0) + (2 + extra) * size


def add_residual(work: Work, layout: ParallelLayout, width: float, tokens: float) -> None:
    size = width * tokens
    dropped = 1 if layout.dropout else 0
    chain = 1.0 if layout.fused else 1.0 + dropped
    work.moved_forward += (6 + 2 * dropped) * size * chain
    work.moved_backward += (6 + 4 * dropped) * size
    work.kernels_forward += chain
    work.kernels_backward += chain
    work.saved += dropped * size


def add_linear(work: Work, layout: ParallelLayout, m: float, n: float, k: float) -> None:
    """A product with trained weights; low precision adds the quantisation of input and output gradient."""
    work.linears.append((m, n, k, 1.0))
    work.kernels_forward += 1
    work.kernels_backward += 2
    if layout.low_precision:
        work.moved_forward += 4 * m * k
        work.moved_backward += 4 * m * n
        work.kernels_forward += 2
        work.kernels_backward += 1


def add_tp_pair(work: Work, layout: ParallelLayout, size: float, inputs: int = 1) -> None:
    """Collectives around `inputs` column-parallel linears on one input of `size` bytes and a row-parallel one; each
    column-parallel linear reduces the gradient of its input by itself."""
    if layout.tp == 1:
        return
    if layout.sp:
        work.tp_forward += [("all_gather", size), ("reduce_scatter", size)]
        work.tp_backward += [("all_gather", size), ("all_gather", size), ("reduce_scatter", size)]
    else:
        work.tp_forward.append(("all_reduce", size))
        work.tp_backward += [("all_reduce", size)] * inputs


def norm_tokens(layout: ParallelLayout) -> float:
    """Rows of the residual stream on one device."""
    return layout.tokens / layout.tp if layout.sp else layout.tokens


def input_tokens(layout: ParallelLayout) -> float:
    """Rows of a column-parallel linear's input kept for the backward: the own part, gathered again when it is needed,
    or, in code that does not bother, what was gathered."""
    return norm_tokens(layout) if layout.fused else float(layout.tokens)


def input_bytes(layout: ParallelLayout) -> float:
    """Kept of one element of a linear's input, for the gradient of its weight: 8 bit where the product is; nothing
    where the weight is frozen."""
    return 0.0 if layout.lora else 1.0 if layout.low_precision else 2.0


def add_core(work: Work, shape: ModelShape, layout: ParallelLayout, q_local: float, kv: float, v_local: float) -> None:
    """The attention core of this rank's heads: fused, or with the score matrix written."""
    s, b, tokens = float(layout.seq_len), float(layout.micro_batch), float(layout.tokens)
    heads = shape.heads / layout.tp
    layers = max(shape.counts["attention"], 1)
    windowed = min(shape.window_layers / layers, 1.0) if shape.window else 0.0
    whole = s / 2 if shape.causal else s
    seen = (1 - windowed) * whole + windowed * min(shape.window, whole)
    if layout.flash:
        work.core_flops += 2 * tokens * seen * (q_local + v_local)
        work.core_bytes += 2 * tokens * (q_local + 2 * kv + v_local)
        work.kernels_forward += 1
        work.kernels_backward += 3
        work.saved += tokens * (2 * v_local + 4 * heads)
        if not layout.fused and not layout.fsdp:
            work.copies += 2 * v_local * tokens
        return
    scores = b * s * s / layout.cp * heads
    work.core_flops += 4 * tokens * s * q_local
    dropped = 1 if layout.dropout else 0
    work.fused_softmax = fused = softmax_is_fused(shape, layout)
    passes = (8 + 5 * dropped) if fused else (30 + 7 * dropped)
    work.core_bytes += passes * scores
    work.product_bytes += 4 * scores
    work.kernels_forward += 3 if fused else 8
    work.kernels_backward += 6 if fused else 12
    kept = (2.0 if layout.fused and fused == layout.fused_softmax else 4.0 if fused else 6.0) + 3 * dropped
    work.saved += 2 * v_local * tokens + kept * scores
    work.saved_parts["attention"] = work.saved_parts.get("attention", 0.0) + kept * scores


def attention(shape: ModelShape, layout: ParallelLayout) -> Work:
    work = Work(params=shape.rank_params("attention", layout.tp))
    h, t, tokens = shape.hidden, layout.tp, float(layout.tokens)
    rows = norm_tokens(layout)
    add_norm(work, layout, h, rows)
    q, v = shape.q_width / t, shape.v_width / t
    if shape.mla is not None:
        kv = _add_latent_projections(work, shape, layout, rows)
    else:
        kv = max(shape.kv_width / t, shape.head_dim)
        work.params += 2 * h * (kv - shape.kv_width / t)  # heads that several ranks hold
        for width in (q + 2 * kv,) if layout.fused else (q, kv, kv):
            add_linear(work, layout, tokens, width, h)
        work.saved += input_bytes(layout) * h * input_tokens(layout) + 2 * tokens * (q + 2 * kv)
    rotary = 0.0 if shape.positions else 1.0
    work.moved_forward += rotary * (4 if layout.fused else 16) * tokens * (q + kv)
    work.moved_backward += rotary * (4 if layout.fused else 16) * tokens * (q + kv)
    if layout.qkv_views and shape.mla is None:
        work.copies += rotary * 2 * tokens * (q + kv)
    if not layout.fused:
        work.moved_forward += 4 * tokens * (q + 2 * kv)
        work.moved_backward += 4 * tokens * (q + 2 * kv)
    work.kernels_forward += rotary * (2 if layout.fused else 10) + (0 if layout.fused else 4)
    work.kernels_backward += rotary * (2 if layout.fused else 12) + (0 if layout.fused else 4)
    add_core(work, shape, layout, q, kv, v)
    if layout.cp > 1:
        pairs = tokens * (kv + (kv if shape.mla is None else v))
        work.cp_bytes += 2 * pairs
        work.cp_heads_bytes += 2 * (tokens * (q + v) + pairs)
        if layout.cp_kind == "ring":
            work.add(ring_bytes(layout.cp, tokens * (q + v) / 2, pairs), ring_kernels(layout.cp))
    add_linear(work, layout, tokens, h, v)
    if layout.low_precision and not layout.lora:
        work.copies += input_bytes(layout) * v * tokens
    work.saved_parts["ops"] = input_bytes(layout) * h * input_tokens(layout) + 2 * tokens * kv
    add_tp_pair(work, layout, 2.0 * h * tokens, 1 if layout.fused else 3)
    add_residual(work, layout, h, rows)
    return work


def _add_latent_projections(work: Work, shape: ModelShape, layout: ParallelLayout, rows: float) -> float:
    """Down, norm and up projections of latent attention; returns the local width of the keys."""
    m = shape.mla
    assert m is not None
    h, t, tokens = shape.hidden, layout.tp, float(layout.tokens)
    q, up = shape.q_width / t, shape.heads * (m.qk_nope + m.v_dim) / t
    if m.q_lora:
        add_linear(work, layout, rows, m.q_lora, h)
        add_norm(work, layout, m.q_lora, rows)
        add_linear(work, layout, tokens, q, m.q_lora)
    else:
        add_linear(work, layout, tokens, q, h)
    add_linear(work, layout, rows, m.kv_lora + m.qk_rope, h)
    add_norm(work, layout, m.kv_lora, rows)
    add_linear(work, layout, tokens, up, m.kv_lora)
    passes = 4 if layout.fused else 8
    work.moved_forward += passes * tokens * (q + up)
    work.moved_backward += passes * tokens * (q + up)
    work.kernels_forward += 8
    work.kernels_backward += 8
    expanded = 2 * tokens * (2 * q + shape.v_width / t)
    work.saved += 2 * h * rows + 2 * rows * (m.q_lora + m.kv_lora + m.qk_rope) + expanded
    work.saved_parts["mla_up"] = expanded
    return q


def _add_activation(work: Work, layout: ParallelLayout, width: float, tokens: float, gated: bool) -> None:
    """The non-linearity between the two linears; `width` is the local FFN width."""
    size, halves = width * tokens, 2 if gated else 1
    work.moved_forward += (2 * halves + 2) * size + (0 if layout.fused else 4 * size)
    work.moved_backward += (4 * halves + 2) * size + (0 if layout.fused else 6 * size)
    work.kernels_forward += 1 if layout.fused else 3
    work.kernels_backward += 1 if layout.fused else 4
    kept = 2 * halves * size + (0 if layout.fused or not gated else 2 * size)
    work.saved += kept
    for part in ("mlp", "activation"):
        work.saved_parts[part] = work.saved_parts.get(part, 0.0) + (
            kept if part == "mlp" else input_bytes(layout) * size
        )
    out = input_bytes(layout) * size
    work.saved += out
    work.saved_parts["mlp"] += out


def mlp(shape: ModelShape, layout: ParallelLayout) -> Work:
    work = Work(params=shape.rank_params("mlp", layout.tp))
    tokens, rows, f = float(layout.tokens), norm_tokens(layout), shape.ffn / layout.tp
    add_norm(work, layout, shape.hidden, rows)
    work.saved += input_bytes(layout) * shape.hidden * input_tokens(layout)
    halves = 2 if shape.gated else 1
    for width in (halves * f,) if layout.fused else (f,) * halves:
        add_linear(work, layout, tokens, width, shape.hidden)
    _add_activation(work, layout, f, tokens, shape.gated)
    add_linear(work, layout, tokens, shape.hidden, f)
    add_tp_pair(work, layout, 2.0 * shape.hidden * tokens, 1 if layout.fused else halves)
    work.saved_parts["ops"] = work.saved - 2 * f * tokens - 2 * shape.hidden * rows
    add_residual(work, layout, shape.hidden, rows)
    return work


def moe(shape: ModelShape, layout: ParallelLayout) -> Work:
    """Router, dispatch, experts, combine; tokens are taken to be spread evenly over experts."""
    experts = shape.experts / layout.ep
    work = Work(
        params=shape.moe_rest_params() - (1 - 1 / layout.tp) * 3 * shape.hidden * shape.shared_ffn + shape.hidden,
        expert_params=experts * shape.expert_params() / layout.etp,
    )
    rows = layout.tokens / layout.tp if layout.sp or layout.tp > 1 else float(layout.tokens)
    h, width = shape.hidden, shape.expert_width
    halves = 2 if shape.moe_gated else 1
    add_norm(work, layout, h, rows)
    work.plains.append((rows, shape.experts, h, 1.0))
    routed = rows * shape.top_k * layout.etp * layout.routed_share
    if shape.moe_latent:
        add_linear(work, layout, rows, width, h)
        add_linear(work, layout, rows, h, width)
    f = shape.moe_ffn / layout.etp
    each = max(routed / experts, 1.0)
    work.grouped += [(each, halves * f, width, experts), (each, width, f, experts)]
    low, clamped = quantised_bytes(layout), clamped_bytes(shape, layout)
    inner = Work()
    plain = replace(layout, fused=False) if shape.expert_bias else layout
    _add_activation(inner, plain, f, routed, shape.moe_gated)
    arranged = arranged_bytes(layout) * width * routed
    work.routed_activation = inner.moved_forward
    work.routed_forward += inner.moved_forward + arranged + clamped[0] * routed * f + low * routed * (width + f)
    work.routed_backward += (
        inner.moved_backward + arranged + clamped[1] * routed * f + low * routed * (width + halves * f)
    )
    work.saved += inner.saved + 2 * h * rows + input_bytes(layout) * width * routed + 4 * rows * shape.experts
    work.saved_parts["activation"] = inner.saved_parts["activation"]
    work.moved_forward += 16 * rows * shape.experts
    work.moved_backward += 16 * rows * shape.experts
    work.kernels_forward += 24
    work.kernels_backward += 24
    work.stalls_forward, work.stalls_backward = expert_stalls(layout, experts)
    if layout.ep > 1:
        work.ep_bytes = 2.0 * width * routed
        work.ep_spread = (shape.experts, shape.top_k, shape.expert_groups, shape.most_groups)
    if shape.shared_ffn:
        tokens, g = float(layout.tokens), shape.shared_ffn / layout.tp
        add_linear(work, layout, tokens, halves * g, h)
        _add_activation(work, layout, g, tokens, shape.moe_gated)
        add_linear(work, layout, tokens, h, g)
    if layout.tp > 1:
        add_tp_pair(work, layout, 2.0 * h * layout.tokens)
    work.saved_parts["moe"] = work.saved - work.saved_parts["norm"] - 2 * h * rows
    add_residual(work, layout, h, rows)
    return work


SCAN_RATE = 0.035
"""Rate of the chunked scan's small fp32-accumulated products over that of fused attention."""


def mamba(shape: ModelShape, layout: ParallelLayout) -> Work:
    """A Mamba-2 block: projections, a short convolution, the chunked scan as batched products, a gated norm."""
    m = shape.mamba
    assert m is not None
    work = Work(params=shape.rank_params("mamba", layout.tp))
    h, t, tokens, rows = shape.hidden, layout.tp, float(layout.tokens), norm_tokens(layout)
    inner, states = m.inner / t, max(m.groups / t, 1) * m.state
    add_norm(work, layout, h, rows)
    add_linear(work, layout, tokens, 2 * inner + 2 * states + m.heads / t, h)
    chunk = 128.0
    scan = 2 * tokens * (chunk * states + chunk * inner / 2 + 2 * inner * m.state)
    work.core_flops += scan / SCAN_RATE
    work.core_bytes += 2 * tokens * (2 * inner + 2 * states) + 4 * tokens / chunk * inner * m.state * 2
    moved = 2 * tokens * (4 * inner + 4 * states) + 8 * tokens * inner
    work.moved_forward += moved
    work.moved_backward += 2 * moved
    work.kernels_forward += 10
    work.kernels_backward += 16
    add_linear(work, layout, tokens, h, inner)
    add_tp_pair(work, layout, 2.0 * h * tokens)
    add_residual(work, layout, h, rows)
    work.saved += 2 * h * rows + 2 * tokens * (5 * inner + 2 * states)
    return work


BLOCKS = {"attention": attention, "mlp": mlp, "moe": moe, "mamba": mamba}


def block_work(name: str, shape: ModelShape, layout: ParallelLayout) -> Work:
    """One block of the pattern, with the sizes and the tokens that are its own."""
    own = shape.of(name)
    return BLOCKS[kind_of(name)](own, replace(layout, seq_len=own.tokens) if own.tokens else layout)


def head(shape: ModelShape, layout: ParallelLayout) -> Work:
    """Last norm, logits, loss. Unfused code gathers the logits of all tp ranks before the loss, and has one more copy
    of them for each of its steps."""
    work = Work()
    tokens, vocab = float(layout.tokens), shape.vocab / layout.tp
    add_norm(work, layout, shape.hidden, norm_tokens(layout))
    work.plains.append((tokens, vocab, shape.hidden, 1.0))
    logits = tokens * (vocab if layout.fused else shape.vocab)
    loss = LOSS if layout.fused and layout.fused_loss else LOSS_BY_OPS if layout.fused else LOSS_TORCH
    work.add((loss[0] * logits, loss[1] * logits), (loss[2], loss[3]))
    if layout.tp > 1:
        if not layout.fused:
            work.tp_forward.append(("all_gather", 2.0 * logits))
        work.tp_forward.append(("all_gather" if layout.sp else "all_reduce", 2.0 * shape.hidden * tokens))
        work.tp_backward.append(("all_reduce", 2.0 * shape.hidden * tokens))
    work.saved = 2 * shape.hidden * norm_tokens(layout) + logit_bytes(layout) * logits
    return work


def embedding(shape: ModelShape, layout: ParallelLayout) -> Work:
    work = Work()
    size = shape.hidden * float(layout.tokens)
    work.add((6 * size, 8 * size), (3, 3))
    if layout.tp > 1:
        work.tp_forward.append(("reduce_scatter" if layout.sp else "all_reduce", 2.0 * size))
        if layout.sp:
            work.tp_backward.append(("all_gather", 2.0 * size))
    return work
