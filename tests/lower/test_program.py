"""The text, the actions and the accounts of a program."""

from __future__ import annotations

import ast
from typing import Any

import pytest
import torch

from hpsearch.capture import CapturedGraph, capture, capture_config
from hpsearch.errors import LoweringError
from hpsearch.layout import Mesh
from hpsearch.lower import ParallelProgram, lower
from hpsearch.lower.accounting import collectives_of, overlap_of
from hpsearch.lower.statement import Sent
from hpsearch.plan import Plan
from tests.lower.models import Transformer, batch
from tests.lower.plans import cut_at_rest, make_plan
from tests.lower.reference import cut
from tests.lower.simulate import run_ranks


@pytest.fixture(scope="module")
def graph() -> CapturedGraph:
    return capture(Transformer(depth=3), batch(4), recipe="fp64")


def fsdp(graph: CapturedGraph, mesh: Mesh, **choices: Any) -> ParallelProgram:
    return lower(graph, make_plan(graph.graph, mesh, 4, stored=cut_at_rest("dp_shard"), **choices))


def test_each_piece_has_its_callables(graph: CapturedGraph) -> None:
    program = fsdp(graph, Mesh.of(dp_shard=2))
    functions = {node.name for node in ast.parse(program.code).body if isinstance(node, ast.FunctionDef)}
    for verb in ("gather_issue", "gather_wait", "forward", "backward_input", "backward_weight", "reduce_issue"):
        assert f"Block_{verb}" in functions
    assert {"outer_0_forward", "outer_3_forward", "outer_3_backward_input", "outer_0_backward_weight"} <= functions
    assert program.code.count("def Block_forward") == 1  # three calls, one text


def test_no_op_runs_in_both_halves_of_backward(graph: CapturedGraph) -> None:
    for piece in fsdp(graph, Mesh.of(dp_shard=2)).pieces.values():
        if piece.backward is not None:
            parts = piece.backward.input, piece.backward.weight
            first, second = ({s.op for s in part.statements if s.phase == "backward" and s.op} for part in parts)
            assert not first & second
    block = fsdp(graph, Mesh.of(dp_shard=2)).pieces["Block"].backward
    assert block is not None
    products = [s.text for s in block.weight.statements if "einsum(" in s.text]
    assert len(products) == 7  # the weight gradient of each linear, and nothing of the way to the input


def test_every_collective_has_its_plan_line(graph: CapturedGraph) -> None:
    lines = fsdp(graph, Mesh.of(dp_shard=2)).code.splitlines()
    gathers = [i for i, line in enumerate(lines) if "all_gather_into_tensor(" in line]
    assert gathers
    for i in gathers:
        assert "# plan: " in lines[i - 1]
        assert "dp_shard:S0 -> R  all_gather" in lines[i - 1]
    assert any("# plan: blocks.*.up.weight  dp_shard:S0 -> R  all_gather 12288 B" in line for line in lines)


def test_gathers_run_ahead_and_reductions_behind(graph: CapturedGraph) -> None:
    program = fsdp(graph, Mesh.of(dp_shard=2))
    forward = {str(action): i for i, action in enumerate(program.forward_actions)}
    assert forward["gather.issue Block[1]"] < forward["forward Block[0]"] < forward["gather.wait Block[1]"]
    back = {str(action): i for i, action in enumerate(program.backward_actions)}
    assert back["gather.issue Block[1]"] < back["backward_input Block[2]"] < back["gather.wait Block[1]"]
    assert back["reduce.issue Block[2]"] < back["backward_input Block[1]"] < back["reduce.wait Block[2]"]
    assert "free Block[1]" in forward
    assert "free Block[1]" in back
    issued = [text for text in back if text.startswith("reduce.issue")]
    assert [text.replace("issue", "wait") for text in issued] == [t for t in back if t.startswith("reduce.wait")]


def test_what_is_saved_is_what_the_graph_says(graph: CapturedGraph) -> None:
    """Memory is priced by `OpGraph.saved`: by storage, the program keeps nothing else of a block."""
    program = fsdp(graph, Mesh.of(dp_shard=2))
    facts = graph.graph.blocks["Block"]
    params = set(facts.params.values())
    stated = {facts.storage(v) for v in facts.saved} - params
    names = {name.removesuffix("_"): name for name in facts.values}
    picks = {n.name: f"{n.args[0]}.{n.args[1]}" for n in graph.fx["Block"].nodes if "getitem" in str(n.target)}
    kept = {picks.get(name, names.get(name.removesuffix("_"), name)) for name in program.pieces["Block"].saved}
    assert {facts.storage(v) for v in kept} <= stated


