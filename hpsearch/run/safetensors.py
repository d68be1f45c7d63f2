"""Reading slices out of a directory of safetensors files, so that a rank touches only the bytes it keeps.

The format (https://huggingface.co/docs/safetensors): 8 bytes little-endian header length, a JSON header
{name: {dtype, shape, data_offsets}}, then the raw row-major data. Files are mapped, not read.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch

from hpsearch.errors import CheckpointError

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


@dataclass(frozen=True)
class Entry:
    """A tensor on disk: its file and where its bytes begin."""

    path: Path
    start: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    def read(self, cut: tuple[slice, ...]) -> torch.Tensor:
        """The slice `cut` of the tensor, copied out of the mapped file."""
        nbytes = prod(self.shape) * self.dtype.itemsize
        if nbytes == 0:
            return torch.empty(self.shape, dtype=self.dtype)[cut]
        mapped = torch.from_file(str(self.path), shared=False, size=self.start + nbytes, dtype=torch.uint8)
        raw = mapped[self.start :]
        if self.start % self.dtype.itemsize:
            raw = raw.clone()
        return raw.view(self.dtype).view(self.shape)[cut].clone()


def entries(folder: Path) -> dict[str, Entry]:
    """Every tensor of a checkpoint directory, by its name there.

    Reads the index of a checkpoint in several files, or the one file. Raises CheckpointError for a missing or
    truncated file and for an index that disagrees with its files.
    """
    index = folder / INDEX
    if index.exists():
        where: dict[str, str] = _json(index, index.read_bytes()).get("weight_map", {})
        found: dict[str, Entry] = {}
        for name in sorted(set(where.values())):
            found |= _header(folder / name)
        lost = sorted(set(where) - set(found))
        if lost:
            raise CheckpointError(str(index), f"names {len(lost)} tensors that no file holds, first {lost[0]}")
        return {name: found[name] for name in where}
    if (folder / SINGLE).exists():
        return _header(folder / SINGLE)
    raise CheckpointError(
        str(folder), f"expected {INDEX} or {SINGLE}, but found neither", "Give a Hugging Face folder."
    )


def _header(path: Path) -> dict[str, Entry]:
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if 8 + length > size:
                raise CheckpointError(
                    str(path), f"the header claims {length} bytes, but the file has {size}: truncated"
                )
            header = _json(path, file.read(length))
    except OSError as error:
        raise CheckpointError(
            str(path), f"cannot be read ({error.strerror})", "Download the checkpoint again."
        ) from error
    return {name: _entry(path, 8 + length, size, name, item) for name, item in header.items() if name != "__metadata__"}


def _entry(path: Path, base: int, size: int, name: str, item: dict[str, object]) -> Entry:
    try:
        dtype, shape, (start, stop) = DTYPES[item["dtype"]], tuple(item["shape"]), item["data_offsets"]  # type: ignore
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(str(path), f"the entry of {name} cannot be understood ({error!r})") from error
    if stop - start != prod(shape) * dtype.itemsize or base + stop > size:
        problem = f"{name} {list(shape)} needs bytes {base + start}..{base + stop}, but the file has {size}"
        raise CheckpointError(str(path), problem, "Download the checkpoint again.")
    return Entry(path, base + start, dtype, shape)


def _json(path: Path, data: bytes) -> dict:  # type: ignore[type-arg]
    try:
        return json.loads(data)  # type: ignore[no-any-return]
    except ValueError as error:
        raise CheckpointError(
            str(path), f"expected JSON, but found {error}", "Download the checkpoint again."
        ) from error
