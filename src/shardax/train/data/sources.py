# SPDX-License-Identifier: Apache-2.0
"""Positions of batches read by other libraries.

``Positioned`` is the one protocol of the trainer and of ``Prefetch``; what has its position under
other names is adapted to it. A position goes into the JSON of a checkpoint, so what JSON does not
have (bytes, arrays, tuples) is written as text and comes back as what it was.

A position is copied when it is taken and when it is given back: many sources return the dict that
they go on counting in, and keep the one that they are given.

Over several processes most positions are the same in each. Those of ``LocalBatches`` are not: the
checkpoint then has one for each process.
"""

from __future__ import annotations

import base64
import collections
import contextlib
import copy
import functools
import importlib
import json
from collections.abc import Generator, Iterable, Iterator, Mapping
from typing import Any, Protocol, cast, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np

from shardax.distributed import processes
from shardax.errors import ShardaxError
from shardax.extend import PyTree
from shardax.train.errors import DataError, TrainError

_KIND = "__kind__"
_KEPT = 4  # batches of a source without position: more than a prefetch of the trainer is ahead
_ALIGNMENT = 64  # bytes
_END = object()
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

    def state(self) -> PyTree:
        """Returns the position after the last batch taken."""
        ...

    def restore(self, state: Any) -> None:
        """Goes to a position given by ``state()``."""
        ...


def with_position(source: object) -> Any:
    """Returns the source as ``Positioned`` if it has a position, else itself."""
    # For datasets of grain this opens an iterator: call it once, and keep the returned source.
    if isinstance(source, Positioned):
        return source
    if _has(source, "state_dict", "load_state_dict") and isinstance(source, Iterable):
        return _StateDict(source)
    if _has(source, "get_state", "set_state", "__next__"):
        return _GetState(source)
    if isinstance(source, Iterable) and type(source).__module__.partition(".")[0] == "grain":
        iterator: Any = iter(cast(Any, source))
        if _has(iterator, "get_state", "set_state"):
            return _GetState(iterator)
    return source


def position_of(source: Positioned) -> PyTree:
    """Returns a copy of a source's position, or raises DataError."""
    state = source.state()
    try:
        return copy.deepcopy(state)
    except Exception as error:
        raise DataError(
            f"The position of {type(source).__name__} cannot be copied ({type(error).__name__}: "
            f"{error}), so it would change while batches are read ahead. Let state() return "
            "numbers, texts, bytes, arrays, and lists and dicts of these."
        ) from error


def go_back(source: Positioned, position: PyTree) -> None:
    """Sends a source to a position, of which it gets a copy."""
    source.restore(copy.deepcopy(position))


@contextlib.contextmanager
def peeking(source: Positioned) -> Generator[None]:
    """Puts a source back to where it was after a block."""
    position = position_of(source)
    try:
        yield
    finally:
        go_back(source, position)


class Held:
    """Base of wrappers of a source, with its position."""

    batches: PyTree
    state: Any  # there if the source has a position
    restore: Any

    def hold(self, batches: PyTree) -> None:
        """Takes the source, and its position if it has one."""
        self.batches = batches = with_position(batches)
        # From Python 3.12 isinstance looks for attributes that are there, not for those that
        # ``__getattr__`` would give.
        if isinstance(batches, Positioned):
            self.state = functools.partial(position_of, batches)
            self.restore = functools.partial(go_back, batches)


def adapted(source: object, resumable: bool) -> Any:
    """Returns the batches of a run, with a position if possible."""
    positioned = with_position(source)
    inner = positioned.batches if isinstance(positioned, Held) else positioned
    go_on_without_end(inner)
    if resumable or isinstance(positioned, Positioned) or not isinstance(inner, Iterable):
        return positioned
    if isinstance(positioned, Held):
        positioned.hold(_Unpositioned(inner))
        return positioned
    return positioned if hasattr(positioned, "by_rows") else _Unpositioned(positioned)


def require_position(source: object) -> None:
    """Raises TrainError unless batches have a position, or need none."""
    if isinstance(source, Positioned):
        return

    inner = source.batches if isinstance(source, Held) else source
    if not isinstance(inner, Iterable):
        raise TrainError(
            f"The batches are a {type(inner).__name__}, which cannot be iterated over. Give an "
            "iterable of batches, such as TrainBatches."
        )

    ways = f"Give batches with {_WAYS};"
    if _has(inner, "to_iterable_dataset"):
        ways = "Give dataset.to_iterable_dataset().batch(batch_size), which has one;"

    raise TrainError(
        f"The batches ({type(inner).__name__}) have no state() and restore(), and no other "
        f"position, so the run could not be resumed. {ways} or Trainer(..., resumable=False), "
        "which starts the data anew when a run is resumed."
    )


