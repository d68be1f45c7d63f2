"""The machine that a figure is of, in words."""

from __future__ import annotations

import os
import platform
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path


def described(*packages: str) -> str:
    """One paragraph: processor, cores, memory, load, Python, versions of `packages`, day."""
    versions = ", ".join(f"{name} {version(name)}" for name in packages)
    return (
        f"{_processor()}, {os.cpu_count()} cores, {_memory_gb():.0f} GB, load {os.getloadavg()[0]:.1f}; "
        f"{platform.system()}, Python {platform.python_version()}, {versions}; {datetime.now(UTC):%Y-%m-%d}."
    )


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _memory_gb() -> float:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9
