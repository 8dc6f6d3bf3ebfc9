# SPDX-License-Identifier: Apache-2.0
"""Prefetching changes when batches are made, never which, and its position is what was taken."""

import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec

from shardax.errors import DataError
from shardax.train import ByteText, Prefetch, TrainBatches, WholeBatches, put_batch
from shardax.train.data.prefetch import Interrupted

PATIENCE = 120.0  # seconds until a test gives up on a process
PART = ByteText.from_bytes(np.random.default_rng(0).integers(0, 256, 2000, np.uint8)).whole


def source(seed: int = 0) -> TrainBatches:
    return TrainBatches(PART, batch_size=8, seq_len=8, seed=seed)


def rows_over_all_devices() -> NamedSharding:
    mesh = jax.make_mesh((len(jax.devices()),), ("data",))
    return NamedSharding(mesh, PartitionSpec("data"))


def workers() -> set[threading.Thread]:
    return {t for t in threading.enumerate() if t.name.startswith("shardax-prefetch")}


def test_put_batch_shards_arrays_and_keeps_values():
    sharding = rows_over_all_devices()
    host = next(source())
    placed = put_batch(host, sharding)
    for name, array in host.items():
        assert placed[name].sharding == sharding
        assert (np.asarray(placed[name]) == array).all()


def test_put_batch_takes_a_sharding_per_array():
    rows = rows_over_all_devices()
    whole = NamedSharding(rows.mesh, PartitionSpec())
    placed = put_batch(next(source()), {"inputs": rows, "targets": whole})
    assert placed["inputs"].sharding == rows
    assert placed["targets"].sharding == whole


def test_prefetched_batches_keep_order_on_the_mesh():
    sharding = rows_over_all_devices()
    plain = source()
    with Prefetch(source(), sharding) as batches:
        for _ in range(5):
            batch, expected = next(batches), next(plain)
            assert batch["inputs"].sharding == sharding
            assert (np.asarray(batch["inputs"]) == expected["inputs"]).all()
            assert (np.asarray(batch["targets"]) == expected["targets"]).all()


@settings(deadline=None, max_examples=20)
@given(depth=st.integers(1, 4), taken=st.integers(0, 6))
def test_state_counts_taken_batches_not_fetched_ones(depth: int, taken: int):
    ahead = source()
    with Prefetch(ahead, depth=depth) as batches:
        for _ in range(taken):
            next(batches)
        assert batches.state()["step"] == taken
        saved = batches.state()
        rest = [np.asarray(next(batches)["inputs"]) for _ in range(3)]
        batches.restore(saved)
        again = [np.asarray(next(batches)["inputs"]) for _ in range(3)]
    assert np.array_equal(rest, again)
    assert ahead.step == taken + 3, "closing puts the source back to what was taken"


def test_prefetch_works_one_batch_ahead_and_no_further():
    made: list[int] = []

    def numbers() -> Iterator[np.ndarray]:
        for number in range(10):
            made.append(number)
            yield np.array(number)

    def settle(count: int) -> list[int]:
        deadline = time.monotonic() + 5
        while len(made) < count and time.monotonic() < deadline:
            time.sleep(0.001)
        time.sleep(0.02)
        return made

    with Prefetch(numbers()) as batches:
        assert settle(1) == [0]
        assert int(next(batches)) == 0
        assert settle(2) == [0, 1]


def test_finite_source_ends_with_its_thread():
    before = workers()
    batches = Prefetch([np.array(0), np.array(1)])
    assert [int(batch) for batch in batches] == [0, 1]
    assert workers() == before
    assert list(batches) == []


def test_source_exception_is_raised_in_place_of_batch():
    def failing() -> Iterator[np.ndarray]:
        yield np.array(0)
        raise OSError("the disk is gone")

    before = workers()
    batches = Prefetch(failing(), depth=3)
    assert int(next(batches)) == 0
    with pytest.raises(OSError, match="the disk is gone"):
        next(batches)
    assert workers() == before
    assert list(batches) == []