def go_on_without_end(source: object) -> None:
    """Lets a data loader or dataset begin its next epoch by itself."""
    if isinstance(source, _StateDict):
        source.endless = True


def is_resumable(source: object) -> bool:
    """Whether a resumed run goes on in the data."""
    return not isinstance(source.batches if isinstance(source, Held) else source, _Unpositioned)


def _has(source: object, *names: str) -> bool:
    return all(callable(getattr(source, name, None)) for name in names)


def innermost(source: object) -> object:
    """Returns the user's own source, of which others are wrappers."""
    while isinstance(source, Held | _Adapted | _Unpositioned):
        source = source.batches if isinstance(source, Held) else source.source
    return source


# --- positions in checkpoints ---------------------------------------------------------------------


def saved_position(source: object, state: object) -> PyTree:
    """Returns a position as JSON; every process must call it."""
    local = {_KIND: "none"} if not is_resumable(source) else _as_json(state, type(source).__name__)
    if not hasattr(source, "local_rows"):
        return local
    texts = [json.dumps(local)]
    if jax.process_count() > 1:
        texts = processes.exchange(texts[0], "positions of the data")
    return {_KIND: "processes", "states": [json.loads(text) for text in texts]}


def require_savable(source: Any) -> None:
    """Raises TrainError unless the position can be written as JSON."""
    if is_resumable(source):
        _as_json(position_of(source), type(source).__name__)


def go_to(source: Any, saved: Any, *, resumable: bool = True) -> bool:
    """Restores a saved position; returns False if the data starts anew."""
    # After a run without a position, other batches start anew only if that is asked for.
    if not is_resumable(source):
        return False

    kind = saved.get(_KIND) if isinstance(saved, Mapping) else None
    if (kind == "processes") != hasattr(source, "local_rows"):
        was, now = "LocalBatches", f"a {type(source).__name__}"
        was, now = (was, now) if kind == "processes" else ("other batches", "LocalBatches")
        raise DataError(
            f"The data position was saved of {was}, but the run now has {now}. Give batches of "
            "the kind that was saved, or start a new run in another directory."
        )

    # Of the positions of all processes this one takes its own.
    if kind == "processes":
        states = saved["states"]
        if len(states) != jax.process_count():
            raise DataError(
                f"The data position was saved by {len(states)} process(es), each with rows of its "
                f"own, but now there are {jax.process_count()}. Resume with {len(states)}. Batches "
                "whose position holds for any number of processes are TrainBatches, RowBatches "
                "and WholeBatches."
            )
        saved = states[jax.process_index()]
        kind = saved.get(_KIND) if isinstance(saved, Mapping) else None

    if _has_no_position(saved):
        if not resumable:
            return False
        raise DataError(
            "The run was trained with resumable=False, on batches without a position, so there is "
            f"none from which a {type(getattr(source, 'source', source)).__name__} could go on. "
            "To start these batches anew: Trainer(..., resumable=False)."
        )

    state = decoded(saved["state"]) if kind == "encoded" else saved
    try:
        go_back(source, state)
    except _REFUSALS as error:
        if isinstance(error, ShardaxError):
            raise
        raise _refusal(source, error) from error
    return True


def _has_no_position(saved: object) -> bool:
    """Whether a position was saved of batches without one."""
    return isinstance(saved, Mapping) and saved.get(_KIND) == "none"


def _refusal(source: object, error: BaseException) -> DataError:
    return DataError(
        f"The saved data position cannot be continued with this {type(source).__name__}: "
        f"{error!r}. Make it as in the run that saved the position."
    )


def _as_json(state: object, of: str):
    """Returns a state itself if JSON keeps it as it is."""
    try:
        if json.loads(json.dumps(state)) == state and not _has_no_position(state):
            return state
    except (TypeError, ValueError):
        pass
    return {_KIND: "encoded", "state": encoded(state, of)}


# --- adapters -------------------------------------------------------------------------------------


