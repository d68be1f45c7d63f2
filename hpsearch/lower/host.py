"""Tensors that a block keeps for its backward, on a visit to host memory.

Whole storages travel, each once however many views of it are kept, and views are made again over what comes back. A
device with streams copies beside its compute, from and to pinned memory. On CPU host memory is the same memory: what
leaves is let go and what returns is another tensor, so that what counts tensors of the device counts right.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, UntypedStorage


@dataclass(frozen=True)
class View:
    """A tensor over a storage that travels."""

    place: int
    """In the list of tensors."""
    parcel: int
    dtype: torch.dtype
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @staticmethod
    def of(tensor: Tensor, place: int, parcel: int) -> View:
        return View(place, parcel, tensor.dtype, tensor.storage_offset(), tuple(tensor.shape), tensor.stride())


@dataclass
class Trip:
    """One list of tensors while some of them are away."""

    tensors: list[Tensor | None]
    """None where one is away."""
    views: list[View]
    parcels: list[UntypedStorage]
    """In host memory."""
    returned: list[UntypedStorage] = field(default_factory=list)
    event: Any = None
    """The end of the copies that are under way."""


class Host:
    """The host memory of one rank, as its program uses it."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = None if device.type == "cpu" else torch.Stream(device)
        self.free: defaultdict[int, list[UntypedStorage]] = defaultdict(list)
        """Bytes → buffers that nothing is in."""

    def send(self, tensors: Sequence[Tensor], places: Sequence[int]) -> Trip:
        """Begins to copy the tensors at `places`; all are on the device until `let_go`."""
        numbers: dict[int, int] = {}
        owners: list[UntypedStorage] = []
        views = []
        for place in places:
            tensor = tensors[place]
            storage = tensor.untyped_storage()
            if not storage.nbytes():
                continue
            if storage._cdata not in numbers:
                numbers[storage._cdata] = len(owners)
                owners.append(storage)
            views.append(View.of(tensor, place, numbers[storage._cdata]))
        parcels = [self._buffer(storage.nbytes()) for storage in owners]
        event = self._copy(owners, parcels)
        return Trip(list(tensors), views, parcels, event=event)

    def let_go(self, trip: Trip) -> None:
        """Ends `send`: what has left is given up on the device."""
        self._settle(trip)
        for view in trip.views:
            trip.tensors[view.place] = None

    def call_back(self, trip: Trip) -> None:
        """Begins to bring everything back."""
        sizes = [parcel.nbytes() for parcel in trip.parcels]
        trip.returned = [torch.empty(n, dtype=torch.uint8, device=self.device).untyped_storage() for n in sizes]
        trip.event = self._copy(trip.parcels, trip.returned)

    def arrive(self, trip: Trip) -> list[Tensor]:
        """Ends `call_back`: the tensors, all on the device."""
        self._settle(trip)
        for view in trip.views:
            empty = torch.empty(0, dtype=view.dtype, device=self.device)
            trip.tensors[view.place] = empty.set_(trip.returned[view.parcel], view.offset, view.shape, view.stride)
        for parcel in trip.parcels:
            self.free[parcel.nbytes()].append(parcel)
        return [tensor for tensor in trip.tensors if tensor is not None]

    def views(self, trip: Trip) -> list[Tensor]:
        """What is away, as tensors over host memory; for who must see the values without bringing them back."""
        if self.stream is not None:
            self.stream.synchronize()
        empty = [torch.empty(0, dtype=view.dtype) for view in trip.views]
        pairs = zip(empty, trip.views, strict=True)
        return [e.set_(trip.parcels[v.parcel], v.offset, v.shape, v.stride) for e, v in pairs]

    def _buffer(self, nbytes: int) -> UntypedStorage:
        """Pinned where there is a device. Not made by an operator: it is no tensor of the device."""
        if self.free[nbytes]:
            return self.free[nbytes].pop()
        made = UntypedStorage(nbytes)
        return made if self.stream is None else made.pin_memory(self.device.type)

    def _copy(self, sources: list[UntypedStorage], targets: list[UntypedStorage]) -> Any:
        if self.stream is None:
            for source, target in zip(sources, targets, strict=True):
                target.copy_(source)
            return None
        self.stream.wait_stream(torch.accelerator.current_stream(self.device))
        with self.stream:
            for source, target in zip(sources, targets, strict=True):
                target.copy_(source, non_blocking=True)
            return self.stream.record_event()

    def _settle(self, trip: Trip) -> None:
        """What runs next on the device comes behind the copies, so that memory is not used again too early."""
        if trip.event is not None:
            torch.accelerator.current_stream(self.device).wait_event(trip.event)
            trip.event = None
