# SPDX-License-Identifier: Apache-2.0
"""The log survives kill -9, resumes without duplicates, and is standard JSON on every line."""

import json
import math
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardax.errors import TrainError
from shardax.train import JsonlLog, read_jsonl

names = st.text(min_size=1, max_size=5)
leaves = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text().filter(lambda text: text not in {"NaN", "Infinity", "-Infinity"})
)
values = st.recursive(
    leaves,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=3),
    max_leaves=6,
)


WRITER = textwrap.dedent(
    """
    import os, resource, signal, sys
    from shardax.train import JsonlLog

    # A limit on the size of files acts as a full disk does: half a line is taken, then an error.
    log = JsonlLog(sys.argv[1])
    log.write(step=1)
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len('{"step":1}') + 5, unlimited[1]))
    try:
        log.write(step=2)
    except OSError as error:
        assert "too large" in str(error)
    else:
        raise AssertionError("the limit did not act")
    resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
    log.write(step=2, again=True)
    log.close()

    log = JsonlLog(sys.argv[2])
    log.write(step=1, loss=2.0)
    log.write(step=2, loss=1.5)
    log._file.write(b'{"step":3,"lo')
    os.kill(os.getpid(), signal.SIGKILL)
    """
)


@pytest.fixture(scope="module")
def logs_of_a_process(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The logs of a process: one that a write failed of, and one during which it was killed."""
    folder = tmp_path_factory.mktemp("logs")
    paths = folder / "short.jsonl", folder / "killed.jsonl"
    done = subprocess.run(
        [sys.executable, "-c", WRITER, *paths],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "JAX_PLATFORMS": "cpu"},
    )
    assert done.returncode == -signal.SIGKILL
    return paths


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "runs" / "log.jsonl"


@settings(deadline=None)
@given(st.lists(st.dictionaries(names.filter(lambda name: name != "step"), values), max_size=4))
def test_jsonl_log_is_read_back_as_written(tmp_path_factory: pytest.TempPathFactory, records: list):
    path = tmp_path_factory.getbasetemp() / "written.jsonl"
    path.unlink(missing_ok=True)
    with JsonlLog(path) as log:
        for record in records:
            log.write(**record)
    # repr, because NaN is not equal to itself.
    assert repr(read_jsonl(path)) == repr(records)
    for line in path.read_bytes().split(b"\n")[:-1]:
        json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not standard JSON"))


def test_non_finite_numbers_are_strings_in_the_file(path: Path):
    with JsonlLog(path) as log:
        log.write(loss=math.nan, worst=[math.inf, np.float32(-np.inf)], mean=np.float64("nan"))
    assert path.read_text() == '{"loss":"NaN","worst":["Infinity","-Infinity"],"mean":"NaN"}\n'
    (record,) = read_jsonl(path)
    assert math.isnan(record["loss"])
    assert record["worst"] == [math.inf, -math.inf]


def test_arrays_and_scalars_become_plain_numbers(path: Path):
    with JsonlLog(path) as log:
        log.write(
            step=np.int64(3),
            loss=jnp.float32(0.5),
            half=jnp.bfloat16(1.5),
            flags=np.array([True, False]),
            table=jnp.arange(4).reshape(2, 2),
            pair=(1, 2),
        )
    assert read_jsonl(path) == [
        {
            "step": 3,
            "loss": 0.5,
            "half": 1.5,
            "flags": [True, False],
            "table": [[0, 1], [2, 3]],
            "pair": [1, 2],
        }
    ]


@pytest.mark.parametrize(
    ("value", "where"),
    [
        (object(), "value"),
        (1j, "value"),
        ({"a": [0, {1}]}, r"value\['a'\]\[1\]"),
        ({1: "a"}, "value"),
        (Path("a"), "value"),
        (np.array([object()]), r"value\[0\]"),
        (jax.random.key(0), "value"),
    ],
)
def test_value_without_json_form_is_refused_by_name(path: Path, value: object, where: str):
    with JsonlLog(path) as log:
        with pytest.raises(TrainError, match=where):
            log.write(step=1, value=value)
        log.write(step=0)
    assert read_jsonl(path) == [{"step": 0}]


def test_record_is_in_the_file_when_write_returns(path: Path):
    log = JsonlLog(path)
    log.write(step=1)
    assert path.read_text() == '{"step":1}\n'
    log.close()
    log.close()


def test_records_survive_sigkill_and_torn_line_is_removed(logs_of_a_process: tuple[Path, Path]):
    path = logs_of_a_process[1]
    survived = [{"step": 1, "loss": 2.0}, {"step": 2, "loss": 1.5}]
    assert read_jsonl(path) == survived
    with JsonlLog(path) as log:
        log.write(step=3, loss=1.0)
    assert read_jsonl(path) == [*survived, {"step": 3, "loss": 1.0}]


@settings(deadline=None)
@given(
    steps=st.lists(st.none() | st.integers(0, 9), max_size=12),
    resume_step=st.integers(-1, 10),
    torn=st.sampled_from([b"", b"{", b'{"step":']),
)
def test_resuming_drops_records_from_the_first_later_step(
    tmp_path_factory: pytest.TempPathFactory, steps: list[int | None], resume_step: int, torn: bytes
):
    numbers = iter(sorted(step for step in steps if step is not None))
    records: list[dict[str, Any]] = [
        {"event": "x"} if step is None else {"step": next(numbers)} for step in steps
    ]
    path = tmp_path_factory.getbasetemp() / "resumed.jsonl"
    path.unlink(missing_ok=True)
    with JsonlLog(path) as log:
        for record in records:
            log.write(**record)
    with path.open("ab") as file:
        file.write(torn)
    later = [i for i, record in enumerate(records) if record.get("step", -1) > resume_step]
    kept = records[: later[0]] if later else records
    with JsonlLog(path, resume_step=resume_step) as log:
        assert read_jsonl(path) == kept
        log.write(step=resume_step + 1)
    assert read_jsonl(path) == [*kept, {"step": resume_step + 1}]


def test_resumed_log_equals_the_uninterrupted_one(tmp_path: Path):
    def run(path: Path, first: int, last: int, resume_step: int | None = None) -> None:
        with JsonlLog(path, resume_step=resume_step) as log:
            for step in range(first, last):
                log.write(step=step, loss=1 / (step + 1))

    run(tmp_path / "straight", 0, 10)
    run(tmp_path / "broken", 0, 8)
    run(tmp_path / "broken", 5, 10, resume_step=4)
    assert (tmp_path / "broken").read_bytes() == (tmp_path / "straight").read_bytes()


def test_steps_may_repeat_but_not_go_back(path: Path):
    with JsonlLog(path) as log:
        log.write(step=5, loss=1.0)
        log.write(step=5, held_out=1.1)
    with JsonlLog(path) as log:
        with pytest.raises(TrainError, match=r"step 4 cannot follow one of step 5.*resume_step=3"):
            log.write(step=4)
        log.write(step=6)
    assert [record["step"] for record in read_jsonl(path)] == [5, 5, 6]


@pytest.mark.parametrize("step", [-1, 1.0, True, "1"])
def test_step_that_is_no_count_is_refused(path: Path, step: object):
    with JsonlLog(path) as log, pytest.raises(TrainError, match="int of 0 or more"):
        log.write(step=step)
    assert path.read_bytes() == b""


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"step":1}\nnonsense\n{"step":2}\n', "Line 2"),
        (b"[1, 2]\n", "Line 1"),
        (b"a poem without an end of line", "not the beginning of a record"),
    ],
)
def test_file_that_is_no_log_is_refused_unchanged(tmp_path: Path, content: bytes, message: str):
    path = tmp_path / "file"
    path.write_bytes(content)
    with pytest.raises(TrainError, match=message):
        JsonlLog(path, resume_step=0)
    with pytest.raises(TrainError, match=message):
        read_jsonl(path)
    assert path.read_bytes() == content


def test_failed_write_leaves_no_partial_line(logs_of_a_process: tuple[Path, Path]):
    path = logs_of_a_process[0]
    assert read_jsonl(path) == [{"step": 1}, {"step": 2, "again": True}]


def test_closed_log_refuses_to_write(path: Path):
    log = JsonlLog(path)
    log.close()
    with pytest.raises(TrainError, match="closed"):
        log.write(step=1)


def test_reading_a_missing_log_raises_file_not_found(path: Path):
    with pytest.raises(FileNotFoundError):
        read_jsonl(path)


@pytest.mark.parametrize("depth", [980, 100_000])  # too deep for what is read, or to read
def test_deeply_nested_records_are_refused(tmp_path: Path, depth: int):
    log = tmp_path / "log.jsonl"
    log.write_text('{"step":1}\n' + '{"a":' * depth + "1" + "}" * depth + "\n")
    with pytest.raises(TrainError, match=r"Line 2 of .* is no JSON object|nested more deeply"):
        read_jsonl(log)