class _Adapted:
    """Iterator with other names for its position."""

    def __init__(self, source) -> None:
        self.source = source

    def __iter__(self) -> Any:
        return self

    def __repr__(self) -> str:
        return repr(self.source)

    def _refuse(self, error: BaseException) -> DataError:
        return _refusal(self.source, error)


_REFUSALS = (KeyError, TypeError, ValueError, IndexError, AssertionError, AttributeError)


class _GetState(_Adapted):
    """An iterator with ``get_state`` and ``set_state``."""

    def state(self) -> PyTree:
        return encoded(self.source.get_state(), type(self.source).__name__)

    def restore(self, state) -> None:
        old_state = copy.deepcopy(self.source.get_state())
        try:
            self.source.set_state(decoded(state))
        except _REFUSALS as error:
            self.source.set_state(old_state)
            raise self._refuse(error) from error

    def __next__(self) -> Any:
        return host_batch(next(self.source))


class _StateDict(_Adapted):
    """Iterable with the position of its latest iterator."""

    # With ``endless`` what has ended begins its next epoch, which samplers and datasets are told.
    #
    # Beside the state of the iterable the position has the epoch, which samplers do not save, and
    # the states of random generators that several epochs draw from: an iterator that is made to be
    # restored draws from them too. Where the iterable's state lacks what a shuffle buffer holds,
    # the position is that of the epoch's beginning and the number of batches to skip.

    def __init__(self, source) -> None:
        super().__init__(source)
        self.endless = False
        self._iterator: Iterator[Any] | None = None
        parts = [source, *(getattr(source, name, None) for name in ("sampler", "dataset"))]
        parts.append(getattr(getattr(source, "batch_sampler", None), "sampler", None))
        self._parts = list({id(part): part for part in parts if part is not None}.values())
        self._replays = any(_loses_examples(part) for part in self._parts)
        epochs = (getattr(part, "epoch", None) for part in self._parts)
        self._epoch = next((epoch for epoch in epochs if isinstance(epoch, int)), 0)
        self._taken = 0
        self._before: list[Any] = self._generators()
        self._known: dict[str, Any] | None = None

    def state(self) -> PyTree:
        if self._known is None:
            self._note()
        return self._known

    def _note(self) -> None:
        """Notes the position of now."""
        inner: Any = None
        if not self._replays:
            fresh = None if self._taken else getattr(self.source, "_starting_state_dict", None)
            inner = encoded(fresh or self.source.state_dict(), type(self.source).__name__)
        self._known = {
            "of": type(self.source).__name__,
            "epoch": self._epoch,
            "taken": self._taken,
            "state": inner,
            "generators": encoded([self._before, self._generators()], "a sampler"),
        }

    def restore(self, state) -> None:
        names = {"of", "epoch", "taken", "state", "generators"}
        is_own = isinstance(state, Mapping) and set(state) == names
        if not is_own or state["of"] != type(self.source).__name__:
            raise self._refuse(ValueError(f"{state!r} is no position of it"))
        old_state = self.state()
        try:
            self._begin(state)
        except _REFUSALS as error:
            self._begin(old_state)
            raise self._refuse(error) from error
        self._known = {**state}

    def _begin(self, state) -> None:
        """Makes an iterator going on from a position."""
        if (state["state"] is None) != self._replays:
            raise ValueError("only one of the two has a shuffle buffer")
        start_states, saved_states = decoded(state["generators"])
        self._epoch, self._taken = int(state["epoch"]), int(state["taken"])
        self._tell_epoch()
        self._set_generators(start_states)
        self._before = start_states
        self.source.load_state_dict({} if self._replays else decoded(state["state"]))
        self._iterator = iter(self.source)
        if self._replays:
            for _ in range(self._taken):
                next(self._iterator)
        self._set_generators(saved_states)

    def _generators(self) -> list[Any]:
        """Returns the states of all random generators."""
        return [generator.get_state() for generator in self._random()]

    def _set_generators(self, states: list[object]) -> None:
        for generator, state in zip(self._random(), states, strict=True):
            generator.set_state(state)

    def _random(self) -> list[Any]:
        generators = (getattr(part, "generator", None) for part in self._parts)
        unique = {id(g): g for g in generators if _has(g, "get_state", "set_state")}
        return list(unique.values())

    def _tell_epoch(self) -> None:
        for part in self._parts:
            if _has(part, "set_epoch"):
                part.set_epoch(self._epoch)

    def __next__(self) -> Any:
        if self._iterator is None:
            self._iterator = iter(self.source)
        batch = next(self._iterator, _END)
        if batch is _END and self.endless:
            self._epoch, self._taken = self._epoch + 1, 0
            self._tell_epoch()
            self._before = self._generators()
            self._iterator = iter(self.source)
            batch = next(self._iterator, _END)
        if batch is _END:
            raise StopIteration
        self._taken += 1
        self._note()  # now, as an iterator at its end has another
        return host_batch(batch)


