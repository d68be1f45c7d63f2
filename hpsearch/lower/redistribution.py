"""One change of layout as statements: collectives issued and waited for, with the local cuts, pads and joins between.

    S(d) → R      pad · all_gather · join along d · trim
    P → S(d)      pad · split along d · reduce_scatter · trim
    P → R         all_reduce
    S(a) → S(b)   split along b · all_to_all · join along a
    R → S(d)      cut         R → P   mask

Pads and trims appear only where a cut is uneven. Lengths that differ from rank to rank are written `extent(n, {axis:
size})`, which the rank works out from its coordinate: one program text serves all ranks.
"""

from __future__ import annotations

from hpsearch.errors import LoweringError
from hpsearch.graph import ITEM_BYTES
from hpsearch.layout import ROLES, Layout, Mesh, Step, redistribute, steps_between
from hpsearch.layout.redistribute import blocking_axis
from hpsearch.lower.statement import LocalValue, Sent, Statement


def redistribute_value(
    value: LocalValue, target: Layout, mesh: Mesh, *, phase: str, what: str, name: str, comment: str = ""
) -> list[Statement]:
    """Statements that give `value` the layout `target` under the local name `name`; none when it has it already.

    Raises LoweringError where no order of collectives along single axes is right.
    """
    writer = _Writer(value, mesh, phase, what, name)
    order = mesh.names
    steps = _steps(value, target, mesh)
    sent = iter(redistribute(value.shape, ITEM_BYTES[value.dtype], value.layout, target, mesh.sizes))
    now = value.layout
    for step in steps:
        _check_nesting(value, now, step, order)
        if step.kind is None:
            writer.local_step(now, step)
        else:
            collective = next(sent)
            writer.collective_step(now, step, collective.nbytes, comment)
        now = now.with_(step.axis, step.target, order)
    return writer.finish()


def _steps(value: LocalValue, target: Layout, mesh: Mesh) -> tuple[Step, ...]:
    for axis in mesh.names:
        if value.layout[axis].is_shard and target[axis].is_partial:
            raise LoweringError(
                f"value {value.name} {list(value.shape)}",
                f"cannot become {target} from {value.layout}: a cut tensor is never turned into addends on {axis}",
                "Choose another rule for the op that reads it.",
            )
    return steps_between(value.shape, ITEM_BYTES[value.dtype], value.layout, target, mesh.sizes)


def _check_nesting(value: LocalValue, now: Layout, step: Step, order: tuple[str, ...]) -> None:
    """An axis may not start or stop cutting a dim while an axis behind it in split order cuts the same dim."""
    inner = blocking_axis(now, step, order)
    if inner is not None:
        raise LoweringError(
            f"value {value.name} {list(value.shape)} ({now})",
            f"cannot go {step.source} -> {step.target} on {step.axis}, because {inner} cuts dim {now[inner].dim} "
            f"inside the pieces of {step.axis}",
            f"Place {step.axis} on another dim.",
        )


