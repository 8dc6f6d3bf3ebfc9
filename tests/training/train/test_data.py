# SPDX-License-Identifier: Apache-2.0
"""Training batches are a pure function of (text, seed, step); evaluation counts every byte once."""

import json
from collections import Counter
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardax.errors import DataError
from shardax.train import (
    ByteText,
    DataPosition,
    EvalBatches,
    Positioned,
    RowBatches,
    TextPart,
    TrainBatches,
    WholeBatches,
)


def numbered_text(length: int) -> ByteText:
    """A text in which any few consecutive bytes tell where they stand."""
    return ByteText.from_bytes(np.random.default_rng(0).integers(0, 256, length, np.uint8))


TEXT = numbered_text(4000)
TRAIN, HELD_OUT = TEXT.split(0.1, block_bytes=100)


@st.composite
def parts(draw: st.DrawFn) -> TextPart:
    """Parts of short segments, with and without gaps."""
    edges = sorted(draw(st.sets(st.integers(0, 200), min_size=2, max_size=8)))
    edges = edges[: len(edges) // 2 * 2]
    return TextPart(TEXT, np.array(edges[0::2]), np.array(edges[1::2]))


def windows_of(batch: dict[str, np.ndarray]) -> list[bytes]:
    """The windows of a batch as bytes: inputs and the last target."""
    whole = np.concatenate([batch["inputs"], batch["targets"][:, -1:]], axis=1)
    return [bytes(row.astype(np.uint8)) for row in whole]


# --- training batches ----------------------------------------------------------------------------


def test_targets_are_the_inputs_one_byte_later():
    batch = next(TrainBatches(TRAIN, batch_size=4, seq_len=16))
    assert set(batch) == {"inputs", "targets"}
    for array in batch.values():
        assert array.shape == (4, 16)
        assert array.dtype == np.int32
    assert (batch["inputs"][:, 1:] == batch["targets"][:, :-1]).all()


@given(seed=st.integers(0, 2**64 - 1), step=st.integers(0, 1000), seq_len=st.integers(1, 64))
def test_training_windows_lie_whole_in_one_training_segment(seed: int, step: int, seq_len: int):
    segments = [bytes(segment) for segment in TRAIN.segments()]
    batches = TrainBatches(TRAIN, batch_size=8, seq_len=seq_len, seed=seed)
    for window in windows_of(batches.batch_at(step)):
        assert len(window) == seq_len + 1
        assert any(window in segment for segment in segments)


@given(
    part=parts(),
    batch_size=st.integers(1, 7),
    seq_len=st.integers(1, 20),
    seed=st.integers(0, 99),
    restore_at=st.integers(0, 12),
    taken=st.integers(0, 12),
)
def test_restoring_at_any_step_gives_the_same_tail(
    part: TextPart, batch_size: int, seq_len: int, seed: int, restore_at: int, taken: int
):
    if (part.ends - part.starts).max() <= seq_len:
        return

    def make() -> TrainBatches:
        return TrainBatches(part, batch_size=batch_size, seq_len=seq_len, seed=seed)

    straight, states, expected = make(), [], []
    for _ in range(15):
        states.append(json.loads(json.dumps(straight.state())))
        expected.append(windows_of(next(straight)))
    resumed = make()
    for _ in range(taken):
        next(resumed)
    resumed.restore(states[restore_at])
    assert resumed.state() == states[restore_at]
    assert [windows_of(next(resumed)) for _ in range(restore_at, 15)] == expected[restore_at:]


@given(part=parts(), seq_len=st.integers(1, 20), seed=st.integers(0, 99))
def test_epoch_takes_every_window_and_target_once(part: TextPart, seq_len: int, seed: int):
    if (part.ends - part.starts).max() <= seq_len:
        return
    # A text of positions: what a batch holds is where it was read.
    places = ByteText.from_bytes(np.arange(201, dtype=np.uint8))
    part = TextPart(places, part.starts, part.ends)
    batches = TrainBatches(part, batch_size=1, seq_len=seq_len, seed=seed)
    for _ in range(3):
        targets = [next(batches)["targets"][0].tolist() for _ in range(batches.windows_per_epoch)]
        counts = Counter(place for window in targets for place in window)
        assert set(counts.values()) == {1}
        inside = {
            place
            for start, end in zip(part.starts.tolist(), part.ends.tolist(), strict=True)
            for place in range(start + 1, end)
        }
        assert set(counts) <= inside
        # What an epoch leaves out is less than two windows a segment.
        assert len(inside) - len(counts) < 2 * seq_len * part.starts.size
    assert batches.epoch == 3.0


def test_train_batches_make_every_byte_a_target_over_the_epochs():
    places = ByteText.from_bytes(np.arange(100, dtype=np.uint8))
    batches = TrainBatches(places.whole, batch_size=1, seq_len=16)
    seen = {place for _ in range(1000) for place in next(batches)["targets"][0].tolist()}
    assert seen == set(range(1, 100))


def test_epochs_and_seeds_differ_in_order_and_offset():
    def epoch(seed: int, number: int) -> list[bytes]:
        batches = TrainBatches(TRAIN, batch_size=1, seq_len=16, seed=seed)
        steps = range(number * batches.windows_per_epoch, (number + 1) * batches.windows_per_epoch)
        return [windows_of(batches.batch_at(step))[0] for step in steps]

    runs = [epoch(0, 0), epoch(0, 1), epoch(1, 0)]
    for one in range(3):
        for other in range(one):
            assert runs[one] != runs[other]
            common = set(runs[one]) & set(runs[other])
            assert len(common) < 0.5 * len(runs[one]), "offsets differ, so most windows do"


def test_batches_continue_from_one_epoch_to_the_next():
    one_by_one = TrainBatches(TRAIN, batch_size=1, seq_len=64, seed=3)
    by_seven = TrainBatches(TRAIN, batch_size=7, seq_len=64, seed=3)
    steps = 3 * one_by_one.windows_per_epoch // 7
    singles = [windows_of(next(one_by_one))[0] for _ in range(7 * steps)]
    assert [window for _ in range(steps) for window in windows_of(next(by_seven))] == singles


def test_batch_may_be_larger_than_an_epoch():
    batches = TrainBatches(ByteText.from_bytes(bytes(range(12))).whole, batch_size=10, seq_len=4)
    assert batches.windows_per_epoch == 1
    assert len(set(windows_of(next(batches)))) > 1, "each epoch has its own offset"


@given(rows=st.sets(st.integers(0, 11), min_size=1).map(sorted), step=st.integers(0, 50))
def test_selected_rows_equal_those_of_the_whole_batch(rows: list[int], step: int):
    whole = TrainBatches(TRAIN, batch_size=12, seq_len=16, seed=5)
    some = TrainBatches(TRAIN, batch_size=12, seq_len=16, seed=5)
    for each in (whole, some):
        each.restore({**each.state(), "step": step})
    parts = some.by_rows(np.array(rows))
    for _ in range(2):
        part, batch = next(parts), next(whole)
        assert {name: (array[rows] == part[name]).all() for name, array in batch.items()} == {
            "inputs": True,
            "targets": True,
        }
    assert some.state() == whole.state()


@given(rows=st.sets(st.integers(0, 5), min_size=1).map(sorted))
def test_row_batches_read_only_the_rows_asked_for(rows: list[int]):
    read: list[int] = []

    def source(start: int, stop: int) -> dict[str, Any]:
        read.extend(range(start, stop))
        return {"x": np.arange(start, stop), "y": np.arange(start, stop)[:, None] * 2}

    batches = RowBatches(source, batch_size=6, name="numbers")
    next(batches)
    saved, _ = batches.state(), read.clear()
    part = next(batches.by_rows(np.array(rows)))
    assert read == part["x"].tolist() == [6 + row for row in rows]
    assert part["y"].tolist() == [[2 * (6 + row)] for row in rows]
    again = RowBatches(source, batch_size=6, name="numbers")
    again.restore(saved)
    assert next(again)["x"].tolist() == list(range(6, 12))
    for other in ({"batch_size": 5}, {"name": "letters"}):
        with pytest.raises(DataError, match="cannot be continued"):
            RowBatches(source, **{"batch_size": 6, "name": "numbers", **other}).restore(saved)
    for state in ({**saved, "step": -1}, {**saved, "step": True}, {"name": "numbers"}, 3, None):
        with pytest.raises(DataError, match="cannot be continued"):
            again.restore(state)
    assert again.state() == {**saved, "step": saved["step"] + 1}


def test_whole_batches_give_rows_and_position_of_source():
    wrapped = WholeBatches(TrainBatches(TRAIN, batch_size=6, seq_len=8), batch_size=6)
    plain = TrainBatches(TRAIN, batch_size=6, seq_len=8)
    assert isinstance(wrapped, Positioned) and not isinstance(
        WholeBatches([], batch_size=6), Positioned
    )
    assert (
        next(wrapped.by_rows(np.array([1, 4])))["inputs"] == next(plain)["inputs"][[1, 4]]
    ).all()
    assert wrapped.state() == plain.state()


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (lambda: next(RowBatches(lambda a, b: np.zeros(3), batch_size=4)), "must return 4 rows"),
        (lambda: next(iter(WholeBatches([np.zeros(2)], batch_size=4))), "batch_size=4 rows were"),
        (lambda: RowBatches(lambda a, b: 0, batch_size=0), "batch_size=0"),
        (lambda: WholeBatches([], batch_size=True), "batch_size=True"),
    ],
)
def test_batches_of_another_number_of_rows_are_refused(source: Any, message: str):
    with pytest.raises(DataError, match=message):
        source()