def _loses_examples(dataset: object) -> bool:
    """Whether a dataset's state lacks examples held by its iterator."""
    # In ``datasets``: shuffle buffers, and, as its documentation says, batched functions of tables;
    # those of ``batch()`` are exact.
    todo, seen = [getattr(dataset, "_ex_iterable", None)], set[int]()
    while todo:
        node = todo.pop()
        if node is None or id(node) in seen:
            continue
        seen.add(id(node))
        if type(node).__name__.startswith("BufferShuffled"):
            return True

        is_of_tables = getattr(getattr(node, "formatting", None), "is_table", False)
        module = str(getattr(getattr(node, "function", None), "__module__", ""))
        if is_of_tables and getattr(node, "batched", False) and not module.startswith("datasets"):
            return True

        todo.append(getattr(node, "ex_iterable", None))
        todo += getattr(node, "ex_iterables", None) or []
    return False


class _Unpositioned:
    """Source without position, able to go back by a few batches."""

    def __init__(self, source) -> None:
        self.source = source
        self._iterator = iter(source)
        self._kept: collections.deque[Any] = collections.deque(maxlen=_KEPT)
        self._read = self._step = 0

    def state(self) -> PyTree:
        return {"step": self._step, "resumable": False}

    def restore(self, state) -> None:
        """Goes back as far as batches are kept."""
        step = state["step"]
        if not self._read - len(self._kept) <= step <= self._read:
            raise DataError(f"The batches ({type(self.source).__name__}) have no position.")
        self._step = step

    def __iter__(self) -> Any:
        return self

    def __next__(self) -> Any:
        if self._step == self._read:
            batch = host_batch(next(self._iterator))
            self._kept.append(jax.tree.map(_copy_of, batch))
            self._read += 1
        self._step += 1
        return self._kept[self._step - self._read - 1]


# --- values ---------------------------------------------------------------------------------------


def require_batch(batch: PyTree, source: object) -> PyTree:
    """Returns a batch of a source, or raises DataError for None."""
    if batch is not None:
        return batch
    kind = type(innermost(source)).__name__
    raise DataError(
        f"The batches ({kind}) gave None. A batch is a tree of arrays, such as {{'inputs': array, "
        "'targets': array}; what has no more batches raises StopIteration, and a generator returns."
    )


def require_narrow(batch: PyTree) -> None:
    """Raises DataError for integers that JAX would cut to 32 bits."""
    for path, leaf in jax.tree_util.tree_flatten_with_path(batch)[0]:
        problem = cut_integers(leaf)
        if problem:
            name = jax.tree_util.keystr(path) or "A batch"
            raise DataError(
                f"{name} holds {problem} Keep them below 2**31, as `ids % 2**31` does with hashes, "
                "or give JAX 64 bits where the program begins: sx.configure(x64=True)."
            )


def cut_integers(value: object) -> str:
    """Says which integers of a host value JAX would cut, or nothing."""
    if not isinstance(value, np.ndarray | np.integer | int):
        return ""
    numbers = np.asarray(value)
    if numbers.dtype.kind not in "iu" or not numbers.size:
        return ""

    kind = jax.dtypes.canonicalize_dtype(numbers.dtype)
    if kind == numbers.dtype:
        return ""

    bounds, least, most = np.iinfo(kind), int(numbers.min()), int(numbers.max())
    if bounds.min <= least and most <= bounds.max:
        return ""
    return (
        f"integers from {least} to {most}, of {numbers.dtype}, of which JAX would make others: "
        f"those of {kind} end at {bounds.max}."
    )


def copied(batch: PyTree) -> PyTree:
    """Returns a batch with NumPy arrays of its own, or raises DataError for wide integers."""
    require_narrow(batch)
    return jax.tree.map(_copy_of, batch)


