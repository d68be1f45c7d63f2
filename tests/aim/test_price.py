"""What devices cost is stated or refused, never made up; values that objectives are asked over."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from hpsearch.aim.over import counts, multiples, shares, stated
from hpsearch.aim.price import tariff_of
from hpsearch.cluster import Cluster
from hpsearch.cluster.find import cost_models
from hpsearch.errors import ClusterError, LegalityError

H100, V100 = (Cluster.load(name, devices=16) for name in ("h100-sxm-roce400", "v100-sxm"))


def test_what_is_stated() -> None:
    cost, energy = tariff_of("cost", "2.5 USD/h", H100), tariff_of("energy", "0.35 kW", H100)
    assert (cost.a_second * 3600, cost.unit) == (pytest.approx(2.5), "USD")
    assert (energy.a_second, energy.unit) == (pytest.approx(350.0), "J")
    assert str(cost) == "at 2.5 USD/h a device (stated)"


def test_what_the_cluster_says(tmp_path: Path) -> None:
    published = tariff_of("energy", None, H100)
    assert (published.a_second, published.unit) == (700.0, "J")
    assert published.source.startswith("https://")
    text = (cost_models() / "h100-sxm-roce400" / "cluster.toml").read_text()
    price = 'price = { value = 2.0, unit = "EUR/h", kind = "published", source = "https://example.com/prices" }'
    path = tmp_path / "cluster.toml"
    path.write_text(text.replace("\n[device.peak]", f"{price}\n\n[device.peak]"))
    priced = Cluster.load(path, devices=16)
    found = tariff_of("cost", None, priced)
    assert (found.a_second * 3600, found.unit, found.source) == (
        pytest.approx(2.0),
        "EUR",
        "https://example.com/prices",
    )
    assert priced.digest == H100.digest  # no second depends on it
    path.write_text(path.read_text().replace('unit = "EUR/h"', 'unit = "EUR"'))
    with pytest.raises(ClusterError, match=r"device\.price.*expected a unit of price \(USD/h"):
        Cluster.load(path, devices=16)


@pytest.mark.parametrize(
    ("kind", "text", "words"),
    [
        ("cost", None, "expected the price of a H100-SXM5-80GB, but h100-sxm-roce400 states none. Give --price '2.5"),
        ("cost", "2.5", "expected a price of one device as '2.5 USD/h', but got '2.5'"),
        ("cost", "700 W", "but got '700 W'"),
        ("energy", "-1 W", "expected a power of one device as '700 W', but got '-1 W'"),
    ],
)
def test_what_is_refused(kind: str, text: str | None, words: str) -> None:
    with pytest.raises(LegalityError) as refused:
        tariff_of(kind, text, H100)
    assert words in str(refused.value)


def test_a_device_without_a_published_power() -> None:
    with pytest.raises(LegalityError, match="expected the power of a V100"):
        tariff_of("energy", None, V100)


def test_values() -> None:
    assert stated("8,16, 4") == (4, 8, 16)
    assert stated("8..32/8,5") == (5, 8, 16, 24, 32)
    assert multiples(16, 128) == (16, 32, 48, 64, 96, 128)
    assert counts(H100.tiers, 24) == (1, 2, 3, 4, 6, 8, 16, 24)
    assert counts(H100.tiers, 4) == (1, 2, 3, 4)
    for bad in ("", "a", "0", "1..", "8..4"):
        with pytest.raises(LegalityError, match="--over"):
            stated(bad)


def test_sizes_that_groups_may_have() -> None:
    """Whole nodes; single devices of one node; several nodes together where there are many."""
    assert shares(H100.tiers, 32) == (8, 16, 24, 32)
    assert shares(H100.tiers, 8) == (1, 2, 3, 4, 5, 6, 7, 8)
    many = shares(replace(H100, devices=1024).tiers, 1024)
    assert many == tuple(range(64, 1025, 64))
    atlas = Cluster.load("atlas-800-a3", devices=16)
    assert all(size % atlas.tiers[0].size == 0 for size in shares(atlas.tiers, 16))
