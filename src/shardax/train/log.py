# SPDX-License-Identifier: Apache-2.0
"""Destinations of a run's records: a log, TensorBoard, other trackers.

The log has one JSON object per line. A line counts once its newline is written; the torn line of a
killed process is ignored by readers and cut off by the next writer. To resume at step k cuts off
all that was logged past k, for these steps run again. JSON has no NaN and no infinities: they are
written as the strings ``"NaN"``, ``"Infinity"``, ``"-Infinity"``, which float() in any language
understands.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, Self, runtime_checkable

import jax
import numpy as np

from shardax.extend import needs_package
from shardax.train.errors import TrainError
from shardax.train.progress import OverdueError, StopRequest

_NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


class JsonlLog:
    """Append-only log file of JSON records.

    A record is handed to the operating system whole, so it survives the death of the process by any
    signal. ``close`` also waits for the disk.

    Args:
        path: The file; it and its folder are made if need be, an existing log is continued.
        resume_step: Drop what an existing log has past this step; None keeps it all, -1 drops all
            steps.

    Raises:
        TrainError: The existing file is no log, or is damaged before its last line. It is left as
            it was.

    Example:
        >>> import tempfile
        >>> folder = tempfile.TemporaryDirectory()
        >>> path = Path(folder.name, "log.jsonl")
        >>> with JsonlLog(path) as log:
        ...     log.write(step=1, loss=2.5)
        ...     log.write(step=2, loss=float("inf"))
        >>> with JsonlLog(path, resume_step=1) as log:
        ...     log.write(step=2, loss=2.0)
        >>> read_jsonl(path)
        [{'step': 1, 'loss': 2.5}, {'step': 2, 'loss': 2.0}]
        >>> folder.cleanup()
    """

    def __init__(self, path: str | os.PathLike[str], *, resume_step: int | None = None) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._last_step = -1
        keep_bytes = 0
        for record, end in _complete_records(self.path) if self.path.exists() else []:
            step = _step_of(record, self.path)
            if resume_step is not None and step is not None and step > resume_step:
                break
            keep_bytes = end
            self._last_step = self._last_step if step is None else step
        # Unbuffered, so that what write() was given is out of the process when it returns.
        self._file = io.FileIO(self.path, "ab")
        self._file.truncate(keep_bytes)

    def write(self, /, **record: object) -> None:
        """Appends one record.

        Args:
            **record: Names and values: numbers, strings, booleans, None, arrays, and lists and
                dicts of these. ``step``, if given, is an int not below that of any earlier record.

        Raises:
            TrainError: A value has no JSON form, the step goes back, or the log is closed. Nothing
                is written.
        """
        if self._file.closed:
            raise TrainError(
                f"The log {str(self.path)!r} is closed. Open it again: JsonlLog(path)."
            )
        plain = {name: _to_json(value, name) for name, value in record.items()}
        step = _step_of(plain, self.path)
        if step is not None and step < self._last_step:
            raise TrainError(
                f"A record of step {step} cannot follow one of step {self._last_step} in "
                f"{str(self.path)!r}. To run it again: JsonlLog(path, resume_step={step - 1})."
            )
        self._append(json.dumps(plain, allow_nan=False, separators=(",", ":")).encode() + b"\n")
        self._last_step = self._last_step if step is None else step

    def _append(self, line: bytes) -> None:
        old_size = os.fstat(self._file.fileno()).st_size
        try:
            while line:
                line = line[self._file.write(line) :]
        except OSError as error:
            # A full disk may have taken half a line, which would spoil the next one.
            self._file.truncate(old_size)
            error.filename = str(self.path)
            raise

    def resume(self, step: int) -> None:
        """Drops the records past a step; opens a closed log again.

        Args:
            step: The last step to keep; -1 drops all steps.
        """
        self.close()
        self.__init__(self.path, resume_step=step)

    def close(self) -> None:
        """Waits until everything is on disk, and closes; may be called again."""
        if not self._file.closed:
            os.fsync(self._file.fileno())
            self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def read_jsonl(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    r"""Reads a log, also one in writing or of a killed writer.

    Args:
        path: The file.

    Returns:
        The records in order; a torn last line is left out, non-finite numbers are numbers again.

    Raises:
        FileNotFoundError: There is no such file.
        TrainError: A complete line is no JSON object.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = Path(folder, "log.jsonl")
        ...     _ = path.write_text('{"step":1,"loss":"NaN"}\n{"step":2,"lo')
        ...     read_jsonl(path)
        [{'step': 1, 'loss': nan}]
    """
    records = _complete_records(Path(path))
    try:
        return [_from_json(record) for record, _ in records]
    except RecursionError:
        raise TrainError(
            f"A record of {str(path)!r} is nested more deeply than a log writes. Something else "
            "wrote to it: delete that line, or move the file away."
        ) from None


# --- Trackers ---


@runtime_checkable
class Tracker(Protocol):
    """Destination of a run's records, such as ``TensorBoardLog``.

    One may have ``resume(step)`` too: it is called before the first record, with the step after
    which the run goes on (-1: from the start), and what was recorded past it is outdated.

    Example:
        >>> class Printed:
        ...     def write(self, **record):
        ...         print(record)
        ...     def close(self):
        ...         pass
        >>> isinstance(Printed(), Tracker)
        True
    """

    def write(self, /, **record: object) -> None:
        """Takes a record: ``step``, and numbers by name."""
        ...

    def close(self) -> None:
        """Is called at the end of a run."""
        ...


class TensorBoardLog:
    """Tracker writing event files of TensorBoard.

    Numbers are scalars by their names, with those of an evaluation under ``eval/``; what is no
    number is left out. Needs the package ``tensorboard``: ``shardax[tensorboard]``.

    Args:
        directory: Folder of the event files; made if need be. TensorBoard shows folders within one
            folder side by side, as runs.

    Raises:
        ImportError: If ``tensorboard`` is missing.

    Example:
        >>> import tempfile
        >>> folder = tempfile.mkdtemp()
        >>> log = TensorBoardLog(folder)
        >>> log.write(step=1, loss=2.5)
        >>> log.close()
        >>> [path.name.split(".")[1] for path in Path(folder).iterdir()]
        ['out']
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self.directory = Path(directory)
        self._file: Any = None
        self._packages()

    def resume(self, step: int) -> None:
        """Begins a new event file; TensorBoard drops records past a step.

        Args:
            step: The last step to keep; -1 drops all steps.
        """
        events, _ = self._packages()
        self.close()
        if self.directory.is_dir() and any(self.directory.glob("events.out.tfevents.*")):
            start = events.SessionLog(status=events.SessionLog.START)
            self._writer().add_event(self._event(session_log=start, step=step + 1))

    def write(self, /, **record: Any) -> None:
        """Writes the numbers of a record.

        Args:
            **record: ``step``, an int of 0 or more, and numbers or arrays of shape () by name.

        Raises:
            TrainError: If there is no such step.
        """
        step = _step_of(record, self.directory)
        if step is None:
            raise TrainError(
                f"A record for {str(self.directory)!r} has no step: write(step=..., ...)."
            )
        _, summaries = self._packages()
        values = [
            summaries.Summary.Value(tag=re.sub("^eval_", "eval/", name), simple_value=float(number))
            for name, number in record.items()
            if name != "step" and _is_number(number)
        ]
        self._writer().add_event(self._event(step=step, summary=summaries.Summary(value=values)))

    def close(self) -> None:
        """Waits until all is on disk; a later record begins a file."""
        file, self._file = self._file, None
        if file is not None:
            file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _writer(self):
        if self._file is None:
            from tensorboard.summary.writer.event_file_writer import EventFileWriter

            self._file = EventFileWriter(str(self.directory))
        return self._file

    def _event(self, **fields: object):
        return self._packages()[0].Event(wall_time=time.time(), **fields)

    def _packages(self) -> tuple[Any, Any]:
        with needs_package("TensorBoardLog", "shardax[tensorboard]"):
            from tensorboard.compat.proto import event_pb2, summary_pb2
        return event_pb2, summary_pb2


