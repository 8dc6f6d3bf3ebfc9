# SPDX-License-Identifier: Apache-2.0
"""Schedules of pipelines: complete, without deadlock, and as idle as their papers say."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardax.errors import PartitionError
from shardax.train import Schedule

STAGES, TIMES = st.integers(1, 6), st.sampled_from([1.0, 2.0, 3.5])


@given(STAGES, st.integers(1, 12), TIMES, TIMES)
def test_one_f_one_b_idles_as_gpipe_with_less_memory(
    stages: int, microbatches: int, forward: float, backward: float
) -> None:
    times = {"forward": forward, "backward": backward}
    gpipe = Schedule.gpipe(stages, microbatches)
    turns = Schedule.one_f_one_b(stages, microbatches)
    share = (stages - 1) / (microbatches + stages - 1)
    assert gpipe.bubble_share(times) == pytest.approx(share)
    assert turns.bubble_share(times) <= share + 1e-9 or forward != backward / 2
    assert turns.bubble_share() == pytest.approx(share)
    assert gpipe.peak_microbatches() == (microbatches,) * stages
    held = tuple(min(stages - stage, microbatches) for stage in range(stages))
    assert turns.peak_microbatches() == held


@given(st.integers(2, 5), st.integers(1, 3), st.integers(2, 4))
def test_interleaved_schedule_idles_for_a_share_of_rounds(
    stages: int, groups: int, rounds: int
) -> None:
    microbatches = stages * groups
    schedule = Schedule.interleaved(stages, microbatches, stages * rounds)
    wanted = (stages - 1) / (rounds * microbatches + stages - 1)
    assert schedule.bubble_share() == pytest.approx(wanted)


@given(st.integers(2, 6), st.integers(1, 12))
def test_zero_bubble_idles_less_with_equal_memory(stages: int, microbatches: int) -> None:
    schedule = Schedule.zero_bubble(stages, microbatches)
    assert schedule.bubble_share() < Schedule.one_f_one_b(stages, microbatches).bubble_share()
    assert max(schedule.peak_microbatches()) == min(stages, microbatches)
    if microbatches >= 2 * stages:
        # Idle for (S - 1) (forward + input - weight) of its 3 M units of work.
        assert schedule.bubble_share() == pytest.approx(
            (stages - 1) / (3 * microbatches + stages - 1)
        )


@given(STAGES, st.integers(1, 6), st.sampled_from(["gpipe", "1f1b", "interleaved", "zero-bubble"]))
def test_stages_run_one_operation_after_its_inputs(stages: int, groups: int, name: str) -> None:
    chunks = 2 * stages if name == "interleaved" else stages
    schedule = Schedule.named(name, stages, stages * groups, chunks)
    timed = schedule.simulate()
    ends = {each.operation: each.end for each in timed}
    free = [0.0] * stages
    for each in timed:
        kind, microbatch, chunk = each.operation
        assert each.stage == chunk % stages and each.start >= free[each.stage]
        free[each.stage] = each.end
        if kind == "forward" and chunk:
            assert each.start >= ends["forward", microbatch, chunk - 1]
        if kind in ("backward", "input"):
            assert each.start >= ends["forward", microbatch, chunk]
            if chunk < chunks - 1:
                assert each.start >= ends[kind, microbatch, chunk + 1]
        if kind == "weight":
            assert each.start >= ends["input", microbatch, chunk]
    assert [str(each) for each in sorted(ends)] == [str(each) for each in sorted(set(ends))]


def test_pictures_show_every_operation_at_its_time() -> None:
    assert Schedule.zero_bubble(2, 2).draw().splitlines()[1:] == [
        "stage 0  F0 F1 .. I0 W0 I1 W1",
        "stage 1  .. F0 I0 F1 I1 W0 W1",
    ]
    schedule = Schedule.interleaved(2, 2, 4)
    picture = ElementTree.fromstring(schedule.svg())
    parts = [*picture.iter()]
    forward = [each for each in parts if "#8fb8de" in each.attrib.get("style", "")]
    backward = [each for each in parts if "#8fcf9f" in each.attrib.get("style", "")]
    assert len(forward) == len(backward) == 8
    texts = [each.text for each in parts if each.tag.endswith("text")]
    labels = [text for text in texts if text and text[0] in "FB"]
    assert len(labels) == sum(map(len, schedule.table)) == 16
    assert {"F0a", "F1b", "B0b", "B1a", "stage 1", "interleaved, idle 20%"} <= set(texts)


FORWARD, BACKWARD = ("forward", 0, 0), ("backward", 0, 0)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (((BACKWARD, FORWARD),), r"stage 0: \('backward', 0, 0\) waits for \('forward', 0, 0\)"),
        (((FORWARD,),), r"lacks \('backward', 0, 0\)"),
        (((FORWARD, FORWARD, BACKWARD),), r"has twice \('forward', 0, 0\)"),
        (((FORWARD, BACKWARD, ("weight", 0, 0)),), "lacks.*'input'"),
        ((), "no stages"),
        (((("sideways", 0, 0),),), "is of kind 'sideways'"),
        (((FORWARD, ("forward", -1, 0), BACKWARD),), "negative"),
        (((FORWARD, BACKWARD), (("forward", 0, 2), ("backward", 0, 2))), "belongs to stage 0 of 2"),
    ],
)
def test_impossible_table_is_refused_with_the_operation(table: Any, message: str) -> None:
    with pytest.raises(PartitionError, match=message):
        Schedule("own", table)
