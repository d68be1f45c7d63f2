"""Cases about experts: which degrees are legal, what they are folded over, and what a model's own routing costs."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from hpsearch.cluster import Cluster
from hpsearch.cluster.dispatch import parts_met
from hpsearch.errors import LegalityError
from hpsearch.estimate.pins import check_shape, layout_of
from hpsearch.estimate.price import exchange_s
from hpsearch.estimate.shape import ModelShape
from hpsearch.estimate.work import moe
from hpsearch.space import best
from hpsearch.space.pins import space_of
from tests.cases import configs
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
