"""Cases about experts: which degrees are legal, what a model's own routing costs, and what ranks do in which order."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from hpsearch.capture import capture
from hpsearch.cluster import Cluster
from hpsearch.cluster.dispatch import parts_met
from hpsearch.errors import CaptureError, LegalityError
from hpsearch.estimate.pins import check_shape, layout_of
from hpsearch.estimate.price import exchange_s
from hpsearch.estimate.shape import ModelShape
from hpsearch.estimate.work import moe
from hpsearch.space import best
from hpsearch.space.pins import space_of
from tests.cases import configs, routed
from tests.end_to_end.ranks import RankPool
from tests.end_to_end.test_experts import plan
from tests.estimate.stated import shape_of_config

GLM_4_5 = shape_of_config(configs.GLM_4_5_AIR | {"n_routed_experts": 160, "num_hidden_layers": 92})
"""As https://huggingface.co/zai-org/GLM-4.5/blob/main/config.json counts experts and layers."""
KIMI_K2 = shape_of_config(configs.DEEPSEEK_V3 | {"n_routed_experts": 384, "num_attention_heads": 64})
"""As https://huggingface.co/moonshotai/Kimi-K2-Instruct/blob/main/config.json counts experts and heads."""


def checked(shape: ModelShape, devices: int, **pins: int) -> None:
    told = {name: str(value) for name, value in pins.items()}
    check_shape(shape, layout_of(told, devices=devices, global_batch=256, seq_len=4096).layout)


def test_moe_01_experts_are_divided_evenly_over_ranks() -> None:
    told = "expected ep to divide experts = 160, but ep = 64. Legal degrees of ep: 1, 2, 4, 8, 16, 32."
    with pytest.raises(LegalityError, match=re.escape(told)):
        checked(GLM_4_5, 64, ep=64)
    for degree in (1, 2, 4, 8, 16, 32):
        checked(GLM_4_5, 64, ep=degree)
    checked(GLM_4_5, 64, ep=32, tp=8)
    for degree in (64, 128):
        checked(KIMI_K2, 128, ep=degree)
    with pytest.raises(LegalityError, match=r"expected ep·etp to divide dp·cp·tp = 128, but ep = 256, etp = 1"):
        checked(KIMI_K2, 128, ep=256)


def test_moe_01_a_search_refuses_it_too() -> None:
    cluster = Cluster.load("h200-sxm-ib400", devices=64)
    space = space_of(GLM_4_5, cluster, {"ep": "64"}, global_batch=256, seq_len=4096)
    assert space is not None
    with pytest.raises(LegalityError, match=r"ep.*64"):
        best(space, gap=0.5)


def test_moe_03_experts_are_folded_over_the_other_axes() -> None:
    eight = {"tp": "2", "cp": "2", "dp_shard": "2"}
    for degree in (1, 2, 4, 8):
        made = layout_of(eight | {"ep": str(degree)}, devices=8, global_batch=64, seq_len=4096).layout
        assert (made.devices, made.expert_data_ranks) == (8, 8 // degree)
    with pytest.raises(LegalityError, match=r"expected ep·etp to divide dp·cp·tp = 8, but ep = 3"):
        layout_of(eight | {"ep": "3"}, devices=8, global_batch=64, seq_len=4096)
    wide = layout_of({"cp": "4", "ep": "8"}, devices=32, global_batch=64, seq_len=4096).layout
    assert (wide.dp, wide.cp, wide.expert_data_ranks) == (8, 4, 4)


def test_moe_08_tokens_go_to_the_nodes_that_the_router_allows() -> None:
    """256 experts in 8 groups, a node each: 4 experts a rank; a token's 8 experts are in 4 groups at most."""
    shape = shape_of_config(configs.DEEPSEEK_V3 | {"n_group": 8, "topk_group": 4})
    assert (shape.experts // 64, shape.expert_groups, shape.most_groups) == (4, 8, 4)
    assert [kind for _, kind in shape.pattern[:4]] == ["mlp", "mlp", "mlp", "moe"]
    assert (len(shape.pattern), shape.mtp_layers, shape.shared_ffn) == (61, 1, 2048)
    nodes = parts_met(8, 256, 8, 8, 4)
    assert 3.5 < nodes <= 4 < parts_met(8, 256, 8)
    cluster = Cluster.load("h800-sxm-ib400", devices=64)
    layout = layout_of({"ep": "64", "dedup": "true"}, devices=64, global_batch=256, seq_len=4096).layout
    limited, free = (exchange_s(moe(one, layout), layout, cluster) for one in (shape, _free(shape)))
    assert limited / free == pytest.approx(nodes / parts_met(8, 256, 8), rel=0.02)
    for tp in (128, 64):
        check_shape(shape, layout_of({"tp": str(tp)}, devices=128, global_batch=256, seq_len=4096).layout)
    with pytest.raises(LegalityError, match=r"expected tp to divide attention heads = 128, but tp = 96"):
        checked(shape, 96, tp=96)


def _free(shape: ModelShape) -> ModelShape:
    return replace(shape, expert_groups=1, most_groups=1)


class Hit(nn.Module):
    """Only the experts that some token goes to are called."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(8, 4)
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        chosen = self.router(x).argmax(-1)
        out = torch.zeros_like(x)
        for expert in chosen.unique().tolist():
            out = out + self.experts[expert](x) * (chosen == expert)[:, None]
        return out.square().mean()


def test_moe_05_a_loop_over_what_the_data_chose_is_refused_with_its_line() -> None:
    with pytest.raises(CaptureError, match=r"test_moe\.py, line \d+|test_moe\.py:\d+"):
        capture(Hit(), (torch.empty(8, 8),), recipe="fp32")


@pytest.fixture(scope="module")
def stepped(ranks: RankPool) -> list[tuple[list[routed.Launch], dict[str, float | None]]]:
    """A step of a model whose first expert gets every token and whose second none, on ep=2 beside dp_shard=2."""
    made = plan("mixtral_skewed", "fp64", "ep-2 x fsdp-2")
    return ranks.run(f"{routed.__name__}:step", ranks=4, family="mixtral_skewed", plan=made.content)


@pytest.mark.dist
def test_moe_05_ranks_without_tokens_join_every_collective(stepped: list[tuple[list[routed.Launch], object]]) -> None:
    names = [[(len(group), name) for group, name in launches] for launches, _ in stepped]
    assert names[0]
    assert all(one == names[0] for one in names), "which experts got tokens decides nothing"


@pytest.mark.dist
def test_moe_06_all_ranks_start_collectives_in_one_order(stepped: list[tuple[list[routed.Launch], object]]) -> None:
    queues = [launches for launches, _ in stepped]
    groups = {group for queue in queues for group, _ in queue}
    assert {len(group) for group in groups} >= {2}
    for group in groups:
        own = [[name for other, name in queues[rank] if other == group] for rank in group]
        assert all(sequence == own[0] for sequence in own)
    assert routed.drained(queues)
    queues[0][0], queues[0][-1] = queues[0][-1], queues[0][0]
    assert not routed.drained(queues), "the check can fail"
