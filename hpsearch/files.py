"""Files that are either the old one or the new one, never half of one."""

from __future__ import annotations

import contextlib
import os
import threading
from pathlib import Path

from hpsearch.errors import PlanError


def atomic_write(path: str | os.PathLike[str], content: bytes) -> None:
    """Replaces the file at `path` by `content`, all or nothing.

    The bytes go to a new file beside it, reach the disk, and take the name in one rename. Whatever goes wrong before
    the rename, a full disk or Ctrl-C, leaves the old file as it was and no other file behind. A link is followed.
    What is not a regular file (a pipe, `/dev/stdout`) has no old content to keep and is written to directly.
    Raises OSError.
    """
    target = Path(os.path.realpath(path))
    if target.exists() and not target.is_file():
        with target.open("wb") as stream:
            stream.write(content)
        return
    temporary = target.with_name(f".{target.name}.{os.getpid()}.{threading.get_ident()}.tmp")
    try:
        with temporary.open("xb") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(temporary, target)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            temporary.unlink()
        raise


def check_output(path: Path) -> None:
    """PlanError: what is asked for can be no file, said before the work that would go into it."""
    if path.is_dir():
        raise PlanError(str(path), "cannot be written: it is a folder", f"Name a file, as {path / 'plan.json'}.")
    if not path.parent.is_dir():
        raise PlanError(str(path), f"cannot be written: there is no folder {path.parent}", "Create it first.")


def deliver(path: str | os.PathLike[str], content: bytes) -> None:
    """`atomic_write` of an answer that a user asked for. PlanError: it cannot be written."""
    try:
        atomic_write(path, content)
    except OSError as error:
        problem = f"cannot be written: {error.strerror or error}"
        raise PlanError(str(path), problem, "What was there before is unchanged; choose another -o.") from error
