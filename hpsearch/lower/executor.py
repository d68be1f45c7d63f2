"""`Bound`: a program on one rank. Plain Python over the emitted functions; no autograd inside."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hpsearch.errors import InternalError, LoweringError
from hpsearch.graph import ADDS_UP
from hpsearch.lower.dropout import Clock, Draws
from hpsearch.lower.host import Host, Trip
from hpsearch.lower.local_ops import extent
from hpsearch.lower.regional import regions
from hpsearch.strategy import check_micro_batches

if TYPE_CHECKING:
    from hpsearch.lower.actions import Action
    from hpsearch.lower.outer import Unit
    from hpsearch.lower.parameters import ParamSlot, ParamUse
    from hpsearch.lower.pieces import Piece
    from hpsearch.lower.program import ParallelProgram

Tensors = Mapping[str, Tensor]


@dataclass
class MicroBatch:
    """What one micro-batch has between its forward and its backward."""

    params: Tensors
    buffers: Tensors
    env: dict[str, Tensor]
    """By names of the outer graph."""
    saved: dict[int, list[Tensor]] = field(default_factory=dict)
    """Call → what its block keeps; its inputs under recompute."""
    training: bool = True
    last: bool = False
    """Whether gradients that are reduced once a step go now."""
    kept: dict[int, list[Tensor]] = field(default_factory=dict)
    """Unit → what its backward_input hands to its backward_weight."""
    away: dict[int, Trip] = field(default_factory=dict)
    """Call → what its block keeps, while it is in host memory or on its way."""
    number: int = 0
    """Of the micro-batch in its step, for random numbers."""
    step: int = 0
    """Which step it is of, for random numbers."""


class _Sum:
    """A running sum that never writes into a tensor it was given."""

    def __init__(self, first: Tensor) -> None:
        self.value, self._own = first, False

    def add(self, other: Tensor) -> None:
        if self._own:
            self.value += other
        else:
            self.value, self._own = self.value + other, True


class Bound:
    """Runs a program on one rank. Tensors in and out are this rank's pieces.

    A step is any number of `forward_train` … `backward` pairs and one `finish`; `step` does it all and reduces under
    the last backward.
    """

    def __init__(
        self,
        program: ParallelProgram,
        groups: Mapping[str, Any],
        coordinate: Mapping[str, int],
        device: torch.device,
        clock: Clock | None = None,
        inductor: bool = False,
    ) -> None:
        self.program, self.device, self.clock = program, device, clock or Clock()
        for axis in program.mesh.names:
            if axis not in groups or axis not in coordinate:
                raise LoweringError(f"axis {axis}", "expected a process group and a coordinate for it, but found none")
        mesh = program.mesh
        self.host = Host(device)
        self.draws = Draws(coordinate, mesh.sizes, mesh.num_data_ranks, program.micro_batches, device, mesh.head_tail)
        self.functions: dict[str, Any] = {
            "groups": dict(groups),
            "coordinate": dict(coordinate),
            "device": device,
            "extent": partial(extent, dict(coordinate)),
            "draws": self.draws,
        }
        self._has_dropout = " = dropout(" in program.code
        exec(program.compiled, self.functions)
        self.regions = regions(self.functions, program.pieces, device) if inductor else {}
        self.functions.update(self.regions)
        self._slots: dict[str, ParamSlot] = {slot.fqn: slot for slot in program.params}
        self._does = program.unit_params
        """What units do about parameters in the actions that run: in the whole of backward, or in half of it."""
        self._gathered: dict[tuple[str, str], Tensor] = {}
        """(parameter, used layout) → the parameter as ops use it."""
        self._flying: dict[int, tuple[int, dict[str, Tensor]]] = {}
        """Unit → (rounds done, what its gather or reduction has so far)."""
        self._sums: dict[tuple[str, str], _Sum] = {}
        """(parameter, gradient layout) → gradient before its reduction."""
        self._reduced: dict[str, _Sum] = {}

    @contextmanager
    def _unless_it_fails(self) -> Iterator[None]:
        """No autograd inside; and after a failure nothing of the broken step is left to spoil the next one."""
        try:
            with torch.no_grad():
                yield
        except BaseException:
            self.abandon()
            raise

    def abandon(self) -> None:
        """Forgets the step under way: gathered parameters, gradients, collectives that were not waited for."""
        for kept in (self._gathered, self._flying, self._sums, self._reduced):
            kept.clear()

    def forward(self, params: Tensors, buffers: Tensors, inputs: Sequence[Tensor], number: int = 0) -> Tensor:
        """The loss of the whole micro-batch `number`, same on all ranks; nothing is kept."""
        with self._unless_it_fails():
            before = set(self._gathered)
            env, step = self._arrive(inputs), self.clock.step
            loss = self._run_forward(MicroBatch(params, buffers, env, training=False, number=number, step=step))
            for key in [key for key in self._gathered if key not in before]:  # they may change before the next step
                del self._gathered[key]
            return self._reduce_loss(loss)

    def forward_train(self, params: Tensors, buffers: Tensors, inputs: Sequence[Tensor]) -> tuple[Tensor, MicroBatch]:
        """The loss of the whole micro-batch, same on all ranks, and what `backward` needs."""
        with self._unless_it_fails():
            batch = MicroBatch(params, buffers, self._arrive(inputs), step=self.clock.step)
            return self._reduce_loss(self._run_forward(batch)), batch

    def backward(self, state: MicroBatch, grad_loss: Tensor | float = 1.0, *, last: bool = False) -> None:
        """Adds the gradients of one micro-batch, times `grad_loss`. With `last`, reductions that are due once a step
        start here, under the compute; otherwise `finish` makes them up. `state` is used up."""
        with self._unless_it_fails():
            state.last = last
            tangent = torch.as_tensor(grad_loss, dtype=self.program.tangent_dtype, device=self.device)
            state.env[self.program.tangent_name] = tangent
            for action in self.program.backward_actions:
                self._act(action, state)

    def finish(self) -> dict[str, Tensor]:
        """Ends the step: outstanding reductions, then the gradient of every trainable parameter as it is stored.

        Gradients are in the master dtype, added up in the reduce dtype, each in memory of its own. Parameters gathered
        for the whole step are let go.
        """
        with self._unless_it_fails():
            places = [i for i, does in enumerate(self._does) if does.reduces]
            for place in places:
                self._issue_reduce(place, due=lambda slot: True)
            for place in places:
                self._advance(place, "reduce", to_the_end=True)
            if self._sums:
                raise InternalError("finish", f"gradients left over: {sorted(self._sums)}")
            found = ((fqn, self._reduced.pop(fqn).value) for fqn in self._slots if fqn in self._reduced)
            grads = {fqn: value.to(self._slots[fqn].master_dtype) for fqn, value in found}
            self._reduced.clear()
            self._gathered.clear()
            return _own_memory(grads)

    def step(
        self, params: Tensors, buffers: Tensors, micro_batches: Sequence[Sequence[Tensor]]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss and gradients of all micro-batches together: their mean, or their sum where the loss is a sum."""
        if not micro_batches:
            raise LoweringError("step", "expected at least one micro-batch, but found none")
        check_micro_batches(self.program.name, self.program.loss_reduction, len(micro_batches))
        share = 1.0 if self.program.loss_reduction in ADDS_UP else 1.0 / len(micro_batches)
        losses = []
        with self._unless_it_fails():
            for index, inputs in enumerate(micro_batches):
                batch = MicroBatch(params, buffers, self._arrive(inputs), number=index, step=self.clock.step)
                losses.append(self._run_forward(batch) * share)
                self.backward(batch, share, last=index == len(micro_batches) - 1)
            total = losses[0]
            for loss in losses[1:]:
                total = total + loss
            return self._reduce_loss(total), self.finish()

    def _arrive(self, inputs: Sequence[Tensor]) -> dict[str, Tensor]:
        slots = self.program.inputs
        if len(inputs) != len(slots):
            raise LoweringError("inputs", f"expected {len(slots)} tensors, but found {len(inputs)}")
        for slot, tensor in zip(slots, inputs, strict=True):
            if tuple(tensor.shape) != slot.local_shape:
                raise LoweringError(
                    f"input {slot.name}", f"expected shape {list(slot.local_shape)}, but found {list(tensor.shape)}"
                )
        return dict(zip(self.program.input_names, inputs, strict=True))

    def _run_forward(self, batch: MicroBatch) -> Tensor:
        for action in self.program.forward_actions:
            self._act(action, batch)
        return batch.env[self.program.loss_name]

    def _reduce_loss(self, loss: Tensor) -> Tensor:
        reduced: Tensor = self.functions["reduce_loss"](loss)
        return reduced

    def _act(self, action: Action, batch: MicroBatch) -> None:
        match action.verb:
            case "gather.issue":
                self._issue_gather(action.unit, batch)
            case "gather.wait":
                self._land_gather(action.unit)
            case "forward":
                self._forward(action.unit, batch)
            case "recompute":
                self._recompute(action.unit, batch)
            case "backward_input":
                self._backward_input(action.unit, batch)
            case "backward_weight":
                self._backward_weight(action.unit, batch)
            case "offload.issue" | "offload.wait" | "fetch.issue" | "fetch.wait":
                self._travel(action.verb, action.unit, batch)
            case "free":
                self._free(action.unit)
            case "reduce.issue":
                self._issue_reduce(action.unit, due=lambda slot: batch.last or slot.reduce == "micro_batch")
            case "reduce.next":
                self._advance(action.unit, "reduce")
            case "reduce.wait":
                self._advance(action.unit, "reduce", to_the_end=True)
            case _:
                raise InternalError(f"action {action}", "expected a known verb")

    def _place(self, place: int) -> tuple[Unit, Piece]:
        unit = self.program.units[place]
        return unit, self.program.pieces[unit.piece]

    def _key(self, unit: Unit, use: ParamUse) -> tuple[str, str]:
        return self.program.fqn(unit, use.local), str(use.used)

    def _issue_gather(self, place: int, batch: MicroBatch) -> None:
        unit, piece = self._place(place)
        wanted = [n for n in self._does[place].gathers if self._key(unit, piece.uses[n]) not in self._gathered]
        stored = {n: batch.params[self.program.fqn(unit, n)] for n in wanted}
        self._flying[place] = (0, stored)
        self._advance(place, "gather")

    def _land_gather(self, place: int) -> None:
        unit, piece = self._place(place)
        found = self._advance(place, "gather", to_the_end=True)
        self._gathered.update((self._key(unit, piece.uses[n]), tensor) for n, tensor in found.items())

    def _advance(self, place: int, verb: str, to_the_end: bool = False) -> dict[str, Tensor]:
        """Runs the next round (or all that are left) of what unit `place` has under way; {} when nothing is."""
        if place not in self._flying:
            return {}
        unit, piece = self._place(place)
        names = piece.gather if verb == "gather" else piece.reduce
        done, tensors = self._flying.pop(place)
        stop = len(names) if to_the_end else done + 1
        for name in names[done:stop] if tensors else ():
            tensors = self.functions[name](tensors)
        if stop < len(names) or not to_the_end:
            self._flying[place] = (stop, tensors)
            return tensors
        if verb == "reduce":
            for local, tensor in tensors.items():
                _add(self._reduced, self.program.fqn(unit, local), tensor)
        return tensors

    def _free(self, place: int) -> None:
        unit, piece = self._place(place)
        for local in self._does[place].frees:
            key = self._key(unit, piece.uses[local])
            if self._slots[key[0]].residency != "step":
                self._gathered.pop(key)

    def _run(self, function: str, unit: Unit, piece: Piece, part: Any, batch: MicroBatch, *lists: list[Tensor]) -> Any:
        by_name = {use.name: use for use in piece.uses.values()}
        params = {by_name[n].local: self._gathered[self._key(unit, by_name[n])] for n in part.params}
        buffers = {n: batch.buffers[self.program.fqn(unit, n)] for n in piece.buffers}
        if self._has_dropout:
            block = "" if unit.instance < 0 else self.program.prefixes[unit.instance]
            self.draws.at(self.clock.seed, batch.step, batch.number, block)
        run: Callable[..., Any] = self.functions[f"{piece.name}_{function}"]
        return run(params, buffers, *lists)

    def _take(self, place: int, batch: MicroBatch, names: Sequence[str]) -> list[Tensor]:
        """Tensors of the outer graph; those that no later unit reads are let go."""
        last = self.program.last_reads[place]
        found = [batch.env[n] for n in names]
        for name in names:
            if name in last:
                batch.env.pop(name, None)
        return found

    def _forward(self, place: int, batch: MicroBatch) -> None:
        unit, piece = self._place(place)
        inputs = self._take(place, batch, unit.reads)
        recompute = unit.instance >= 0 and self.program.recompute.get(piece.graph) == "full"
        if recompute and batch.training:
            batch.saved[unit.call] = list(inputs)
        outputs, saved = self._run("forward", unit, piece, piece.forward, batch, inputs)
        batch.env.update(zip(unit.writes, outputs, strict=True))
        if unit.instance >= 0 and batch.training and not recompute:
            batch.saved[unit.call] = saved

    def _recompute(self, place: int, batch: MicroBatch) -> None:
        unit, piece = self._place(place)
        _, batch.saved[unit.call] = self._run("forward", unit, piece, piece.forward, batch, batch.saved.pop(unit.call))

    def _travel(self, verb: str, place: int, batch: MicroBatch) -> None:
        unit, piece = self._place(place)
        call = unit.call
        if verb == "offload.issue" and call in batch.saved:
            batch.away[call] = self.host.send(batch.saved.pop(call), self.program.offload[piece.graph])
        elif call in batch.away and verb == "offload.wait":
            self.host.let_go(batch.away[call])
        elif call in batch.away and verb == "fetch.issue":
            self.host.call_back(batch.away[call])
        elif call in batch.away:
            batch.saved[call] = self.host.arrive(batch.away.pop(call))

    def _backward_input(self, place: int, batch: MicroBatch) -> None:
        unit, piece = self._place(place)
        assert piece.backward is not None
        if unit.instance >= 0:
            saved, tangents = batch.saved.pop(unit.call), self._take(place, batch, unit.reads)
        else:
            taken = dict(zip(unit.reads, self._take(place, batch, unit.reads), strict=True))
            saved, tangents = [taken[n] for n in piece.saved], [taken[n] for n in piece.tangents]
            del taken
        grads, batch.kept[place] = self._run(
            "backward_input", unit, piece, piece.backward.input, batch, saved, tangents
        )
        batch.env.update(zip(unit.writes, grads, strict=True))

    def _backward_weight(self, place: int, batch: MicroBatch) -> None:
        unit, piece = self._place(place)
        assert piece.backward is not None
        grads = self._run("backward_weight", unit, piece, piece.backward.weight, batch, batch.kept.pop(place))
        for local, grad in grads.items():
            fqn = self.program.fqn(unit, local)
            grad = grad.to(self._slots[fqn].reduce_dtype)
            _add(self._sums, (fqn, str(piece.uses[local].gradient)), grad)

    def _issue_reduce(self, place: int, due: Callable[[ParamSlot], bool]) -> None:
        unit, piece = self._place(place)
        tensors: dict[str, Tensor] = {}
        for local in self._does[place].reduces:
            fqn = self.program.fqn(unit, local)
            key = fqn, str(piece.uses[local].gradient)
            if key in self._sums and due(self._slots[fqn]):
                tensors[local] = self._sums.pop(key).value
        if tensors:
            self._flying[place] = (0, tensors)
            self._advance(place, "reduce")


def _add(sums: dict[Any, _Sum], key: Any, tensor: Tensor) -> None:
    if key in sums:
        sums[key].add(tensor)
    else:
        sums[key] = _Sum(tensor)


def _own_memory(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors, contiguous and each in memory of its own, so that they may be changed in place."""
    seen: set[int] = set()
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        address = tensor.untyped_storage().data_ptr()
        if not tensor.is_contiguous() or address in seen or tensor.untyped_storage().nbytes() != tensor.nbytes:
            tensor = tensor.clone(memory_format=torch.contiguous_format)
        seen.add(tensor.untyped_storage().data_ptr())
        found[name] = tensor
    return found