def test_exception_in_the_transfer_comes_out_too():
    if len(jax.devices()) == 1:
        pytest.skip("any batch divides over one device: set 8 virtual CPU devices")
    batches = Prefetch([np.zeros((len(jax.devices()) + 1, 2))], rows_over_all_devices())
    with pytest.raises(ValueError, match="evenly divide"):
        next(batches)


def test_error_in_the_with_block_ends_the_thread():
    before = workers()
    batches = Prefetch(source())

    def fail() -> None:
        with batches:
            next(batches)
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert workers() == before
    batches.close()


def test_unreferenced_prefetch_ends_its_thread():
    before = workers()
    batches = Prefetch(source())
    next(batches)
    del batches
    deadline = time.monotonic() + 5
    while workers() != before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert workers() == before


def test_refused_position_leaves_everything_where_it_was():
    foreign = source(seed=1).state()
    plain = source()
    with Prefetch(source()) as batches:
        next(batches)
        next(plain)
        with pytest.raises(DataError, match="seed"):
            batches.restore(foreign)
        assert batches.state()["step"] == 1
        assert (np.asarray(next(batches)["inputs"]) == next(plain)["inputs"]).all()


def test_prefetch_refuses_clearly_what_cannot_be_done():
    with pytest.raises(DataError, match="depth=0 must be an integer of at least 1"):
        Prefetch(source(), depth=0)
    with Prefetch([np.array(0)]) as batches:
        with pytest.raises(DataError, match="list has none"):
            batches.state()
        with pytest.raises(DataError, match="list has none"):
            batches.restore({})
    closed = Prefetch(source())
    closed.close()
    with pytest.raises(DataError, match="closed"):
        closed.restore(source().state())


def test_limit_reads_no_batch_that_is_not_needed():
    waiting = threading.Event()  # never set: who asks for a fourth batch waits for ever

    def numbers() -> Iterator[np.ndarray]:
        yield from map(np.array, range(3))
        waiting.wait()

    with Prefetch(numbers(), depth=2, limit=3) as batches:
        assert [int(batch) for batch in batches] == [0, 1, 2]
    assert list(Prefetch(numbers(), limit=0)) == []
    with pytest.raises(DataError, match="limit=-1 must be an integer of at least 0"):
        Prefetch(numbers(), limit=-1)


class Stalling(TrainBatches):
    """Gives three batches, and the next one when it is told to."""

    def __init__(self) -> None:
        super().__init__(PART, batch_size=8, seq_len=8)
        self.waits, self.going_on = threading.Event(), threading.Event()

    def __next__(self):
        if self.step == 3:
            self.waits.set()
            self.going_on.wait()
        return super().__next__()


def test_source_that_waits_is_left_and_rewound_when_it_goes_on():
    waiting, plain, others = Stalling(), source(), workers()
    batches = Prefetch(waiting)
    for _ in range(3):
        assert (np.asarray(next(batches)["inputs"]) == next(plain)["inputs"]).all()
    waiting.waits.wait()
    batches.interrupt()
    with pytest.raises(Interrupted):
        next(batches)
    assert batches.state()["step"] == 3
    assert batches.close() is False, "it does not wait again"
    assert list(batches) == []
    with pytest.raises(DataError, match=r"The batches \(Stalling\) are still being read"):
        Prefetch(WholeBatches(waiting, batch_size=8))
    waiting.going_on.set()
    for thread in workers() - others:
        thread.join()
    assert waiting.step == 3, "the thread has put it back"
    with Prefetch(waiting) as again:
        assert again.state()["step"] == 3
    assert batches.close() is True
    assert (next(waiting)["inputs"] == next(plain)["inputs"]).all()


def test_end_of_a_process_does_not_wait_for_a_source_that_was_left():
    program = (
        "import threading\n"
        "from shardax.train import Prefetch\n"
        "waits = threading.Event()\n"
        "def batches():\n"
        "    waits.set()\n"
        "    threading.Event().wait()\n"
        "    yield\n"
        "prefetch = Prefetch(batches())\n"
        "waits.wait()\n"
        "print(prefetch.close(timeout=0.0), flush=True)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=PATIENCE
    )
    assert (done.stdout, done.stderr, done.returncode) == ("False\n", "", 0)
