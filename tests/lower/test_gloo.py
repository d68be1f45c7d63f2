"""The program over real gloo ranks: the same gradients, and exactly the bytes that it states."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpsearch.capture import capture
from hpsearch.layout import Mesh
from hpsearch.lower import lower
from tests.end_to_end.ranks import RankPool
from tests.lower.models import Transformer, batch
from tests.lower.reference import plain_step
from tests.lower.test_random_plans import random_plan

ROWS = 8


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    pool = RankPool(4)
    yield pool
    pool.close()


@pytest.mark.dist
@pytest.mark.parametrize("seed", [1, 5])
def test_gloo_ranks(pool: RankPool, tmp_path: Path, seed: int) -> None:
    model = Transformer()
    graph = capture(model, batch(ROWS), recipe="fp64")
    program = lower(graph, random_plan(graph, seed, [Mesh.of(tp=2, dp_shard=2)]))
    batches = [batch(ROWS, i) for i in range(2)]
    loss, gradients = plain_step(model, batches, sums=False)
    params = {n: p.detach() for n, p in model.named_parameters()}
    inputs = [graph.batch.flatten(b) for b in batches]
    path = tmp_path / "work.pickle"
    path.write_bytes(pickle.dumps((program, params, dict(model.named_buffers()), inputs, loss, gradients)))
    sent = pool.run("tests.lower.gloo_rank:step", ranks=program.mesh.num_ranks, path=str(path))
    assert len(sent[0]) >= 3
    assert all(each == sent[0] for each in sent)
