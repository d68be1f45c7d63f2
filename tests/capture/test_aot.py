"""What the adapter relies on in torch's private joint export. Fails first, and loudly, when torch changes."""

from __future__ import annotations

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from hpsearch.capture.aot import Joint, Slot, export_joint
from hpsearch.capture.decompose import decompositions
from hpsearch.capture.scope import recording, scope_and_source
from hpsearch.capture.twin import make_twin


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.frozen = nn.Parameter(torch.randn(4), requires_grad=False)
        self.register_buffer("shift", torch.randn(4))
        self.tied = self.linear.weight

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = torch.tanh(self.linear(x)) + self.shift * self.frozen
        return hidden @ self.tied, y + 1


def export() -> Joint:
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    module = make_twin(Small(), mode, "fp32")
    with mode, recording(module):
        x = torch.empty(2, 4, requires_grad=True)
        return export_joint(module, (x, torch.empty(2)), decompositions())


def test_ends_are_known_and_tied_parameters_are_one() -> None:
    joint = export()
    kinds = [(slot.kind, slot.key) for slot in joint.placeholders]
    assert kinds == [
        ("param", "frozen"), ("param", "tied"), ("param", "linear.bias"), ("buffer", "shift"),
        ("input", 0), ("input", 1), ("tangent", 0),
    ]  # fmt: skip
    found = list(joint.results)
    assert found == [Slot("output", 0), Slot("output", 1), *found[2:]]
    assert set(found[2:]) == {Slot("param_grad", "tied"), Slot("param_grad", "linear.bias"), Slot("input_grad", 0)}
    nodes = joint.graph.output_node().args[0]
    assert len(nodes) == len(found)
    assert all(isinstance(n, fx.Node) for n in nodes)


def test_every_node_is_an_operator_with_a_fake_value() -> None:
    joint = export()
    assert {n.op for n in joint.graph.nodes} == {"placeholder", "call_function", "output"}
    for node in joint.graph.nodes:
        if node.op != "output":
            assert isinstance(node.meta["val"], FakeTensor), node
    assert not [n for n in joint.graph.nodes if "addmm" in n.name]


def test_backward_nodes_know_where_they_come_from() -> None:
    joint = export()
    origins = scope_and_source(joint.graph)
    tanh = next(n for n in joint.graph.nodes if n.name == "tanh")
    backward = next(n for n in joint.graph.nodes if n.name == "tanh_backward")
    assert backward.meta["autograd_backward"]
    assert origins[backward.name] == origins[tanh.name]
    assert origins["tanh"][1].startswith("test_aot.py:")
    assert {origins[n.name][0] for n in joint.graph.nodes if n.name.startswith("mm")} >= {"linear"}