@pytest.mark.parametrize("rows", [[4], [-1], [], [0.5], [[0]]])
def test_rows_outside_of_the_batch_are_refused(rows: Any):
    sources = [
        TrainBatches(TRAIN, batch_size=4, seq_len=16),
        EvalBatches(HELD_OUT, batch_size=4, seq_len=16),
        RowBatches(np.arange, batch_size=4),
        WholeBatches([np.zeros(4)], batch_size=4),
    ]
    for source in sources:
        with pytest.raises(DataError, match="rows must be numbers from 0 to 3"):
            next(source.by_rows(np.array(rows)))


def test_batch_order_equals_the_recorded_order():
    places = ByteText.from_bytes(np.arange(200, dtype=np.uint8))
    train, _ = places.split(0.1, block_bytes=20)
    batches = TrainBatches(train, batch_size=6, seq_len=8, seed=1)
    starts = [next(batches)["inputs"][:, 0].tolist() for _ in range(3)]
    assert starts == [
        [145, 18, 10, 26, 161, 82],
        [137, 58, 153, 169, 42, 90],
        [129, 66, 177, 74, 50, 121],
    ]


def test_state_and_position_say_the_same():
    batches = TrainBatches(TRAIN, batch_size=4, seq_len=16, seed=9)
    next(batches)
    assert batches.position == DataPosition(1, 9, 4, 16, TRAIN.fingerprint)
    assert DataPosition(**batches.state()) == batches.position  # pyright: ignore[reportArgumentType]  (checked by value)
    other = TrainBatches(TRAIN, batch_size=4, seq_len=16, seed=9)
    other.restore(batches.position)
    assert other.position == batches.position


