"""`Module`: one of several models that run in a step, on devices of one cluster."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hpsearch.errors import LegalityError
from hpsearch.estimate import ModelShape, ParallelLayout


@dataclass(frozen=True)
class Module:
    """What it is, how much of it a step runs, and what it waits for."""

    name: str
    shape: ModelShape
    base: ParallelLayout
    """Rows, tokens of a row and switches of the training code."""
    trains: bool
    """Else it runs forward only: no gradients, no optimizer."""
    runs: int = 1
    """Times a step; a training module updates each time."""
    takes: tuple[str, ...] = ()
    """Modules whose activations it takes; gradients go back to those that train if it trains."""
    after: tuple[str, ...] = ()
    """Modules that it waits for until they are done with the step."""
    pins: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)

    @property
    def work(self) -> float:
        """Parameters that tokens of a step pass through, backward counted twice: how fixed splits weigh modules."""
        return self.shape.active_params * float(self.tokens) * self.runs * (3 if self.trains else 1)

    @property
    def tokens(self) -> int:
        return self.base.global_batch * self.base.seq_len

    @property
    def sent_bytes(self) -> float:
        """Of its results, in 16 bit."""
        return 2.0 * self.tokens * self.shape.hidden


@dataclass(frozen=True)
class Job:
    """Modules of one step, those that others wait for first."""

    modules: tuple[Module, ...]

    def __post_init__(self) -> None:
        seen: set[str] = set()
        for one in self.modules:
            if one.name in seen:
                problem = "expected names that differ, but it is there twice"
                raise LegalityError(f"module {one.name}", problem, f"Call one of them {one.name}-2.")
            if missing := [name for name in (*one.takes, *one.after) if name not in seen]:
                raise LegalityError(
                    f"module {one.name}", f"expected to wait for modules that stand before it, but {missing[0]!r} does "
                    f"not ({', '.join(sorted(seen)) or 'none'} do)", "Put it before, or take it away.",
                )  # fmt: skip
            seen.add(one.name)
        for one in self.modules:
            if one.runs > 1 and self.is_chained(one):
                raise LegalityError(
                    f"module {one.name}", f"expected to run once a step, as activations pass, but runs = {one.runs}",
                    "Give its whole batch at once.",
                )  # fmt: skip
        if not self.modules:
            raise LegalityError("job", "expected at least one module, but it has none", "Describe one.")

    def of(self, name: str) -> Module:
        return next(one for one in self.modules if one.name == name)

    def feeds(self, module: Module) -> tuple[Module, ...]:
        """Modules that train and send gradients back to `module`, if it trains."""
        return tuple(one for one in self.modules if module.name in one.takes and one.trains and module.trains)

    def is_chained(self, module: Module) -> bool:
        """Whether activations reach it or leave it."""
        return bool(module.takes) or any(module.name in one.takes for one in self.modules)

    @property
    def chunks(self) -> tuple[int, ...]:
        """Into how many parts the batch of modules that pass activations may be cut, to run on different devices at
        the same time."""
        chained = [one for one in self.modules if self.is_chained(one)]
        if not chained:
            return (1,)
        return tuple(c for c in CHUNKS if all(one.base.global_batch % c == 0 for one in chained))


CHUNKS = (1, 2, 4, 8, 16)
