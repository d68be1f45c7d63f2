"""The machine: devices, tiers of links, and what a collective or a kernel costs on them. No torch."""

from hpsearch.cluster.cluster import Cluster
from hpsearch.cluster.curve import COLLECTIVES, Curve
from hpsearch.cluster.device import Device, MatmulTable
from hpsearch.cluster.dispatch import Routing
from hpsearch.cluster.exchange import Exchange
from hpsearch.cluster.find import LOCAL, LOCAL_SUMMARY, shipped
from hpsearch.cluster.group import Group
from hpsearch.cluster.read import Fact
from hpsearch.cluster.route import Price
from hpsearch.cluster.tier import Tier

__all__ = [
    "COLLECTIVES",
    "LOCAL",
    "LOCAL_SUMMARY",
    "Cluster",
    "Curve",
    "Device",
    "Exchange",
    "Fact",
    "Group",
    "MatmulTable",
    "Price",
    "Routing",
    "Tier",
    "shipped",
]
