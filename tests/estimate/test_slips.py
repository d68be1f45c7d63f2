"""The classic slips of cost models, each against the right value worked out by hand: a factor of 8, 2, 1.75 or 1.07
that gives a plausible, wrong plan."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hpsearch.cluster import Cluster, shipped
from hpsearch.cluster.read import read
from hpsearch.estimate import ModelShape, ParallelLayout, estimate, memory
from hpsearch.estimate.shape import transformer
from hpsearch.estimate.work import attention, head
from tests.cases.configs import QWEN3_0_6B
from tests.cluster.test_files import GOOD
from tests.estimate.stated import shape_of_config

LLAMA_8B = ModelShape("8B", 4096, 32, 8, 128, 128256, transformer(32, 0, 0), ffn=14336)
LLAMA_405B = ModelShape("405B", 16384, 128, 8, 128, 128256, transformer(126, 0, 0), ffn=53248)
ONE = ParallelLayout(devices=1, seq_len=4096, micro_batch=1, global_batch=1)


def changed(before: str, after: str, devices: int = 8) -> Cluster:
    assert before in GOOD
    found = read(GOOD.replace(before, after), "x")
    return Cluster(found.name, devices, found.device, found.tiers)


def table(op: str, name: str, rate: float) -> Cluster:
    text = f'op = "{op}"\ngroup = 8\nnbytes = [1073741824]\n{name} = {{ values = [{rate}], unit = "GB/s"'
    first = GOOD.index('op = "all_gather"')
    old = GOOD[first : GOOD.index(', kind = "measured"', first)]
    return changed(old, text)


@pytest.mark.parametrize(
    ("op", "bus", "algorithm", "milliseconds"),
    [
        # 1 GiB = 1.0737 GB. All-reduce: 2 · 7/8 of it at 480 GB/s is 3.915 ms, 1.0737 / 3.915 ms are 274.3 GB/s.
        ("all_reduce", 480.0, 274.286, 3.9147),
        # The others send 7/8: 0.9395 GB at 360 GB/s.
        ("all_gather", 360.0, 411.429, 2.6098),
        ("reduce_scatter", 360.0, 411.429, 2.6098),
        ("all_to_all", 360.0, 411.429, 2.6098),
    ],
)
def test_bus_and_algorithm_bandwidth(op: str, bus: float, algorithm: float, milliseconds: float) -> None:
    for name, rate in (("busbw", bus), ("algbw", algorithm)):
        found = table(op, name, rate).collective(op, 2**30, 8, 1).seconds
        assert found == pytest.approx(milliseconds * 1e-3, rel=1e-4), name


def test_gigabits_and_gigabytes() -> None:
    """A 400 Gbit/s NIC moves 50 GB/s: half of 2 GB over two nodes takes 20 ms, not 2.5."""
    for text in ('value = 400, unit = "Gbit/s"', 'value = 400, unit = "Gbps"', 'value = 50, unit = "GB/s"'):
        cluster = changed('value = 50, unit = "GB/s"', text, devices=16)
        assert cluster.collective("all_gather", 2e9, 2, 8).seconds == pytest.approx(20e-3, rel=1e-3)


ONE_WAY_GB_S = {
    "v100-sxm": 150, "a100-sxm-40gb": 300, "a100-sxm-selene": 300, "a800-sxm": 200, "h800-sxm-ib400": 200,
    "h100-sxm-ib400": 450, "h100-sxm-roce400": 450, "h200-sxm-ib400": 450, "b200-hgx-ib400": 900,
    "b200-hgx-efa400": 900, "b300-hgx-ib800": 900, "gb200-nvl72": 900, "gb300-nvl72": 900, "mi300x-ib400": 448,
    "mi325x": 448, "ascend-910b": 196, "atlas-800-a3": 196,
}  # fmt: skip
"""Data sheets print both directions together: NVLink 2, 3, 4, 5: 300, 600, 900, 1800 GB/s; xGMI 896. A device sends
half of it."""


@pytest.mark.parametrize("name", sorted(set(shipped()) - {"local"}))
def test_one_way_and_both_ways(name: str) -> None:
    """Links are stated one way, and no ring of 1 GB over a node is quicker than its 7/8 at that rate (switches that add
    up save at most half of an all_reduce, and no gather)."""
    cluster = Cluster.load(name, devices=8)
    node = next(tier for tier in cluster.tiers if tier.name == "node")
    assert node.bytes_per_s == pytest.approx(ONE_WAY_GB_S[name] * 1e9)
    gathered = cluster.collective("all_gather", 2**30, 8, 1).seconds
    assert gathered > 7 / 8 * 2**30 / node.bytes_per_s


def test_gibibytes_and_gigabytes() -> None:
    """80 GB are 80,000,000,000 bytes or 74.5 GiB; 80 GiB are 85,899,345,920, 7.4 % more."""
    assert changed("value = 80,", "value = 80.0,").device.memory_bytes == 80_000_000_000
    assert changed('value = 80, unit = "GB"', 'value = 80, unit = "GiB"').device.memory_bytes == 85_899_345_920
    assert Cluster.load("h100-sxm-ib400", devices=8).device.memory_bytes == 80_000_000_000


def test_causal_attention_is_half_of_the_square() -> None:
    """Scores and their product with values: 2 · 2 · 4096² · 4096 = 274.9 GFLOP for the square, 137.4 for its causal
    half. A written score matrix is computed whole."""
    assert attention(LLAMA_8B, ONE).core_flops == 137_438_953_472
    assert attention(LLAMA_8B, replace(ONE, flash=False)).core_flops == 274_877_906_944


def test_logits_are_fp32() -> None:
    """4,096 tokens · 128,256 words are 525.3 million logits: 6 bytes each (16 bit from the matmul, fp32 for the loss)
    are 3.152 GB beside the 33.6 MB input of the head; two bytes each would be 1.051 GB."""
    saved = head(LLAMA_8B, ONE).saved
    assert saved == 6 * 525_336_576 + 2 * 4096 * 4096 == 3_185_573_888
    assert dict(memory(LLAMA_8B, ONE).parts)["logits"] >= saved


def test_tied_embeddings_are_one_tensor_and_two_uses() -> None:
    """Qwen3-0.6B: 28 layers of 15,730,944 and one table of 151,936 · 1,024 = 155,582,464, with the last norm
    596,049,920 parameters; untied 751,632,384. The head's matmul is there either way: 2 ·
    4096 · 155.6 M = 1.27 TFLOP."""
    tied = shape_of_config(QWEN3_0_6B | {"model_type": "qwen3"})
    untied = replace(tied, tied=False)
    assert (tied.total_params, untied.total_params) == (596_049_920, 751_632_384)
    for shape in (tied, untied):
        ((m, n, k, batch),) = head(shape, ONE).plains
        assert 2 * m * n * k * batch == 1_274_531_545_088
    weights = [dict(memory(shape, ONE).parts)["weights"] for shape in (tied, untied)]
    assert weights[1] - weights[0] == pytest.approx(2 * 155_582_464)
    one = Cluster.load("h100-sxm-ib400", devices=1)
    assert estimate(tied, ONE, one).step_s > estimate(replace(tied, vocab=1024), ONE, one).step_s


def test_keys_and_values_have_their_own_heads() -> None:
    """Llama-3.1-8B: 32 query heads of 128 make a 4096 x 4096 projection, 8 key/value heads 4096 x 1024 each: 41.9 M
    weights with the output, not the 67.1 M of as many key/value heads; fused, one matmul 6,144 wide."""
    assert LLAMA_8B.attention_params() == 4096 * 4096 + 2 * 4096 * 1024 + 4096 * 4096 == 41_943_040
    assert replace(LLAMA_8B, kv_heads=32).attention_params() == 67_108_864
    assert attention(LLAMA_8B, ONE).linears == [(4096, 6144, 4096, 1), (4096, 4096, 4096, 1)]


def test_fewer_key_value_heads_than_ranks_are_copied() -> None:
    """Llama-3.1-405B, 128 query and 8 key/value heads, over 16 ranks: 8 query heads a rank and one whole key and value
    head, which another rank has too: a matmul 8·128 + 2·128 = 1,280 wide, not 1,152. A rank holds 16384 · 1280 + 1024 ·
    16384 = 37.7 M weights, more than a sixteenth of 570.4 M."""
    layout = replace(ONE, devices=16, tp=16)
    work = attention(LLAMA_405B, layout)
    assert work.linears[0] == (4096, 1280, 16384, 1)
    assert LLAMA_405B.attention_params() == 570_425_344
    assert work.params == pytest.approx(16384 * 1280 + 1024 * 16384, rel=1e-3)
    assert attention(LLAMA_405B, replace(ONE, devices=8, tp=8)).params == pytest.approx(570_425_344 / 8, rel=1e-3)