def test_restoring_over_other_data_is_refused_listing_differences():
    saved = TrainBatches(TRAIN, batch_size=4, seq_len=16, seed=0)
    next(saved)
    other = TrainBatches(TEXT.split(0.2)[0], batch_size=8, seq_len=32, seed=1)
    next(other)
    next(other)
    with pytest.raises(DataError) as caught:
        other.restore(saved.state())
    message = str(caught.value)
    for line in (
        "seed: saved 0, here 1",
        "batch_size: saved 4, here 8",
        "seq_len: saved 16, here 32",
        f"fingerprint: saved '{TRAIN.fingerprint}'",
    ):
        assert line in message
    assert "open the same text and split it with the same arguments" in message
    assert other.step == 2


def test_restoring_another_batch_size_names_the_saved_one():
    saved = TrainBatches(TRAIN, batch_size=4, seq_len=16).state()
    with pytest.raises(DataError, match="batch_size=<saved>"):
        TrainBatches(TRAIN, batch_size=8, seq_len=16).restore(saved)


@pytest.mark.parametrize(
    "broken",
    [
        {},
        None,
        {"step": 1},
        {"step": -1},
        {"step": 1.5},
        {"step": True},
        {"step": "1"},
        {"extra": 0},
    ],
)
def test_restoring_what_is_no_position_is_refused(broken: dict[str, object] | None):
    batches = TrainBatches(TRAIN, batch_size=4, seq_len=16)
    next(batches)
    complete = {**batches.state(), **broken} if broken and broken != {"step": 1} else broken
    with pytest.raises(DataError, match="Not a data position"):
        batches.restore(complete)  # pyright: ignore[reportArgumentType]  (the point)
    assert batches.step == 1


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"batch_size": 0}, "batch_size=0"),
        ({"seq_len": 0}, "seq_len=0"),
        ({"seed": -1}, "seed"),
        ({"seed": 2**64}, "seed"),
        ({"seq_len": 1900}, r"seq_len \+ 1 = 1901"),
    ],
)
def test_sizes_that_cannot_work_are_refused(sizes: dict[str, int], message: str):
    with pytest.raises(DataError, match=message):
        TrainBatches(TRAIN, **{"batch_size": 4, "seq_len": 16, **sizes})


