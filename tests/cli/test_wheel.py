"""A wheel, unpacked elsewhere, is complete: the commands, the clusters, the licence."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

REPO = Path(__file__).parent.parent.parent


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    found = subprocess.run(build, cwd=REPO, capture_output=True, text=True, timeout=120)
    assert found.returncode == 0, found.stderr
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "site")
    return folder / "site"


def run(installed: Path, *arguments: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(installed)}
    command = [sys.executable, *arguments]
    found = subprocess.run(command, cwd=installed.parent, env=environment, capture_output=True, text=True, timeout=120)
    assert found.returncode == 0, found.stderr
    return found.stdout


def test_the_wheel_brings_its_clusters(installed: Path) -> None:
    where = "import hpsearch; from hpsearch.cluster.find import cost_models; print(hpsearch.__file__, cost_models())"
    assert run(installed, "-c", where).split() == [
        str(installed / "hpsearch" / "__init__.py"),
        str(installed / "hpsearch" / "_cost_models"),
    ]
    assert run(installed, "-m", "hpsearch", "clusters") == run(REPO / "hpsearch", "-m", "hpsearch", "clusters")


def test_the_wheel_holds_the_package_and_nothing_else(installed: Path) -> None:
    tops = {path.name.split("-")[0] for path in installed.iterdir()}
    assert tops == {"hpsearch"}
    assert list(installed.glob("hpsearch-*.dist-info/licenses/LICENSE"))
    sources = {path.relative_to(REPO / "hpsearch") for path in (REPO / "hpsearch").rglob("*.py")}
    assert sources == {path.relative_to(installed / "hpsearch") for path in (installed / "hpsearch").rglob("*.py")}
