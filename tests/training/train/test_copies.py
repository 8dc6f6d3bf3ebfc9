# SPDX-License-Identifier: Apache-2.0
"""What is handed over is a copy: who hands it over may go on changing it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import shardax as sx
from shardax.errors import DataError, TrainError
from shardax.train import Checkpoints, LocalBatches, PackedBatches, Prefetch, WholeBatches
from tests.advice import run_advice
from tests.training.train.small_runs import Quiet

ROWS, WIDTH = 8, 16


def reused(dtype: Any = np.float32) -> np.ndarray:
    """Memory that begins where CPU devices compute in it, as that of large arrays may."""
    size = ROWS * WIDTH * np.dtype(dtype).itemsize
    memory = np.zeros(size + 64, np.uint8)
    start = -memory.ctypes.data % 64
    return memory[start : start + size].view(dtype).reshape(ROWS, WIDTH)


@dataclasses.dataclass
class Place:
    """A position of a class of its own."""

    counts: list[int]


POSITIONS: dict[str, Callable[[], Any]] = {
    "dict": lambda: {"count": 0},
    "nested": lambda: {"epochs": [{"count": 0}]},
    "array": lambda: {"count": np.zeros((), np.int64)},
    "tuple": lambda: ([0], "the rest"),
}


def counter_of(position: Any) -> tuple[Any, Any]:
    """The container that holds the count, and its key."""
    match position:
        case {"count": np.ndarray() as array}:
            return array, ()
        case {"count": _}:
            return position, "count"
        case {"epochs": [inner]}:
            return inner, "count"
        case ([_] as counts, _):
            return counts, 0
        case Place(counts):
            return counts, 0
    raise AssertionError(position)


class Counting:
    """Fills one array with 1, 2, 3, ...; ``state()`` is what it counts in."""

    def __init__(self, position: Any) -> None:
        self.position = position
        self.rows = reused()

    def __iter__(self) -> Counting:
        return self

    def __next__(self) -> dict[str, Any]:
        holder, key = counter_of(self.position)
        holder[key] += 1
        self.rows[...] = holder[key]
        return {"x": self.rows, "twice": [self.rows, (self.rows,)]}

    def state(self) -> Any:
        return self.position

    def restore(self, state: Any) -> None:
        self.position = state  # which it goes on counting in, too


class StateDict(Counting):
    """The same with the names of torchdata."""

    state = restore = None  # type: ignore[assignment]

    def state_dict(self) -> Any:
        return self.position

    def load_state_dict(self, state: Any) -> None:
        self.position = state


def counted(batch: Any) -> int:
    """The number that a whole batch is filled with."""
    numbers = {float(number) for leaf in jax.tree.leaves(batch) for number in np.unique(leaf)}
    assert len(numbers) == 1, numbers
    return int(numbers.pop())


def over_all_devices() -> NamedSharding:
    return NamedSharding(jax.make_mesh((8,), ("data",)), PartitionSpec("data"))


WRAPPERS: dict[str, Callable[[Any], Any]] = {
    "itself": lambda source: source,
    "whole": lambda source: WholeBatches(source, batch_size=ROWS),
    "local": lambda source: LocalBatches(source, batch_size=ROWS),
}


# --- batches --------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize("sharding", [lambda: None, over_all_devices], ids=["device", "mesh"])
def test_prefetch_copies_batches_of_a_reused_array(sharding: Any, depth: int) -> None:
    with Prefetch(Counting({"count": 0}), sharding(), depth=depth) as batches:
        taken = [next(batches) for _ in range(6)]
    assert [counted(batch) for batch in taken] == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("dtype", [np.float32, np.int64, np.uint8, jnp.bfloat16])
def test_put_batch_copies_arrays(dtype: Any) -> None:
    rows = reused(dtype)
    rows[...] = 1
    views = {"x": rows, "every second": rows[::2, ::2], "number": rows[0, 0], "none": rows[:0]}
    placed = sx.train.put_batch(views, None)
    spread = sx.train.put_batch(rows, over_all_devices())
    rows[...] = 2
    assert counted([placed, spread]) == 1
    assert {name: array.shape for name, array in placed.items()} == {
        name: array.shape for name, array in views.items()
    }
    with pytest.raises(ValueError, match="masked arrays are not supported"):
        sx.train.put_batch(np.ma.masked_array([1.0, 2.0], [True, False]), None)


def test_row_batches_copy_each_run_of_rows() -> None:
    rows = np.zeros((1, 2), np.int32)

    def read(start: int, stop: int) -> dict[str, np.ndarray]:
        rows[...] = start
        return {"x": rows}

    batches = sx.train.RowBatches(read, batch_size=4)
    taken = next(batches.by_rows(np.array([0, 2])))
    assert taken["x"].tolist() == [[0, 0], [2, 2]]


# --- positions ------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("kind", [*POSITIONS, "dataclass"])
def test_prefetch_keeps_the_position_of_what_was_taken(kind: str, wrapper: str) -> None:
    make = POSITIONS.get(kind, lambda: Place([0]))
    inner = Counting(make())
    source = WRAPPERS[wrapper](inner)

    def at(state: Any) -> int:
        holder, key = counter_of(state)
        return int(holder[key])

    with Prefetch(source, depth=3) as batches:
        first = [counted(next(batches)) for _ in range(2)]
        saved = batches.state()
        spoiled = batches.state()
        holder, key = counter_of(spoiled)
        holder[key] = 77
        rest = [counted(next(batches)) for _ in range(2)]
        assert (first, at(saved), rest, at(batches.state())) == ([1, 2], 2, [3, 4], 4)
        batches.restore(saved)
        assert (counted(next(batches)), at(saved)) == (3, 2)
    assert at(inner.state()) == 3, "closing puts the source back to what was taken"
    outer = source.state()
    next(iter(source))
    assert at(outer) == (4 if wrapper == "itself" else 3)


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("make", [Counting, StateDict])
def test_trainer_takes_every_batch_once_and_resumes_after_it(
    make: Any, wrapper: str, tmp_path: Path
) -> None:
    def losses(steps: int, *, resume: bool = False) -> list[int]:
        source = make({"epochs": [{"count": 0}]})
        return run(WRAPPERS[wrapper](source), tmp_path, steps, resume=resume)

    assert losses(3) == [1, 2, 3]
    assert losses(6, resume=True) == [1, 2, 3, 4, 5, 6]


def run(source: Any, folder: Path, steps: int, *, resume: bool = False, **options: Any) -> list:
    """Runs a trainer whose loss is the number in the batch; returns the losses logged."""
    model = sx.nn.Linear(2, 1, rngs=sx.Rngs(0))
    trainer = sx.train.Trainer(
        model,
        sx.train.Optimizer(model, optax.sgd(0.0)),
        lambda model, batch: batch["x"].mean() + 0 * model.kernel.sum(),
        source,
        directory=folder,
        settings=sx.train.TrainerSettings(steps=steps, log_every=1, checkpoint_every=2),
        **options,
    )
    trainer.run(resume=resume, display=Quiet())
    return [record["loss"] for record in sx.train.read_jsonl(trainer.log_path)]


def test_trainer_copies_batches_without_a_position(tmp_path: Path) -> None:
    def batches() -> Iterator[Any]:
        rows = reused()
        for count in range(1, 9):
            rows[...] = count
            yield {"x": rows}

    assert run(batches(), tmp_path, 4, resumable=False) == [1, 2, 3, 4]


def test_trainer_refuses_a_position_that_no_checkpoint_can_hold(tmp_path: Path) -> None:
    with pytest.raises(TrainError, match="position of Counting holds a Place, which cannot"):
        run(Counting(Place([0])), tmp_path, 1)
    assert not list(tmp_path.iterdir())


def test_position_that_cannot_be_copied_is_refused() -> None:
    source = Counting({"count": 0, "file": (number for number in range(3))})
    with pytest.raises(DataError, match=r"position of Counting cannot be copied \(TypeError"):
        Prefetch(source)


def test_packed_batches_copy_the_position_of_their_documents() -> None:
    class Documents(Counting):
        def __next__(self) -> Any:
            super().__next__()
            return np.full(4, self.position["count"])

    def ids(batch: Any) -> list[int]:
        return batch["inputs"][:, 0].tolist()

    packed = PackedBatches(Documents({"count": 0}), batch_size=2, seq_len=3)
    assert ids(next(packed)) == [1, 2]
    saved = packed.state()
    assert ids(next(packed)) == [3, 4]
    for _ in range(2):
        packed.restore(saved)
        assert ids(next(packed)) == [3, 4]


# --- checkpoints ----------------------------------------------------------------------------------


def test_checkpoint_in_the_background_holds_what_was_there_when_saved(tmp_path: Path) -> None:
    rows, model = reused(), sx.Variable(jnp.zeros((512, 512)))
    progress: dict[str, Any] = {"epochs": [{"count": 0}]}
    source, note = Counting({"count": 0}), {"note": [0]}
    tree = {"model": model, "rows": rows, "progress": progress, "source": source}
    with Checkpoints(tmp_path, keep=None) as checkpoints:
        for step in (1, 2, -1):  # the last one is not saved
            model.value = jnp.full((512, 512), float(step))
            rows[...] = step
            progress["epochs"][0]["count"] = source.position["count"] = note["note"][0] = step
            if step > 0:
                checkpoints.save(step, tree, extra=note)

    for step in (1, 2):
        again: dict[str, Any] = {
            "model": sx.Variable(jnp.zeros((512, 512))),
            "rows": reused(),
            "progress": {"epochs": []},
            "source": Counting({"count": 0}),
        }
        assert checkpoints.restore(again, step) == {"note": [step]}
        assert counted([again["model"].value, again["rows"]]) == step
        assert again["progress"] == {"epochs": [{"count": step}]}
        assert again["source"].position == {"count": step}


def test_trainer_saves_the_state_that_a_callback_has_then(tmp_path: Path) -> None:
    class Callback:
        def __init__(self) -> None:
            self.seen: dict[str, list[int]] = {"steps": []}

        def __call__(self, event: sx.train.Event) -> None:
            if event.kind == "step":
                self.seen["steps"].append(event.step)

        def state(self) -> Any:
            return self.seen

        def restore(self, state: Any) -> None:
            self.seen = state

    callback = Callback()
    run(Counting({"count": 0}), tmp_path, 5, callbacks=(callback,))
    assert callback.seen == {"steps": [1, 2, 3, 4, 5]}
    saved = {}
    for step in (4, 5):
        model = sx.nn.Linear(2, 1, rngs=sx.Rngs(0))
        folder = Checkpoints(tmp_path / "checkpoints")
        extra = folder.restore((model,), step, partial=True)
        saved[step] = extra["callbacks"]
    assert saved == {
        4: [["Callback", {"steps": [1, 2, 3, 4]}]],
        5: [["Callback", {"steps": [1, 2, 3, 4, 5]}]],
    }


# --- integers of 64 bits, and None ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("ids", "most"),
    [
        (np.array([[3, 2**32 + 3]]), 2**32 + 3),
        (np.array([[-(2**31) - 1]]), -(2**31) - 1),
        (np.array([[2**32]], np.uint64), 2**32),
        (np.int64(2**40), 2**40),
        (2**40, 2**40),
    ],
    ids=["hash", "negative", "unsigned", "scalar", "int"],
)
def test_wide_integers_of_a_batch_are_refused_by_path(ids: Any, most: int) -> None:
    batch = {"inputs": [{"ids": ids}]}
    with pytest.raises(DataError, match=rf"\['inputs'\]\[0\]\['ids'\] holds .* to {most}, of"):
        sx.train.put_batch(batch, None)
    with (
        pytest.raises(DataError, match=r"\['inputs'\]") as refused,
        Prefetch([batch, batch]) as batches,
    ):
        next(batches)
    folded = run_advice(refused.value, "ids % 2**31", {"ids": ids})
    placed = sx.train.put_batch({"inputs": [{"ids": folded}]}, None)
    assert np.array_equal(placed["inputs"][0]["ids"], folded)


def test_wide_integers_are_kept_with_64_bits() -> None:
    ids = np.array([3, 2**32 + 3])
    with pytest.raises(DataError, match="A batch holds integers from 3 to") as refused:
        sx.train.put_batch(ids, None)
    try:
        run_advice(refused.value, "sx.configure(x64=True)", {"sx": sx})
        assert sx.train.put_batch(ids, None).tolist() == ids.tolist()
    finally:
        sx.configure(x64=False)
    narrow = np.array([0, 2**31 - 1, -(2**31)])
    assert sx.train.put_batch(narrow, None).tolist() == narrow.tolist()


def test_run_with_wide_integers_is_refused_before_its_first_step(tmp_path: Path) -> None:
    rows = {"x": np.full((ROWS, WIDTH), 2**32 + 3)}
    with pytest.raises(DataError, match=r"\['x'\] holds integers from 4294967299"):
        run([rows] * 3, tmp_path, 1, resumable=False)
    assert not list(tmp_path.iterdir())


def test_checkpoint_refuses_wide_integers_of_a_plain_array(tmp_path: Path) -> None:
    ids = np.array([5, 2**40])
    with pytest.raises(sx.errors.CheckpointError, match=r"seen holds integers from 5") as refused:
        sx.train.checkpoint.save({"seen": ids}, tmp_path / "one")
    kept = run_advice(refused.value, '{"ids": ids.tolist()}', {"ids": ids})
    sx.train.checkpoint.save({"seen": kept}, tmp_path / "one")
    again: dict[str, Any] = {"seen": {"ids": []}}
    sx.train.checkpoint.restore(again, tmp_path / "one")
    assert again == {"seen": {"ids": [5, 2**40]}}


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_none_as_a_batch_is_not_the_end(wrapper: str, tmp_path: Path) -> None:
    rows = {"x": np.ones((ROWS, WIDTH), np.float32)}
    message = r"The batches \(list\) gave None.*raises StopIteration"
    with pytest.raises(DataError, match=message):
        run(WRAPPERS[wrapper]([None, rows]), tmp_path / "first", 2, resumable=False)
    with pytest.raises(DataError, match=message):
        run(WRAPPERS[wrapper]([rows, rows, None]), tmp_path / "third", 4, resumable=False)
    with pytest.raises(TrainError, match="ended after step 2 of 4"):
        run(WRAPPERS[wrapper]([rows, rows]), tmp_path / "ended", 4, resumable=False)
    with pytest.raises(DataError, match=message), Prefetch([rows, None]) as batches:
        list(batches)
