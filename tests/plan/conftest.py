from __future__ import annotations

import pytest

from hpsearch.plan import Plan
from tests.plan.sample import plan_file


@pytest.fixture
def plan() -> Plan:
    return Plan(plan_file())