def _copy_of(leaf: PyTree) -> PyTree:
    """Returns a NumPy array's copy in aligned memory, and everything else as it is."""
    # JAX refuses masked arrays and objects by name.
    is_plain = isinstance(leaf, np.ndarray) and not isinstance(leaf, np.ma.MaskedArray)
    if not is_plain or leaf.dtype.hasobject or not leaf.nbytes:
        return leaf

    # CPU devices compute in aligned memory, and copy what lies elsewhere, as arrays of NumPy mostly
    # do: a copy that is aligned takes the place of theirs.
    memory = np.empty(leaf.nbytes + _ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    array = memory[start : start + leaf.nbytes].view(leaf.dtype).reshape(leaf.shape)
    array[...] = leaf
    return array


def host_batch(batch: object) -> Any:
    """Returns a batch with NumPy arrays for tensors and lists of numbers."""

    def is_numbers(leaf: object) -> bool:
        while isinstance(leaf, list) and leaf:
            leaf = leaf[0]
        return isinstance(leaf, bool | int | float)

    def host(leaf) -> PyTree:
        if not isinstance(leaf, list):
            return leaf
        try:
            return np.asarray(leaf)
        except ValueError as error:
            raise TrainError(
                "A batch has rows of different lengths. Cut or pad them to one length, or pack "
                "documents: train.PackedBatches(documents, ...)."
            ) from error

    host_tree = jax.tree.map(host, batch, is_leaf=lambda x: isinstance(x, list) and is_numbers(x))
    return without_tensors(host_tree)


def without_tensors(batch: object) -> Any:
    """Returns a batch with NumPy arrays for tensors of PyTorch."""
    return jax.tree.map(lambda leaf: _array_of(leaf) if _is_tensor(leaf) else leaf, batch)


def _is_tensor(value: object) -> bool:
    return type(value).__module__.partition(".")[0] == "torch" and hasattr(value, "numpy")


def _array_of(tensor) -> np.ndarray:
    tensor = tensor.detach().cpu()
    if str(tensor.dtype) == "torch.bfloat16":  # which NumPy does not know by itself
        return tensor.float().numpy().astype(jnp.bfloat16)
    return tensor.numpy()


def encoded(value: object, of: str) -> Any:
    """Returns a state as JSON values."""
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, bytes):
        return {_KIND: "bytes", "data": base64.b64encode(value).decode()}

    if isinstance(value, list | tuple):
        items = [encoded(child, of) for child in value]
        return items if isinstance(value, list) else {_KIND: "tuple", "items": items}

    if isinstance(value, Mapping):
        if all(isinstance(key, str) for key in value) and _KIND not in value:
            return {key: encoded(child, of) for key, child in value.items()}
        items = [[encoded(key, of), encoded(child, of)] for key, child in value.items()]
        return {_KIND: "dict", "items": items}

    if _is_tensor(value) or isinstance(value, np.ndarray | np.generic):
        kind = "array" if isinstance(value, np.ndarray) else "scalar"
        kind = "tensor" if _is_tensor(value) else kind
        array = np.asarray(value)
        if array.dtype.kind in "biuf":
            data = base64.b64encode(array.tobytes()).decode()
            return {_KIND: kind, "dtype": array.dtype.str, "shape": [*array.shape], "data": data}

    if isinstance(value, bool | int | float | str):  # a subclass, such as an enumeration's member
        return next(kind(value) for kind in (int, float, str) if isinstance(value, kind))

    raise TrainError(
        f"The position of {of} holds a {type(value).__name__}, which cannot be written as JSON. "
        "Give a source whose state is made of numbers, texts, bytes, arrays, lists and dicts."
    )


def decoded(value: Any) -> PyTree:
    """Returns the state written by ``encoded``."""
    if isinstance(value, list):
        return [decoded(child) for child in value]
    if not isinstance(value, Mapping):
        return value

    kind = value.get(_KIND)
    if kind is None:
        return {key: decoded(child) for key, child in value.items()}
    if kind == "dict":
        return {decoded(key): decoded(child) for key, child in value["items"]}
    if kind == "tuple":
        return tuple(decoded(child) for child in value["items"])

    data = base64.b64decode(value["data"])
    if kind == "bytes":
        return data
    array = np.frombuffer(data, value["dtype"]).reshape(value["shape"]).copy()
    if kind == "tensor":
        # By name: the type checker runs where PyTorch is not installed.
        return importlib.import_module("torch").from_numpy(array)
    return array[()] if kind == "scalar" else array