class Trackers(contextlib.ExitStack):
    """The log of a run and its other trackers, while it runs."""

    def __init__(
        self, path: Path, trackers: Sequence[Tracker], step: int, stop: StopRequest
    ) -> None:
        super().__init__()
        self._log = self.enter_context(JsonlLog(path, resume_step=step))
        self._stop = stop
        self._trackers: list[Tracker] = []
        try:
            for tracker in trackers:
                with stop.bounded(type(tracker).__name__):
                    getattr(tracker, "resume", lambda step: None)(step)
                self.callback(self._close, tracker)
                self._trackers.append(tracker)
        except BaseException:
            self.close()
            raise

    def write(self, /, **record: object) -> None:
        """Gives a record to each, to the log first."""
        self._log.write(**record)
        for tracker in self._trackers:
            with self._stop.bounded(type(tracker).__name__):
                tracker.write(**record)

    def _close(self, tracker: Tracker) -> None:
        # The run has ended by now, whether or not a tracker lets itself be closed.
        with contextlib.suppress(OverdueError), self._stop.bounded(type(tracker).__name__):
            tracker.close()


def as_trackers(sinks: object) -> tuple[Tracker, ...]:
    """Returns trackers, or raises TrainError."""
    listed = () if isinstance(sinks, Tracker) or not isinstance(sinks, Iterable) else tuple(sinks)
    wrong = [type(sink).__name__ for sink in listed if not isinstance(sink, Tracker)]
    if wrong or (not listed and sinks != ()):
        raise TrainError(
            f"trackers has a {wrong[0] if wrong else type(sinks).__name__}, but must be objects "
            "with write(**record) and close(), in a tuple or list: "
            "trackers=(TensorBoardLog(folder),)."
        )
    return listed