def test_casts_come_before_gathers_and_reductions() -> None:
    model = Transformer(depth=1).float()
    model.base = model.base.bfloat16()
    graph = capture(model, batch(4), recipe="bf16")
    program = lower(graph, make_plan(graph.graph, Mesh.of(dp_shard=2), 4, stored=cut_at_rest("dp_shard")))
    dtypes = {(e.phase, e.dtype) for e in collectives_of(program)}
    assert {("gather", "bfloat16"), ("reduce", "float32")} <= dtypes
    assert not {("gather", "float32"), ("reduce", "bfloat16")} & dtypes
    assert all(slot.master_dtype == torch.float32 for slot in program.params)
    single = lower(graph, make_plan(graph.graph, Mesh.of(), 4))
    losses, norms = [], []
    for one in (single, program):
        for loss, grads in run_ranks(one, lambda rank, bound, p=one: step(p, graph, model, rank, bound)):  # type: ignore[misc]
            losses.append(float(loss))
            assert all(g.dtype == torch.float32 for g in grads.values())
            norms.append(sum(float(g.square().sum()) for g in grads.values()))
    plain = float(model.bfloat16()(**batch(4)))
    assert losses[0] == pytest.approx(plain, rel=1e-3)
    assert losses[1:] == pytest.approx([losses[0]] * 2, rel=1e-2)
    assert norms[1] + norms[2] == pytest.approx(norms[0], rel=0.05)


def step(program: ParallelProgram, graph: CapturedGraph, model: Any, rank: int, bound: Any) -> Any:
    state = dict(model.named_parameters())
    params = {s.fqn: cut(state[s.fqn].detach().float(), s.stored, program.mesh, rank) for s in program.params}
    leaves = zip(graph.batch.flatten(batch(4)), program.inputs, strict=True)
    inputs = [cut(t, s.layout, program.mesh, rank) for t, s in leaves]
    buffers = dict(model.named_buffers())
    return bound.step(params, buffers, [inputs])


def test_the_same_plan_gives_the_same_text(graph: CapturedGraph) -> None:
    assert fsdp(graph, Mesh.of(dp_shard=2)).code == fsdp(graph, Mesh.of(dp_shard=2)).code


def test_a_plan_that_contradicts_itself_is_refused(graph: CapturedGraph) -> None:
    plan = make_plan(graph.graph, Mesh.of(tp=2), 4)

    def edited(**changes: Any) -> Plan:
        first, *rest = plan.file.parameters
        return Plan(plan.file.model_copy(update={"parameters": (first.model_copy(update=changes), *rest)}))

    for changes, words in [
        ({"used": "tp:S0"}, "used layout is tp:S0"),
        ({"gradient": "tp:P"}, "gradient layout is tp:P"),
        ({"stored": "tp:S0"}, "residency is `stored`"),
    ]:
        with pytest.raises(LoweringError, match=words):
            lower(graph, edited(**changes))


LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336,
    "num_attention_heads": 32, "num_key_value_heads": 8, "num_hidden_layers": 32, "vocab_size": 128256,
    "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "tie_word_embeddings": False,
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [Mesh.of(dp_shard=64), Mesh.of(dp_replicate=8, dp_shard=8)], ids=str)
def test_overlap_of_an_8b_fsdp_plan(mesh: Mesh) -> None:
    """Compute between issue and wait covers at least 80 % of parameter gathers and gradient reductions, at 150 GB/s
    and 50 % of 989 TFLOP/s, one row of 8192 tokens a rank."""
    captured = capture_config(LLAMA_8B, rows=64, seq_len=8192, recipe="bf16")
    plan = make_plan(captured.graph, mesh, 64, stored=cut_at_rest("dp_shard"), micro_batches=2)
    program = lower(captured, plan)
    graphs = {graph.name: {op.name: op for op in graph.ops} for graph, _ in captured.graph.pieces()}

    def collective_s(sent: Sent) -> float:
        return 20e-6 + sent.nbytes / 150e9

    def op_s(graph: str, name: str) -> float:
        fixed, per_row = graphs[graph][name].flops
        return (fixed + per_row * 64) / 64 / 495e12

    overlap = overlap_of(program, collective_s, op_s)
    own = [e for e in collectives_of(program) if e.phase in ("gather", "reduce")]
    moved = sum(e.calls * (20e-6 + e.nbytes / 150e9) for e in own)
    assert overlap.parameter_s == pytest.approx(moved)
    assert 0.8 <= overlap.covered < 1.0


def test_overlap_counts_what_compute_waits_for(graph: CapturedGraph) -> None:
    """No compute covers nothing; endless compute covers all but what stands at the ends of forward and backward."""
    program = fsdp(graph, Mesh.of(dp_shard=2))
    none = overlap_of(program, lambda sent: 1.0, lambda graph, op: 0.0)
    assert none.uncovered_s == pytest.approx(none.parameter_s)
    assert none.covered == pytest.approx(0.0)
    much = overlap_of(program, lambda sent: 1.0, lambda graph, op: 1000.0)
    ends = len(program.unit_params[0].gathers) + len(program.unit_params[-1].reduces)
    last = next(i for i, unit in enumerate(program.units) if unit.phase == "backward")
    ends += len(program.unit_params[last].gathers)  # freed by forward a moment ago
    queued = len(program.unit_params[last + 1].gathers)  # the count of valid targets stands in line behind these
    assert much.uncovered_s == pytest.approx(ends + queued)