def test_longest_possible_window_is_allowed():
    text = ByteText.from_bytes(b"abcde")
    assert windows_of(next(TrainBatches(text.whole, batch_size=1, seq_len=4))) == [b"abcde"]
    with pytest.raises(DataError, match="the longest segment"):
        TrainBatches(text.whole, batch_size=1, seq_len=5)


def test_negative_step_is_refused():
    with pytest.raises(DataError, match="-1"):
        TrainBatches(TRAIN, batch_size=4, seq_len=16).batch_at(-1)


# --- evaluation batches --------------------------------------------------------------------------


@given(part=parts(), batch_size=st.integers(1, 5), seq_len=st.integers(1, 20))
def test_evaluation_predicts_every_byte_with_a_predecessor_once(
    part: TextPart, batch_size: int, seq_len: int
):
    expected = Counter(
        (int(a), int(b)) for segment in part.segments() for a, b in pairwise(segment)
    )
    if not expected:
        with pytest.raises(DataError, match="nothing to predict"):
            EvalBatches(part, batch_size=batch_size, seq_len=seq_len)
        return
    batches = EvalBatches(part, batch_size=batch_size, seq_len=seq_len)
    found: Counter[tuple[int, int]] = Counter()
    for batch in batches:
        assert {array.shape for array in batch.values()} == {(batch_size, seq_len)}
        assert (batch["inputs"].dtype, batch["mask"].dtype) == (np.int32, np.bool_)
        mask = batch["mask"]
        found.update(
            zip(batch["inputs"][mask].tolist(), batch["targets"][mask].tolist(), strict=True)
        )
        assert not batch["inputs"][~mask].any()
        assert not batch["targets"][~mask].any()
    assert found == expected
    assert batches.targets == expected.total()
    assert len(batches) == len(list(batches))


def test_evaluation_repeats_in_the_order_of_the_text():
    batches = EvalBatches(ByteText.from_bytes(b"abcdefghi").whole, batch_size=2, seq_len=3)
    for _ in range(2):
        (first, second) = batches
        assert windows_of(first) == [b"abcd", b"defg"]
        assert second["targets"].tolist() == [[ord("h"), ord("i"), 0], [0, 0, 0]]
        assert second["mask"].tolist() == [[True, True, False], [False, False, False]]


def test_limited_evaluation_spreads_evenly_over_the_text():
    places = ByteText.from_bytes(np.arange(201, dtype=np.uint8))
    batches = EvalBatches(places.whole, batch_size=2, seq_len=10, max_batches=2)
    starts = [start for batch in batches for start in batch["inputs"][:, 0].tolist()]
    assert starts == [0, 50, 100, 150]
    assert len(batches) == 2
    assert batches.targets == 40
    assert batches.part.starts.tolist() == [0, 50, 100, 150]
    assert batches.part.ends.tolist() == [11, 61, 111, 161]


@given(
    part=parts(), batch_size=st.integers(1, 4), seq_len=st.integers(1, 9), limit=st.integers(1, 6)
)
def test_evaluating_the_covered_part_predicts_the_same_bytes(
    part: TextPart, batch_size: int, seq_len: int, limit: int
):
    if (part.ends - part.starts).max() < 2:
        return
    limited = EvalBatches(part, batch_size=batch_size, seq_len=seq_len, max_batches=limit)
    assert len(limited) <= limit
    again = EvalBatches(limited.part, batch_size=1, seq_len=1)
    assert again.targets == limited.targets
    assert [batch["targets"][0, 0] for batch in again] == [
        target for batch in limited for target in batch["targets"][batch["mask"]]
    ]


def test_limit_above_what_there_is_changes_nothing():
    plain = EvalBatches(HELD_OUT, batch_size=3, seq_len=7)
    limited = EvalBatches(HELD_OUT, batch_size=3, seq_len=7, max_batches=10_000)
    assert limited.targets == plain.targets == len(HELD_OUT) - HELD_OUT.starts.size
    assert limited.part.fingerprint == plain.part.fingerprint == HELD_OUT.fingerprint


@given(rows=st.sets(st.integers(0, 5), min_size=1).map(sorted))
def test_selected_evaluation_rows_equal_those_of_whole_batches(rows: list[int]):
    batches = EvalBatches(HELD_OUT, batch_size=6, seq_len=13)
    for whole, part in zip(batches, batches.by_rows(np.array(rows)), strict=True):
        for name, array in whole.items():
            assert (array[rows] == part[name]).all()


def test_limit_below_one_batch_is_refused():
    with pytest.raises(DataError, match="max_batches"):
        EvalBatches(HELD_OUT, batch_size=1, seq_len=1, max_batches=0)
