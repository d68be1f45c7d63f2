"""A cluster file with figures of other tools put in: nccl-tests, traces of the PyTorch profiler."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hpsearch.cluster.find import FILE_NAME, find
from hpsearch.cluster.read import parse, read
from hpsearch.cluster.write import write
from hpsearch.errors import ClusterError
from hpsearch.files import atomic_write
from hpsearch.measure.figures import CurveFigure, MatmulFigure
from hpsearch.measure.merge import merged
from hpsearch.measure.nccl_tests import read_nccl_tests
from hpsearch.measure.trace import read_trace


@dataclass(frozen=True)
class Source:
    """What one file of another tool says."""

    key: str
    text: str
    """`measured by …`, as a cluster file names it."""
    curves: tuple[CurveFigure, ...]
    matmuls: tuple[MatmulFigure, ...]


def sources_of(
    nccl_tests: Sequence[Path], traces: Sequence[Path], *, collective: str = "", group: int | None = None
) -> tuple[Source, ...]:
    """Every file read; `collective` and `group` for outputs of nccl-tests that do not say so themselves."""
    found = []
    for index, path in enumerate(nccl_tests, 1):
        curve = read_nccl_tests(_text(path), str(path), kind=collective, ranks=group)
        found.append(Source(f"nccl_tests_{index}", f"measured by nccl-tests, {path.name}", (curve,), ()))
    for index, path in enumerate(traces, 1):
        trace = read_trace(_existing(path))
        text = f"measured by torch.profiler, {path.name}"
        found.append(Source(f"trace_{index}", text, trace.curves, trace.matmuls))
    return tuple(found)


def put_into(folder: Path, onto: str, sources: Sequence[Source]) -> None:
    """Writes `folder`/cluster.toml: the cluster `onto` (by default the one in the folder) with all that sources say."""
    if not onto and not (folder / FILE_NAME).is_file():
        raise ClusterError(
            f"profile {folder}", f"expected {FILE_NAME} to put these figures into, but found none",
            "Name the cluster they are of with --onto: a shipped name or a path.",
        )  # fmt: skip
    path = find(onto, 1) if onto else folder / FILE_NAME
    entry = parse(path.read_text(encoding="utf-8"), str(path))
    for source in sources:
        key = source.key
        while entry.sources.get(key, source.text) != source.text:  # another file was put in under this key before
            key += "_"
        entry = merged(entry, source.curves, source.matmuls, key=key, source=source.text)
    if onto:
        entry = entry.model_copy(update={"name": folder.resolve().name})
    text = write(entry)
    read(text, f"{path} with {', '.join(source.text for source in sources)}")
    folder.mkdir(parents=True, exist_ok=True)
    atomic_write(folder / FILE_NAME, text.encode())


def _existing(path: Path) -> Path:
    if not path.is_file():
        raise ClusterError(str(path), "expected a file, but found none", "")
    return path


def _text(path: Path) -> str:
    return _existing(path).read_text(encoding="utf-8", errors="replace")
