# SPDX-License-Identifier: Apache-2.0
"""Positions of batches that other libraries read.

``Positioned`` is the one protocol of the trainer and of ``Prefetch``; what has its position under
other names is adapted to it. Positions go into the JSON of a checkpoint, so bytes and arrays in them
are written as text and come back as what they were.
"""

from __future__ import annotations

import base64
import collections
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Protocol, runtime_checkable

import jax
import numpy as np

from shardax.train.errors import DataPositionError, TrainerError

_KIND = "__kind__"
_KEPT = 4  # batches of a source without position: more than a prefetch of the trainer is ahead
_WAYS = (
    "state() and restore() (TrainBatches, RowBatches), get_state() and set_state() (iterators of "
    "grain), or state_dict() and load_state_dict() (IterableDataset of datasets, "
    "StatefulDataLoader of torchdata)"
)


@runtime_checkable
class Positioned(Protocol):
    """Source of batches with a position to save and restore, as ``TrainBatches``.

    Example:
        >>> isinstance([1, 2], Positioned)
        False
    """

    def state(self) -> Any:
        """Returns the position after the last batch taken."""
        ...

    def restore(self, state: Any) -> None:
        """Goes to a position that ``state()`` gave."""
        ...


def with_position(source: Any) -> Any:
    """Returns the source as ``Positioned`` if it has a position, else itself."""
    if isinstance(source, Positioned):
        return source
    if _has(source, "state_dict", "load_state_dict"):
        return _StateDict(source)
    if _has(source, "get_state", "set_state"):
        return _GetState(source)
    if isinstance(source, Iterable) and not isinstance(source, Iterator):
        module = type(source).__module__.partition(".")[0]
        if module == "grain" and _has(iterator := iter(source), "get_state", "set_state"):
            return _GetState(iterator)
    return source


def require_position(source: Any, resumable: bool) -> Any:
    """Returns the source as ``Positioned``, or raises TrainerError."""
    found = with_position(source)
    if isinstance(found, Positioned):
        return found
    if not isinstance(source, Iterable):
        raise TrainerError(
            f"The batches are a {type(source).__name__}, which cannot be iterated over. Give an "
            "iterable of batches, such as TrainBatches."
        )
    if resumable:
        inner = getattr(source, "batches", source)
        raise TrainerError(
            f"The batches ({type(inner).__name__}) have no position, so the run could not be "
            f"resumed. Give batches with {_WAYS}; or Trainer(..., resumable=False), which starts "
            "the data anew when the run is resumed."
        )
    return _Unpositioned(source)


def is_resumable(source: Any) -> bool:
    """Whether a resumed run goes on in the data."""
    return not isinstance(source, _Unpositioned)


def _has(source: Any, *names: str) -> bool:
    return all(callable(getattr(source, name, None)) for name in names)


class _Adapted:
    """A source whose position has other names; the state is that of the last batch."""

    def __init__(self, source: Any) -> None:
        self.source = source

    def _take(self) -> Any:
        raise NotImplementedError

    def state(self) -> Any:
        return encoded(self._take(), type(self.source).__name__)

    def __iter__(self) -> Any:
        return self

    def __repr__(self) -> str:
        return repr(self.source)


class _GetState(_Adapted):
    """An iterator with ``get_state`` and ``set_state``."""

    def _take(self) -> Any:
        return self.source.get_state()

    def restore(self, state: Any) -> None:
        _try(self.source.set_state, state, self.source)

    def __next__(self) -> Any:
        return host_batch(next(self.source))


class _StateDict(_Adapted):
    """An iterable that has the position of its latest iterator."""

    def __init__(self, source: Any) -> None:
        super().__init__(source)
        self._iterator: Iterator[Any] | None = None
        self._known: tuple[Any] | None = None  # the state, where no batch was taken since

    def _take(self) -> Any:
        if self._known is None:
            self._known = (self.source.state_dict(),)
        return self._known[0]

    def restore(self, state: Any) -> None:
        _try(self.source.load_state_dict, state, self.source)
        self._iterator, self._known = None, (decoded(state),)

    def __next__(self) -> Any:
        fresh = self._iterator is None
        if self._iterator is None:
            self._iterator = iter(self.source)
        batch = next(self._iterator, None)
        if batch is None and hasattr(self.source, "batch_sampler"):
            # A data loader begins its next epoch; one that was restored to its end, too.
            self._iterator = iter(self.source)
            batch = next(self._iterator, None)
        if batch is None:
            self._iterator = None if fresh else self._iterator
            raise StopIteration
        self._known = None
        return host_batch(batch)