class _Writer:
    """Collects the statements of one redistribution; each step reads what the last one wrote."""

    def __init__(self, value: LocalValue, mesh: Mesh, phase: str, what: str, name: str) -> None:
        self.value, self.mesh, self.phase, self.what, self.name = value, mesh, phase, what, name
        self.current = value.name
        self.found: list[Statement] = []

    def finish(self) -> list[Statement]:
        """The statements, the last one writing the wanted name."""
        if not self.found:
            return []
        last = self.found[-1]
        text = self.name + last.text[len(last.writes[0]) :]
        self.found[-1] = Statement((self.name,), text, last.reads, last.phase, last.kind, last.comment, last.sent)
        return self.found

    def add(self, expression: str, kind: str, comment: str = "", sent: Sent | None = None) -> None:
        """One more statement; `expression` has `@` where the current name belongs."""
        name = f"{self.name}__{len(self.found)}"
        text = f"{name} = {expression.replace('@', self.current)}"
        self.found.append(Statement((name,), text, (self.current,), self.phase, kind, comment, sent))
        self.current = name

    def local_step(self, now: Layout, step: Step) -> None:
        index, size = f'coordinate["{step.axis}"]', self.mesh.size(step.axis)
        comment = f"{step.axis}:{step.source} -> {step.target}"
        if step.target.is_partial:
            self.add(f"mask(@, {index})", "local", comment)
        elif row := self._row(step.axis, step.target.dim):
            self.add(f"cut_rows(@, {step.target.dim}, {index}, {size}, {row})", "local", comment)
        else:
            self.add(f"cut(@, {step.target.dim}, {index}, {size})", "local", comment)

    def _row(self, axis: str, dim: int) -> str:
        """For an axis along sequences: elements of a sequence along `dim`, and whether pieces are head-tail; else "".

        An axis in front of it cuts whole sequences, so the number is that of the global tensor.
        """
        if ROLES.get(axis) != "sequence":
            return ""
        size, row = self.mesh.size(axis), self.value.per_row[dim] if self.value.per_row else 0
        row = row or self.value.shape[dim]
        return f"{row}, {self.mesh.head_tail and row % (2 * size) == 0}" if row % size == 0 else ""

    def collective_step(self, now: Layout, step: Step, nbytes: int, comment: str) -> None:
        kind = step.kind or ""
        sent = Sent(kind, step.axis, self.what, self.value.dtype, nbytes)
        note = f"{comment or self.what}  {step.axis}:{step.source} -> {step.target}  {kind} {megabytes(nbytes)}"
        {
            "all_gather": self._all_gather,
            "reduce_scatter": self._reduce_scatter,
            "all_reduce": self._all_reduce,
            "all_to_all": self._all_to_all,
        }[kind](now, step, note, sent)

    def _all_gather(self, now: Layout, step: Step, note: str, sent: Sent) -> None:
        dim, size = step.source.dim, self.mesh.size(step.axis)
        outer = self._cuts(now, dim, before=step.axis)
        uneven = self._is_uneven(dim, {**outer, step.axis: size})
        whole = self._extent(dim, outer)
        if uneven:
            self.add(f"pad(@, {dim}, {_ceil(whole, size)})", "local")
            ready = "@"
        else:
            ready = "@.contiguous()"
        self.add(f'c10d.all_gather_into_tensor({ready}, {size}, groups["{step.axis}"])', "issue", note, sent)
        self.add("c10d.wait_tensor(@)", "wait")
        if row := self._row(step.axis, dim):
            self.add(f"join_rows(@, {dim}, {size}, {row})", "local")
        elif dim != 0:
            self.add(f"join(@, {dim}, {size})", "local")
        if uneven:
            self.add(f"trim(@, {dim}, {whole})", "local")

    def _reduce_scatter(self, now: Layout, step: Step, note: str, sent: Sent) -> None:
        dim, size = step.target.dim, self.mesh.size(step.axis)
        outer = self._cuts(now, dim, before=step.axis)
        uneven = self._is_uneven(dim, {**outer, step.axis: size})
        whole = self._extent(dim, outer)
        if uneven:
            self.add(f"pad(@, {dim}, {_ceil(whole, size)} * {size})", "local")
        row = self._row(step.axis, dim)
        if row:
            self.add(f"split_rows(@, {dim}, {size}, {row})", "local")
        elif dim != 0:
            self.add(f"split(@, {dim}, {size})", "local")
        ready = "@" if uneven or dim != 0 or row else "@.contiguous()"
        self.add(f'c10d.reduce_scatter_tensor({ready}, "sum", {size}, groups["{step.axis}"])', "issue", note, sent)
        self.add("c10d.wait_tensor(@)", "wait")
        if uneven:
            self.add(f"trim(@, {dim}, {self._extent(dim, {**outer, step.axis: size})})", "local")

    def _all_reduce(self, now: Layout, step: Step, note: str, sent: Sent) -> None:
        self.add(f'c10d.all_reduce(@.contiguous(), "sum", groups["{step.axis}"])', "issue", note, sent)
        self.add("c10d.wait_tensor(@)", "wait")

    def _all_to_all(self, now: Layout, step: Step, note: str, sent: Sent) -> None:
        size, mine, other = self.mesh.size(step.axis), step.source.dim, step.target.dim
        for dim in (mine, other):
            if self._is_uneven(dim, {**self._cuts(now, dim, before=step.axis), step.axis: size}):
                raise LoweringError(
                    f"value {self.value.name} {list(self.value.shape)}",
                    f"an exchange over {step.axis} needs dim {dim} to divide by {size}",
                    "Choose another layout.",
                )
        self.add(f"split(@, {other}, {size})", "local")
        each = f"[{self._rows(now, other, size)}] * {size}"
        self.add(f'c10d.all_to_all_single(@, {each}, {each}, groups["{step.axis}"])', "issue", note, sent)
        self.add("c10d.wait_tensor(@)", "wait")
        self.add(f"join(@, {mine}, {size})", "local")

    def _rows(self, now: Layout, other: int, size: int) -> str:
        """Rows of dim 0 that go to each rank once the pieces along `other` follow each other there."""
        cuts = self._cuts(now, 0)
        if self._is_uneven(0, cuts):
            return f"@.shape[0] // {size}"
        return str(self._even(0, cuts) // (size if other == 0 else 1))

    def _cuts(self, layout: Layout, dim: int, before: str | None = None) -> dict[str, int]:
        """Axes that cut `dim`, in split order, those in front of `before` when given."""
        names = self.mesh.names[: self.mesh.names.index(before)] if before else self.mesh.names
        return {a: self.mesh.size(a) for a in names if layout[a].is_shard and layout[a].dim == dim}

    def _is_uneven(self, dim: int, cuts: dict[str, int]) -> bool:
        length = self.value.shape[dim]
        for size in cuts.values():
            if length % size:
                return True
            length //= size
        return False

    def _even(self, dim: int, cuts: dict[str, int]) -> int:
        length = self.value.shape[dim]
        for size in cuts.values():
            length //= size
        return length

    def _extent(self, dim: int, cuts: dict[str, int]) -> str:
        """Length of this rank's piece of `dim`, as a number or as an expression."""
        if not self._is_uneven(dim, cuts):
            return str(self._even(dim, cuts))
        return f"extent({self.value.shape[dim]}, {cuts})"


def _ceil(length: str, size: int) -> str:
    return str(-(-int(length) // size)) if length.isdigit() else f"-(-{length} // {size})"


def megabytes(nbytes: int) -> str:
    return f"{nbytes / 1e6:.4g} MB" if nbytes >= 100_000 else f"{nbytes} B"
