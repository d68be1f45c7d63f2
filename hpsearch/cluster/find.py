"""Where cluster descriptions lie: the ones that ship, files by path, and the measured ones of this machine."""

from __future__ import annotations

import difflib
import hashlib
import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from hpsearch.errors import ClusterError

FILE_NAME = "cluster.toml"
LOCAL = "local"
LOCAL_SUMMARY = "this machine: gloo ranks on its CPU cores, links and rates measured at first use and kept"
_SEAL = "# hpsearch-sha256: "


def cost_models() -> Path:
    """The folder of shipped descriptions: inside the installed package, else the top level of the repository."""
    package = Path(__file__).resolve().parent.parent
    inside = package / "_cost_models"
    return inside if inside.is_dir() else package.parent / "cost_models"


def shipped() -> tuple[str, ...]:
    """Names that `Cluster.load` knows, sorted; `local` is always among them."""
    names = {path.parent.name for path in cost_models().glob(f"*/{FILE_NAME}")}
    return tuple(sorted(names | {LOCAL}))


def find(name: str | Path, devices: int) -> Path:
    """The file that describes `name`: a path to a file or folder, a shipped name, or `local` once it was measured."""
    text = os.fspath(name)
    if text == LOCAL:
        return _measured(devices)
    unshipped = text and text not in shipped() and Path(text).exists()
    if unshipped or "/" in text or os.sep in text or text.endswith(".toml"):
        path = Path(text)
        path = path / FILE_NAME if path.is_dir() else path
        if not path.is_file():
            raise ClusterError(f"cluster {text}", "expected a file or a folder with cluster.toml, but found none", "")
        return path
    if text not in shipped():
        begun = [known for known in shipped() if text and known.startswith(text)]
        near = (begun or difflib.get_close_matches(text, shipped(), n=1, cutoff=0.0))[0]
        raise ClusterError(
            f"cluster {text!r}", f"expected a path or one of {', '.join(shipped())}, but found neither",
            f"Did you mean {near!r}?",
        )  # fmt: skip
    return cost_models() / text / FILE_NAME


def cache_folder() -> Path:
    """Where measured clusters are kept: $HPSEARCH_CACHE/clusters, else ~/.cache/hpsearch/clusters."""
    root = os.environ.get("HPSEARCH_CACHE")
    return (Path(root) if root else Path.home() / ".cache" / "hpsearch") / "clusters"


def local_file(devices: int) -> Path:
    """Where the measurement of this machine with `devices` ranks is kept; the name changes with the machine."""
    try:
        torch = version("torch")
    except PackageNotFoundError:
        torch = "none"
    machine = (platform.node(), _cpu_model(), str(os.cpu_count()), torch, str(devices))
    key = hashlib.sha256("\n".join(machine).encode()).hexdigest()[:16]
    return cache_folder() / f"local-{devices}-{key}" / FILE_NAME


def seal(text: str) -> str:
    """The text with its digest on the first line, so that half a file is never taken for a whole one."""
    return f"{_SEAL}{hashlib.sha256(text.encode()).hexdigest()}\n{text}"


def is_whole(path: Path) -> bool:
    """Whether `path` is a sealed file, complete and unchanged."""
    if not path.is_file():
        return False
    first, _, rest = path.read_bytes().partition(b"\n")
    return first.decode("ascii", "replace") == _SEAL + hashlib.sha256(rest).hexdigest()


def _measured(devices: int) -> Path:
    path = local_file(devices)
    if is_whole(path):
        return path
    found = "a damaged measurement" if path.is_file() else "no measurement"
    raise ClusterError(
        "cluster 'local'",
        f"expected this machine measured with {devices} ranks, but found {found} in {cache_folder()}",
        f"Measure it: hpsearch.measure.load_cluster('local', devices={devices}); the commands do so by themselves.",
    )


def _cpu_model() -> str:
    """Model name, family and stepping of the CPU as the system prints them."""
    info = Path("/proc/cpuinfo")
    if not info.is_file():
        return f"{platform.machine()} {platform.processor()}"
    wanted = ("vendor_id", "cpu family", "model", "model name", "stepping")
    fields: dict[str, str] = {}
    for line in info.read_text().splitlines():
        key, _, value = line.partition(":")
        if key.strip() in wanted:
            fields.setdefault(key.strip(), value.strip())
    return " ".join(fields.get(key, "") for key in wanted) + f" {platform.machine()}"