class _Unpositioned:
    """A source without position, that goes back by a few batches only."""

    def __init__(self, source: Any) -> None:
        self.source = source
        self._rows = hasattr(source, "by_rows")
        inner = source.batches if self._rows else source
        self._iterator = iter(inner)
        self._kept: collections.deque[Any] = collections.deque(maxlen=_KEPT)
        self._read = self._step = 0
        if self._rows:
            self.batch_size = source.batch_size
            self.by_rows = type(source)(self, batch_size=source.batch_size).by_rows

    def state(self) -> Any:
        return {"step": self._step, "resumable": False}

    def restore(self, state: Any) -> None:
        """Goes back as far as batches are kept; other positions start anew."""
        step = state.get("step", -1) if isinstance(state, Mapping) else -1
        if self._read - len(self._kept) <= step <= self._read:
            self._step = step

    def __iter__(self) -> Any:
        return self

    def __next__(self) -> Any:
        if self._step == self._read:
            self._kept.append(host_batch(next(self._iterator)))
            self._read += 1
        self._step += 1
        return self._kept[self._step - self._read - 1]


def _try(restore: Callable[[Any], Any], state: Any, source: Any) -> None:
    """Restores, or raises DataPositionError."""
    value = decoded(state)
    try:
        restore(value)
    except (KeyError, TypeError, ValueError, IndexError, AssertionError, AttributeError) as error:
        raise DataPositionError(
            f"The saved data position cannot be continued with this {type(source).__name__}: "
            f"{error!r}. Make it as in the run that saved the position."
        ) from error


def host_batch(batch: Any) -> Any:
    """Returns a batch with NumPy arrays for tensors and lists of numbers."""

    def is_numbers(leaf: Any) -> bool:
        while isinstance(leaf, list) and leaf:
            leaf = leaf[0]
        return isinstance(leaf, bool | int | float)

    def host(leaf: Any) -> Any:
        if isinstance(leaf, list) or type(leaf).__module__.partition(".")[0] == "torch":
            return np.asarray(leaf)
        return leaf

    return jax.tree.map(host, batch, is_leaf=lambda x: isinstance(x, list) and is_numbers(x))


def encoded(value: Any, of: str) -> Any:
    """Returns a state as JSON values."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, bytes):
        return {_KIND: "bytes", "data": base64.b64encode(value).decode()}
    if isinstance(value, list | tuple):
        items = [encoded(each, of) for each in value]
        return items if isinstance(value, list) else {_KIND: "tuple", "items": items}
    if isinstance(value, Mapping):
        if all(isinstance(key, str) for key in value) and _KIND not in value:
            return {key: encoded(each, of) for key, each in value.items()}
        items = [[encoded(key, of), encoded(each, of)] for key, each in value.items()]
        return {_KIND: "dict", "items": items}
    tensor = type(value).__module__.partition(".")[0] == "torch" and hasattr(value, "numpy")
    if tensor or isinstance(value, np.ndarray | np.generic):
        array = np.asarray(value)
        if array.dtype.kind in "biuf":
            kind = "tensor" if tensor else "array"
            data = base64.b64encode(array.tobytes()).decode()
            return {_KIND: kind, "dtype": array.dtype.str, "shape": [*array.shape], "data": data}
    raise TrainerError(
        f"The position of {of} holds a {type(value).__name__}, which cannot be written as JSON. "
        "Give a source whose state is made of numbers, texts, bytes, arrays, lists and dicts."
    )


def decoded(value: Any) -> Any:
    """Returns the state that ``encoded`` wrote."""
    if isinstance(value, list):
        return [decoded(each) for each in value]
    if not isinstance(value, Mapping):
        return value
    kind = value.get(_KIND)
    if kind is None:
        return {key: decoded(each) for key, each in value.items()}
    if kind == "dict":
        return {decoded(key): decoded(each) for key, each in value["items"]}
    if kind == "tuple":
        return tuple(decoded(each) for each in value["items"])
    data = base64.b64decode(value["data"])
    if kind == "bytes":
        return data
    array = np.frombuffer(data, value["dtype"]).reshape(value["shape"]).copy()
    if kind == "tensor":
        import torch

        return torch.from_numpy(array)
    return array
