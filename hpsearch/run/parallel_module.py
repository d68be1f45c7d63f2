"""`ParallelModule`: the one mutable noun. It owns this rank's pieces of the model and runs the program on them.

parallel = hpsearch.compile(model, cluster, global_batch=32, example=batch)
optimizer = torch.optim.AdamW(parallel.parameters(), lr=3e-4)
loss = parallel.step(parallel.local_rows(batch))     # or: loss = parallel(**batch); loss.backward()
parallel.clip_grad_norm_(1.0)
optimizer.step(); optimizer.zero_grad()
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from hpsearch.errors import BatchError, InternalError
from hpsearch.lower import Clock, ParallelProgram, PipelineProgram
from hpsearch.plan import Plan
from hpsearch.run import checkpoint, gradients
from hpsearch.run.batch import Batch, RowSampler, check, leaves, normal, signature, with_leaves
from hpsearch.run.intake import Intake
from hpsearch.run.launch import is_launched, together
from hpsearch.run.pipeline import PipelineStepper
from hpsearch.run.ranks import Ranks
from hpsearch.run.saving import Saver, Saving
from hpsearch.run.states import StatesOnHost
from hpsearch.run.stepper import Built, Stepper
from hpsearch.run.store import Store

Build = Callable[[Batch, "Built | None"], Built]
"""From a global batch (meta tensors will do) to a program; beside one that runs already, if given. Collective."""


class ParallelModule(nn.Module):
    """A model split over ranks. Behaves as the plain model: called, trained, saved under the same names.

    Nothing is captured before the first batch is seen: `prepare(global_batch)`, or the first call, which then takes the
    global batch. Later calls take this rank's rows (`local_rows`, `sampler`), or one global batch, equal on every rank.
    """

    def __init__(
        self,
        model: nn.Module,
        build: Build,
        *,
        global_batch: int | None = None,
        seed: int = 0,
        inductor: bool = False,
    ) -> None:
        super().__init__()
        self.training = model.training
        # Kept out of nn.Module's tables: only stored pieces are parameters of this module.
        self.__dict__.update(_model=model, _build=build, _seed=seed, _global_batch=global_batch)
        self.__dict__.update(_built=None, _mode=model.training, _store=None, _steppers={}, _ranks=None, _saver=Saver())
        self.__dict__.update(_clock=Clock(seed), _inductor=inductor)

    # What was decided

    @property
    def plan(self) -> Plan:
        """The plan that runs. Raises BatchError before a batch was seen."""
        return self._seen().plan

    @property
    def program(self) -> ParallelProgram | PipelineProgram:
        """The program for the first batch's shapes; `.code` is what every rank runs."""
        return self._seen().program

    @property
    def compile_s(self) -> dict[str, float]:
        """With `inductor`: function of the program → seconds of its compilation, of those that ran."""
        return {name: seconds for stepper in self._steppers.values() for name, seconds in stepper.compile_s.items()}

    @property
    def local_batch(self) -> int:
        """Rows that one rank brings to one step."""
        return self.plan.file.job.global_batch // self.plan.mesh.num_data_ranks

    def _seen(self) -> Built:
        if self._built is None:
            raise BatchError(
                "parallel model",
                "plan and program are made from the first batch, but none was seen yet",
                "Call parallel.prepare(global_batch), or pass example=global_batch to compile.",
            )
        return self._built  # type: ignore[no-any-return]

    def prepare(self, batch: Batch) -> ParallelModule:
        """Capture, search (unless a plan was given) and lower for a global batch; meta tensors will do. Collective.

        Under a launcher, this rank's pieces are filled as well.
        """
        if self._built is None:
            with torch.enable_grad(), _mode(self._model, self.training):
                self.__dict__["_built"] = self._build(normal(batch, self._global_batch), None)
            self.__dict__["_mode"] = self.training
            if is_launched() or self.plan.num_ranks == 1:
                self._materialise()
        return self

    def _materialise(self) -> None:
        """Take this process's place and fill its pieces. Raises LaunchError when the ranks are not there."""
        if self._store is None:
            ranks = Ranks.join(self.plan.mesh, self.program)
            store = Store(self.program, ranks)
            together("initial values", lambda: store.fill(self._model, self, self._seed))
            offload = self.plan.file.job.offload
            states = StatesOnHost(store.params, ranks.device) if offload is not None and offload.optimizer else None
            self.__dict__.update(_ranks=ranks, _store=store, _states=states)

    # Running

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """The loss of this step's batch: the mean over the valid targets of the global batch, equal on every rank.

        `loss.backward()` gives every parameter its gradient. With more than one micro-batch the gradients are already
        computed here, so that no more than one micro-batch of activations is alive.
        """
        batch = kwargs if kwargs else (args[0] if len(args) == 1 and isinstance(args[0], Mapping) else args)
        if args and kwargs:
            raise BatchError("batch", "expected positional or keyword arguments, but found both", "Pass keywords only.")
        stepper, inputs = self._receive(batch)
        store = self._store
        if not torch.is_grad_enabled():
            return stepper.evaluate(store.local(), store.buffers, inputs)
        self._clock.step += 1
        names = [fqn for fqn, p in store.params.items() if p.requires_grad]
        parameters = (store.params[name] for name in names)
        anchor = torch.zeros((), requires_grad=True)  # a pipeline rank may hold nothing that is trained
        return _Loss.apply(stepper, store, inputs, names, anchor, *parameters)  # type: ignore[no-any-return]

    def step(self, batch: Batch) -> torch.Tensor:
        """Forward and backward of one step: adds to every `.grad` and returns the detached loss.

        The loss is the mean over the valid targets of the global batch.
        """
        stepper, inputs = self._receive(batch)
        store = self._store
        self._clock.step += 1
        with torch.no_grad():
            loss, grads = stepper.step(store.local(), store.buffers, inputs)
            for fqn, grad in store.gradients(grads).items():
                parameter = store.params[fqn]
                parameter.grad = grad if parameter.grad is None else parameter.grad + grad
        return loss

    def _receive(self, batch: Batch) -> tuple[Stepper | PipelineStepper, list[list[torch.Tensor]]]:
        """The stepper for this shape of batch, and the batch as its inputs. Collective."""
        self.prepare(batch)
        self._materialise()
        local, num_items = self._intake.receive(leaves(batch))
        key = self.training, signature(local)
        if key not in self._steppers:
            built = self._built_for(batch, local)
            kind = PipelineStepper if isinstance(built.program, PipelineProgram) else Stepper
            self._steppers[key] = kind(built, self._ranks, self._store.written, self._clock, self._inductor)
        stepper = self._steppers[key]
        return stepper, stepper.micro_batches(local, num_items)

    @property
    def _intake(self) -> Intake:
        return Intake(self._seen(), self._ranks, _shifts_labels(self._model))

    def _built_for(self, batch: Batch, local: Mapping[str, torch.Tensor]) -> Built:
        """The program for a batch whose shapes, other than rows, are `local`'s, in the mode of `self.training`."""
        built, shapes = self._seen(), {}
        for name, leaf in built.leaves.items():
            shape = list(local[name].shape)
            if leaf.batch_dim is not None:
                shape[leaf.batch_dim] = leaf.shape[leaf.batch_dim]
            shapes[name] = tuple(shape)
        if self.training == self._mode and shapes == {name: leaf.shape for name, leaf in built.leaves.items()}:
            return built
        whole = {n: torch.empty(shape, dtype=local[n].dtype, device="meta") for n, shape in shapes.items()}
        with torch.enable_grad(), _mode(self._model, self.training):
            return self._build(with_leaves(batch, whole), built)

    # Batches

    def local_rows(self, batch: Batch) -> Batch:
        """This rank's rows of a global batch. Before the first batch was seen, `batch` is taken for `prepare`."""
        self.prepare(batch)
        self._materialise()
        built, pieces = self._seen(), self.plan.mesh.num_data_ranks
        found = leaves(batch)
        if not check(built.leaves, found, pieces) and pieces > 1:
            raise BatchError("local_rows", "expected a global batch, but the rows are one rank's already")
        cut = {n: leaf.rows(found[n], self._ranks.data_index, pieces) for n, leaf in built.leaves.items()}
        return with_leaves(batch, cut)

    def sampler(self, data: Any, *, seed: int | None = 0) -> RowSampler:
        """Row numbers of `data` (a data set or its length) for this rank.

        Meant for DataLoader(batch_size=parallel.local_batch). seed None keeps the data set's order.
        """
        self._seen()
        self._materialise()
        length = data if isinstance(data, int) else len(data)
        mesh = self.plan.mesh
        return RowSampler(length, self.plan.file.job.global_batch, self._ranks.data_index, mesh.num_data_ranks, seed)

    # Gradients

    def grad_norm(self, norm_type: float = 2.0) -> torch.Tensor:
        """The norm of all gradients as one vector, the same under any layout. Collective."""
        counts = self._need_store().counts
        found = (p.grad for name, p in self.named_parameters() if p.grad is not None and counts(name))
        return gradients.global_norm(found, norm_type)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Scale the gradients so that their norm is at most `max_norm`; returns the norm before. Collective."""
        return gradients.clip(self.parameters(), self.grad_norm(norm_type), max_norm)

    # Names, files

    def state_dict(self, *args: Any, full: bool = False, **kwargs: Any) -> dict[str, Any]:
        """Parameters (DTensors) and persistent buffers under the plain model's names.

        `full=True` gathers plain CPU tensors on rank 0, one at a time, and an empty dict elsewhere. Collective then.
        """
        store = self._need_store()
        found: dict[str, Any] = super().state_dict(*args, **kwargs)
        return checkpoint.gathered(found, store) if full else found

    def load_state_dict(  # type: ignore[override]
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> None:
        """Copy in plain global tensors, or DTensors of any layout, by full name. Raises CheckpointError."""
        if assign:
            raise InternalError("load_state_dict", "assign=True would drop the stored layout", "Leave it out.")
        self._need_store().load(state_dict, "state dict", strict=strict)

    def load_pretrained(self, folder: str | os.PathLike[str]) -> None:
        """Fill the model from a Hugging Face checkpoint directory; a rank reads only its slices.

        Raises CheckpointError listing names that are missing, unexpected or of another shape.
        """
        store = self._need_store()
        together(f"checkpoint {folder}", lambda: store.load_pretrained(self._model, Path(folder)))

    def save(
        self, folder: str | os.PathLike[str], optimizer: torch.optim.Optimizer | None = None, *, wait: bool = True
    ) -> Saving:
        """Write model, optimizer and plan to `folder`: all of it, or nothing. Collective.

        Without `wait` it is copied to host memory and written while training goes on. `Saving.wait()`, or the next
        save or load, waits until it is there, and raises CheckpointError if it could not be written.
        """
        self._need_store()
        self._saver.settle()
        if not wait:
            return self._saver.start(Path(folder), self, self.plan, optimizer, self._clock.step)
        checkpoint.save(Path(folder), self, self.plan, optimizer, self._clock.step)
        return Saving.saved(Path(folder))

    def load(self, folder: str | os.PathLike[str], optimizer: torch.optim.Optimizer | None = None) -> None:
        """Read what `save` wrote, under this or any other plan. Collective.

        Raises CheckpointError if anything is missing or damaged.
        """
        store = self._need_store()
        self._saver.settle()
        self._clock.step = checkpoint.load(Path(folder), self, optimizer, store.elsewhere)

    def _need_store(self) -> Store:
        self._seen()
        self._materialise()
        return self._store  # type: ignore[no-any-return]

    def __repr__(self) -> str:
        return (
            f"ParallelModule({type(self._model).__name__}, {self._built.plan if self._built else 'no batch seen yet'})"
        )


class _Loss(torch.autograd.Function):
    """The whole step as one differentiable number of the stored parameters."""

    @staticmethod
    def forward(
        ctx: Any, stepper: Any, store: Store, inputs: Any, names: list[str], _anchor: Any, *params: Any
    ) -> torch.Tensor:
        ctx.store, ctx.names = store, names
        loss, ctx.backward_of = stepper.forward_train(store.local(), store.buffers, inputs)
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        if ctx.backward_of is None:
            raise RuntimeError("the loss of a parallel model can be differentiated once; call the model again")
        local, ctx.backward_of = ctx.backward_of(grad), None
        found = ctx.store.gradients(local)
        return (None, None, None, None, None, *(found.get(name) for name in ctx.names))


@contextmanager
def _mode(model: nn.Module, training: bool) -> Iterator[None]:
    """The model in train or eval mode, for a moment; every module gets its own mode back."""
    before = {module: module.training for module in model.modules()}
    if model.training != training:
        model.train(training)
    try:
        yield
    finally:
        for module, was in before.items():
            module.training = was


def _shifts_labels(model: nn.Module) -> bool:
    """Whether the loss predicts the next label, as Hugging Face's causal LM loss does."""
    return getattr(getattr(model, "loss_function", None), "__name__", "") == "ForCausalLMLoss"