def _is_number(value: object) -> bool:
    if isinstance(value, np.generic | np.ndarray | jax.Array):
        return np.ndim(value) == 0 and np.issubdtype(value.dtype, np.number)
    return isinstance(value, int | float) and not isinstance(value, bool)


# --- Reading ---


def _complete_records(path: Path) -> list[tuple[dict[str, Any], int]]:
    """Returns every complete record with the offset of its end."""
    content = path.read_bytes()
    records: list[tuple[dict[str, Any], int]] = []
    start = 0
    while (newline := content.find(b"\n", start)) >= 0:
        try:
            record = json.loads(content[start:newline])
        except (ValueError, RecursionError):
            record = None

        if not isinstance(record, dict):
            excerpt = content[start : min(newline, start + 80)]
            raise TrainError(
                f"Line {len(records) + 1} of {str(path)!r} is no JSON object: {excerpt!r}. If this "
                "is a log, something else wrote to it: delete that line, or move the file away."
            )
        start = newline + 1
        records.append((record, start))

    # A torn line is the beginning of a record; anything else was not written by a log.
    if content[start : start + 1] not in (b"", b"{"):
        raise TrainError(
            f"{str(path)!r} ends in {content[start : start + 80]!r}, which is not the beginning of "
            "a record. This file is no log, or something else wrote to it: choose another path."
        )
    return records


def _step_of(record: Mapping[str, object], path: Path) -> int | None:
    step = record.get("step")
    if step is None:
        return None
    if type(step) is not int or step < 0:
        raise TrainError(
            f"The step of a record must be an int of 0 or more, got {step!r} for {str(path)!r}. "
            "Use write(step=int(...))."
        )
    return step


def _to_json(value: object, where: str):
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        if math.isfinite(value):
            return value
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"

    if isinstance(value, Mapping):
        if wrong := [key for key in value if not isinstance(key, str)]:
            raise TrainError(
                f"Keys in a log record must be strings, but {where} has {wrong[0]!r}. Use str(key)."
            )
        return {key: _to_json(entry, f"{where}[{key!r}]") for key, entry in value.items()}

    if isinstance(value, list | tuple):
        return [_to_json(entry, f"{where}[{index}]") for index, entry in enumerate(value)]

    if isinstance(value, np.generic | np.ndarray | jax.Array):
        try:
            plain = np.asarray(value).tolist()
        except TypeError as error:  # typed PRNG keys, traced values
            raise _no_json_form(value, where) from error
        if not isinstance(plain, np.generic | np.ndarray):
            return _to_json(plain, where)

    raise _no_json_form(value, where)


def _no_json_form(value: object, where: str) -> TrainError:
    return TrainError(
        f"The value of {where} has no JSON form: {type(value).__name__} {value!r}. Log numbers, "
        "strings, arrays, or lists and dicts of these; for anything else log str(value)."
    )


def _from_json(value: object) -> Any:
    if isinstance(value, dict):
        return {name: _from_json(entry) for name, entry in value.items()}
    if isinstance(value, list):
        return [_from_json(entry) for entry in value]
    return _NON_FINITE.get(value, value) if isinstance(value, str) else value
