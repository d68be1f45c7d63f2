from __future__ import annotations

import pytest
from tests.plan.sample import plan_file

from hpsearch.plan import Plan


@pytest.fixture
def plan() -> Plan:
    return Plan(plan_file())
