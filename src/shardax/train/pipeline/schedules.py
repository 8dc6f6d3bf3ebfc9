# SPDX-License-Identifier: Apache-2.0
"""Schedules of pipelines: tables of the stages' operations, in order.

A model is cut into *chunks*, chunk i on stage i % S of S stages. A microbatch goes forward through
the chunks in order, and backward through them in reverse. A stage does one operation at a time, in
the order of its row; an operation waits until what it needs has been computed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from shardax._charts import chart_style, new_figure, svg_of
from shardax.errors import PartitionError
from shardax.extend import Options

KINDS = ("forward", "backward", "input", "weight")
_OPTIONS = Options(PartitionError)
_LETTERS: Mapping[str, str] = {"forward": "F", "backward": "B", "input": "I", "weight": "W"}
_TIMES: Mapping[str, float] = {"forward": 1, "backward": 2, "input": 1, "weight": 1}
_COLORS = {"forward": "#8fb8de", "backward": "#8fcf9f", "input": "#8fcf9f", "weight": "#e3c27d"}
_OPERATION_WIDTH, _ROW, _MARGIN, _LABEL = 30, 28, 70, 11  # pixels of a picture


class Operation(NamedTuple):
    """One microbatch in one chunk."""

    kind: str  # of KINDS
    microbatch: int
    chunk: int

    def __str__(self) -> str:
        return f"{_LETTERS.get(self.kind, '?')}{self.microbatch}"


class Timed(NamedTuple):
    """An operation of a stage, and when it begins and ends."""

    operation: Operation
    stage: int
    start: float
    end: float


@dataclass(frozen=True)
class Schedule:
    """Operations of each stage of a pipeline, in order.

    Args:
        name: For tables and pictures.
        table: Of each stage its operations in order: tuples of a kind, the number of the microbatch
            and that of the chunk. Kinds are ``"forward"`` and ``"backward"``; or, of a backward
            pass in two parts, ``"input"``, the gradient of the chunk's input, and ``"weight"``,
            that of its parameters.

    Attributes:
        stages: Number of stages.
        chunks: Number of chunks, a multiple of ``stages``.
        microbatches: Number of microbatches.

    Raises:
        PartitionError: If an operation is missing, there twice, on another stage than its chunk's,
            or waits for one that never comes.

    Example:
        >>> print(Schedule.one_f_one_b(2, 4).draw())
        1f1b: 2 stages, 4 microbatches, idle 20%
        stage 0  F0 F1 .. .. B0 -- F2 B1 -- F3 B2 -- .. B3 --
        stage 1  .. F0 B0 -- F1 B1 -- F2 B2 -- F3 B3 -- .. ..
    """

    name: str
    table: tuple[tuple[Operation, ...], ...]

    def __post_init__(self) -> None:
        rows = tuple(tuple(Operation(*operation) for operation in row) for row in self.table)
        object.__setattr__(self, "table", rows)
        self._check()
        self.simulate()

    @property
    def stages(self) -> int:
        """The number of stages."""
        return len(self.table)

    @property
    def chunks(self) -> int:
        """The number of chunks."""
        return 1 + max(operation.chunk for row in self.table for operation in row)

    @property
    def microbatches(self) -> int:
        """The number of microbatches."""
        return 1 + max(operation.microbatch for row in self.table for operation in row)

    @property
    def splits_backward(self) -> bool:
        """Whether gradients of inputs and of parameters are operations of their own."""
        return any(operation.kind == "weight" for row in self.table for operation in row)

    # --- The schedules of the literature ---

    @classmethod
    def named(cls, name: str, stages: int, microbatches: int, chunks: int) -> Schedule:
        """Makes a schedule by name.

        Args:
            name: ``"gpipe"``, ``"1f1b"``, ``"interleaved"`` or ``"zero-bubble"``.
            stages: Number of stages.
            microbatches: Number of microbatches.
            chunks: Number of chunks; of all but ``"interleaved"`` and ``"gpipe"``, as many as
                stages.

        Returns:
            The schedule.

        Raises:
            PartitionError: If there is no such schedule, or none of these numbers.

        Example:
            >>> Schedule.named("zero-bubble", 4, 8, 4).stages
            4
        """
        makers: dict[str, Callable[..., Schedule]] = {
            "gpipe": cls.gpipe,
            "1f1b": cls.one_f_one_b,
            "interleaved": cls.interleaved,
            "zero-bubble": cls.zero_bubble,
        }
        expected = f"{', '.join(map(repr, makers))}, or a Schedule of your own"
        _OPTIONS.check("schedule", name, name in makers, expected)
        _OPTIONS.integers(stages=stages, microbatches=microbatches, chunks=chunks)

        if chunks % stages:
            raise PartitionError(
                f"{chunks} parts of a model cannot be divided over {stages} stages. Make a "
                f"multiple of {stages} parts, or a mesh with as many stages as parts."
            )

        if name in ("gpipe", "interleaved"):
            return makers[name](stages, microbatches, chunks)

        if chunks != stages:
            raise PartitionError(
                f"The schedule {name!r} has one part of the model a stage, but there are {chunks} "
                f'for {stages} stages. Use schedule="interleaved", or join parts to {stages}.'
            )
        return makers[name](stages, microbatches)

    @classmethod
    def gpipe(cls, stages: int, microbatches: int, chunks: int | None = None) -> Schedule:
        """All forward passes, then all backward passes.

        After Y. Huang and others, "GPipe" (arXiv:1811.06965). A stage holds all microbatches.

        Args:
            stages: Number of stages.
            microbatches: Number of microbatches.
            chunks: Number of chunks; None for one a stage.

        Returns:
            The schedule.

        Raises:
            PartitionError: If a number is not positive.

        Example:
            >>> schedule = Schedule.gpipe(4, 8)
            >>> round(schedule.bubble_share(), 3), schedule.peak_microbatches()
            (0.273, (8, 8, 8, 8))
        """
        chunks = stages if chunks is None else chunks
        _OPTIONS.integers(stages=stages, microbatches=microbatches, chunks=chunks)
        rows = [list[Operation]() for _ in range(stages)]
        for chunk in range(chunks):
            rows[chunk % stages] += [Operation("forward", m, chunk) for m in range(microbatches)]
        for chunk in reversed(range(chunks)):
            rows[chunk % stages] += [Operation("backward", m, chunk) for m in range(microbatches)]
        return cls("gpipe", tuple(map(tuple, rows)))

    @classmethod
    def one_f_one_b(cls, stages: int, microbatches: int) -> Schedule:
        """Forward and backward passes in turn.

        After D. Narayanan and others (arXiv:2104.04473, section 2.2). Idle for as long as GPipe,
        while stage s of S holds at most S - s microbatches.

        Args:
            stages: Number of stages.
            microbatches: Number of microbatches.

        Returns:
            The schedule.

        Raises:
            PartitionError: If a number is not positive.

        Example:
            >>> schedule = Schedule.one_f_one_b(4, 8)
            >>> round(schedule.bubble_share(), 3), schedule.peak_microbatches()
            (0.273, (4, 3, 2, 1))
        """
        _OPTIONS.integers(stages=stages, microbatches=microbatches)
        rows: list[tuple[Operation, ...]] = []
        for stage in range(stages):
            forward = [Operation("forward", m, stage) for m in range(microbatches)]
            backward = [Operation("backward", m, stage) for m in range(microbatches)]
            rows.append(_in_turn(forward, backward, min(stages - 1 - stage, microbatches)))
        return cls("1f1b", tuple(rows))

    @classmethod
    def interleaved(cls, stages: int, microbatches: int, chunks: int) -> Schedule:
        """Forward and backward passes in turn, several chunks a stage.

        After D. Narayanan and others (arXiv:2104.04473, section 2.2). With v chunks a stage, passes
        are v times as short, and so is the time that a stage is idle.

        Args:
            stages: Number of stages.
            microbatches: Number of microbatches, a multiple of ``stages``.
            chunks: Number of chunks, a multiple of ``stages``.

        Returns:
            The schedule.

        Raises:
            PartitionError: If the numbers are no such multiples.

        Example:
            >>> round(Schedule.interleaved(4, 8, 8).bubble_share(), 3)
            0.158
        """
        _OPTIONS.integers(stages=stages, microbatches=microbatches, chunks=chunks)
        if chunks % stages or microbatches % stages:
            raise PartitionError(
                f"An interleaved schedule sends microbatches in groups of as many as stages, but "
                f"{microbatches} microbatches and {chunks} parts of the model are not both "
                f"multiples of {stages} stages. Use microbatches={-(-microbatches // stages)} * "
                f'{stages}, or schedule="gpipe".'
            )

        rounds = chunks // stages
        count = microbatches * rounds
        rows: list[tuple[Operation, ...]] = []
        for stage in range(stages):

            def at(number: int, kind: str, stage: int = stage) -> Operation:
                group, inside = divmod(number, chunks)
                turn, member = divmod(inside, stages)
                turn = turn if kind == "forward" else rounds - 1 - turn
                return Operation(kind, group * stages + member, turn * stages + stage)

            forward = [at(number, "forward") for number in range(count)]
            backward = [at(number, "backward") for number in range(count)]

            ahead = 2 * (stages - 1 - stage) + (rounds - 1) * stages
            if rounds == 1:
                ahead = stages - 1 - stage
            rows.append(_in_turn(forward, backward, min(ahead, count)))
        return cls("interleaved", tuple(rows))

    @classmethod
    def zero_bubble(cls, stages: int, microbatches: int) -> Schedule:
        """The backward pass in two parts; gradients of parameters fill gaps.

        After P. Qi and others, "Zero Bubble Pipeline Parallelism" (arXiv:2401.10241), the schedule
        that holds as many microbatches as 1F1B's first stage. Only the gradient of the input is
        waited for; that of the parameters is computed where a stage would be idle.

        Args:
            stages: Number of stages.
            microbatches: Number of microbatches.

        Returns:
            The schedule.

        Raises:
            PartitionError: If a number is not positive.

        Example:
            >>> schedule = Schedule.zero_bubble(4, 8)
            >>> round(schedule.bubble_share(), 3), max(schedule.peak_microbatches())
            (0.111, 4)
        """
        _OPTIONS.integers(stages=stages, microbatches=microbatches)
        rows: list[tuple[Operation, ...]] = []
        for stage in range(stages):
            forward, inputs, weights = (
                [Operation(kind, m, stage) for m in range(microbatches)]
                for kind in ("forward", "input", "weight")
            )
            row = list(_in_turn(forward, inputs, min(stages - 1 - stage, microbatches)))

            # Weights follow once so many inputs are done that all stages hold equally many.
            waiting, placed = iter(weights), list[Operation]()
            for operation in row:
                placed.append(operation)
                if operation.kind == "input" and operation.microbatch >= stage:
                    placed.append(next(waiting))

            rows.append((*placed, *waiting))
        return cls("zero-bubble", tuple(rows))

    # --- What a schedule costs ---

    def simulate(self, times: Mapping[str, float] | None = None) -> list[Timed]:
        """Runs the table, each operation as soon as it can.

        Args:
            times: Duration of a chunk's operation by kind; None for 1 of ``"forward"``,
                ``"input"`` and ``"weight"``, and 2 of ``"backward"``. Divided by the number of
                chunks a stage. Sends take no time.

        Returns:
            The operations in the order in which they begin, as tuples of ``operation``, ``stage``,
            ``start`` and ``end``.

        Example:
            >>> [str(span.operation) for span in Schedule.gpipe(2, 1).simulate()]
            ['F0', 'F0', 'B0', 'B0']
        """
        durations = {**_TIMES, **(times or {})}
        rounds = self.chunks // self.stages
        ends: dict[Operation, float] = {}
        timed: list[Timed] = []

        # When each stage is free, and the position of its next operation in its row.
        free, positions = [0.0] * self.stages, [0] * self.stages
        while moved := [
            stage
            for stage, position in enumerate(positions)
            if position < len(self.table[stage])
            and all(n in ends for n in _needs(self.table[stage][position], self.chunks - 1))
        ]:
            for stage in moved:
                operation = self.table[stage][positions[stage]]
                needed = (ends[need] for need in _needs(operation, self.chunks - 1))
                start = max((free[stage], *needed))
                end = start + durations[operation.kind] / rounds
                ends[operation] = free[stage] = end
                positions[stage] += 1
                timed.append(Timed(operation, stage, start, end))

        if len(timed) < sum(map(len, self.table)):
            raise PartitionError(self._deadlock(positions, ends))
        return sorted(timed, key=lambda span: (span.start, span.end, span.stage))

    def bubble_share(self, times: Mapping[str, float] | None = None) -> float:
        """Computes the share of idle time of the stages.

        Args:
            times: As for ``simulate``.

        Returns:
            The share, the mean over stages.

        Example:
            >>> round(Schedule.gpipe(2, 2).bubble_share(), 3)  # (S - 1) / (M + S - 1)
            0.333
        """
        timed = self.simulate(times)
        end = max(span.end for span in timed)
        return 1 - sum(span.end - span.start for span in timed) / (end * self.stages)

    def peak_microbatches(self) -> tuple[int, ...]:
        """Counts the most microbatches held by stages.

        Returns:
            Of each stage, the most forward passes whose backward pass is not over. A microbatch
            counts in each chunk of the stage.

        Example:
            >>> Schedule.one_f_one_b(3, 6).peak_microbatches()
            (3, 2, 1)
        """
        last_kind = "weight" if self.splits_backward else "backward"
        peaks: list[int] = []
        for row in self.table:
            in_flight = peak = 0
            for operation in row:
                in_flight += (operation.kind == "forward") - (operation.kind == last_kind)
                peak = max(peak, in_flight)
            peaks.append(peak)
        return tuple(peaks)

    # --- Pictures ---

    def draw(self, times: Mapping[str, float] | None = None) -> str:
        """Draws the schedule as text, one row a stage.

        Args:
            times: As for ``simulate``; whole numbers.

        Returns:
            Lines in which ``F``, ``B``, ``I`` and ``W`` (forward, backward, input, weight) stand
            before the number of a microbatch, ``--`` where an operation goes on, and ``..`` where
            the stage is idle. Of several chunks a stage, a letter after the number says which.

        Example:
            >>> print(Schedule.interleaved(2, 2, 4).draw())
            interleaved: 2 stages, 2 microbatches, idle 20%
            stage 0  F0a F1a F0b F1b ... ... B0b --- ... B1b --- B0a --- B1a ---
            stage 1  ... F0a F1a F0b B0b --- F1b B1b --- B0a --- B1a --- ... ...
        """
        # A mark is the time of a whole stage, divided by the number of chunks in it.
        marks = self.chunks // self.stages
        timed = self.simulate(times)
        width = max(len(self._label(span.operation)) for span in timed)
        idle, goes_on = "." * width, "-" * width

        rows = [list[str]() for _ in range(self.stages)]
        for span in timed:
            row = rows[span.stage]
            row += [idle] * (round(span.start * marks) - len(row))
            row.append(self._label(span.operation).ljust(width))
            row += [goes_on] * (round(span.end * marks) - len(row))

        numbers = f"{self.stages} stages, {self.microbatches} microbatches"
        lines = [f"{self.name}: {numbers}, idle {self.bubble_share(times):.0%}"]
        end = max(map(len, rows))
        for stage, row in enumerate(rows):
            row += [idle] * (end - len(row))
            lines.append(f"stage {stage}  {' '.join(row)}".rstrip())
        return "\n".join(lines)

    @chart_style()
    def svg(self, times: Mapping[str, float] | None = None) -> str:
        """Draws the schedule as a picture, by matplotlib.

        Args:
            times: As for ``simulate``.

        Returns:
            The text of an SVG for a page: a row a stage, time from left to right.

        Raises:
            ImportError: If matplotlib is not installed.

        Example:
            >>> Schedule.gpipe(2, 2).svg()[:4]
            '<svg'
        """
        timed = self.simulate(times)
        end = max(span.end for span in timed)
        rounds = self.chunks // self.stages
        figure = new_figure(
            width=_MARGIN + _OPERATION_WIDTH * rounds * end, height=_ROW * (self.stages + 1)
        )
        axes = figure.subplots()

        bars = axes.barh(
            y=[span.stage for span in timed],
            left=[span.start for span in timed],
            width=[span.end - span.start for span in timed],
            color=[_COLORS[span.operation.kind] for span in timed],
            edgecolor="white",
        )
        labels = [self._label(span.operation) for span in timed]
        axes.bar_label(bars, labels, label_type="center", color="black", fontsize=_LABEL)

        axes.set_title(f"{self.name}, idle {self.bubble_share(times):.0%}", loc="left")
        axes.set_xlim(0, end)
        axes.set_xticks([])
        axes.set_yticks(range(self.stages), [f"stage {stage}" for stage in range(self.stages)])
        axes.tick_params(length=0)
        axes.invert_yaxis()
        return svg_of(figure)

    def _label(self, operation: Operation) -> str:
        if self.chunks == self.stages:
            return f"{operation}"
        turn = operation.chunk // self.stages
        return f"{operation}{chr(ord('a') + turn) if turn < 26 else turn}"

    # --- Checks ---

    def _fault(self, op: Operation, stage: int) -> str | None:
        """Returns the fault of an operation of a stage, or None."""
        if op.kind not in KINDS:
            return f"is of kind {op.kind!r}; there are {', '.join(map(repr, KINDS))}"
        if op.microbatch < 0 or op.chunk < 0:
            return "has a negative number"
        if op.chunk % self.stages != stage:
            return f"belongs to stage {op.chunk % self.stages} of {self.stages}"
        return None

    def _check(self) -> None:
        if not self.table or not all(self.table):
            raise PartitionError(f"The schedule {self.name!r} has no stages, or one without work.")

        for stage, row in enumerate(self.table):
            for op in row:
                if fault := self._fault(op, stage):
                    raise PartitionError(f"In the schedule {self.name!r}, {tuple(op)} {fault}.")

        backward = ("input", "weight") if self.splits_backward else ("backward",)
        expected = {
            Operation(kind, m, chunk)
            for kind in ("forward", *backward)
            for m in range(self.microbatches)
            for chunk in range(self.chunks)
        }

        counts = Counter(operation for row in self.table for operation in row)
        missing, added = expected - counts.keys(), counts.keys() - expected
        twice = {operation for operation, times in counts.items() if times > 1}
        for fault, operations in (("lacks", missing), ("has besides", added), ("has twice", twice)):
            if operations:
                texts = ", ".join(map(str, sorted(map(tuple, operations))[:6]))
                raise PartitionError(
                    f"The schedule {self.name!r} {fault} {texts}. Each microbatch goes once "
                    "forward and once backward (or: input, weight) through each chunk."
                )

    def _deadlock(self, positions: Sequence[int], ends: Mapping[Operation, float]) -> str:
        lines: list[str] = []
        for stage, position in enumerate(positions):
            if position < len(self.table[stage]):
                operation = self.table[stage][position]
                waits = [n for n in _needs(operation, self.chunks - 1) if n not in ends]
                needs = ", ".join(str(tuple(need)) for need in waits)
                lines.append(f"  stage {stage}: {tuple(operation)} waits for {needs}")
        return (
            f"The schedule {self.name!r} cannot go on: each stage waits for another.\n"
            + "\n".join(lines)
            + "\nPut an operation after those that it needs: forward passes in the order of "
            "chunks, backward passes in reverse."
        )


def _needs(operation: Operation, last_chunk: int) -> Iterator[Operation]:
    """Yields the operations before an operation."""
    kind, microbatch, chunk = operation
    if kind == "forward":
        if chunk:
            yield Operation("forward", microbatch, chunk - 1)
    elif kind == "weight":
        yield Operation("input", microbatch, chunk)
    else:
        yield Operation("forward", microbatch, chunk)
        if chunk < last_chunk:
            yield Operation(kind, microbatch, chunk + 1)


def _in_turn(
    forward: Sequence[Operation], backward: Sequence[Operation], ahead: int
) -> tuple[Operation, ...]:
    """Some forward passes, then both kinds in turn, then the others."""
    pairs = zip(forward[ahead:], backward, strict=False)
    middle = [operation for pair in pairs for operation in pair]
    return (*forward[:ahead], *middle, *backward[len(forward) - ahead :])
