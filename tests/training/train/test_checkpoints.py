# SPDX-License-Identifier: Apache-2.0
"""A folder of checkpoints skips none, keeps the last, and survives being killed at any moment."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardax as sx
from shardax.errors import CheckpointError, CheckpointWriteError, DonationError, PathExistsError
from shardax.train import Checkpoints
from shardax.train.checkpoint import save
from shardax.train.checkpoint_format import describe
from tests.advice import run_advice
from tests.values import with_values


def make_weight() -> sx.Param[Any]:
    return sx.Param(jnp.ones(3))


def test_checkpoints_write_every_save_and_keep_the_last(tmp_path: Path) -> None:
    weight = sx.Param(jnp.zeros(1000))
    with (
        Checkpoints(tmp_path / "all", keep=None) as every,
        Checkpoints(tmp_path / "few", keep=2) as few,
    ):
        for step in range(5):
            weight.value = jnp.full(1000, float(step))
            every.save(step, weight)
            few.save(step, weight)
    assert every.steps() == [0, 1, 2, 3, 4] and few.steps() == [3, 4]
    assert sorted(item.name for item in (tmp_path / "few").iterdir()) == ["00000003", "00000004"]
    for step in range(5):
        every.restore(weight, step)
        assert weight.value.tolist() == [float(step)] * 1000


def test_values_may_be_donated_once_save_returns(tmp_path: Path) -> None:
    def advance(weights: Any) -> None:
        for weight in weights:
            weight[...] = weight + 1

    weights = [sx.Param(jnp.zeros((512, 512))) for _ in range(8)]
    advance_in_place = sx.jit(advance, donate_argnums=0)
    with Checkpoints(tmp_path, keep=None) as checkpoints:
        for step in range(4):
            checkpoints.save(step, weights)
            for _ in range(5):
                advance_in_place(weights)
        for step in range(4):
            checkpoints.restore(weights, step)
            for weight in weights:
                np.testing.assert_array_equal(weight.value, np.float32(5 * step))


def test_unfinished_checkpoints_are_ignored_and_removed(tmp_path: Path) -> None:
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, make_weight())
    (tmp_path / "00000002.orbax-checkpoint-tmp").mkdir()
    (tmp_path / "00000002.orbax-checkpoint-tmp" / "arrays").mkdir()
    (tmp_path / "00000000.deleted").mkdir()
    (tmp_path / "notes").mkdir()
    with Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.steps() == [1] and checkpoints.latest() == 1
        checkpoints.save(2, make_weight())
    names = sorted(item.name for item in tmp_path.iterdir())
    assert names == ["00000001", "00000002", "notes"]


def test_saving_an_earlier_step_needs_a_rewind(tmp_path: Path) -> None:
    weight = sx.Param(jnp.zeros(()))
    with Checkpoints(tmp_path, keep=None) as checkpoints:
        for step in (10, 20, 30):
            checkpoints.save(step, weight)
        with pytest.raises(PathExistsError, match=r"rewind\(19\)"):
            checkpoints.save(20, weight)
        checkpoints.rewind(10)
        assert checkpoints.steps() == [10]
        checkpoints.save(20, weight)
    assert checkpoints.steps() == [10, 20]


def test_due_says_when(tmp_path: Path) -> None:
    steps = range(1, 8)
    assert [s for s in steps if Checkpoints(tmp_path, every=3).due(s)] == [3, 6]
    assert [s for s in steps if Checkpoints(tmp_path).due(s)] == []
    assert not list(tmp_path.iterdir())  # looking makes nothing


def test_settings_and_steps_are_checked(tmp_path: Path) -> None:
    for options in ({"keep": 0}, {"every": 0}, {"keep": 1.5}):
        with pytest.raises(CheckpointError):
            Checkpoints(tmp_path, **options)  # pyright: ignore[reportArgumentType]
    for step in (-1, 1.0, jnp.int32(3)):
        with pytest.raises(CheckpointError, match="step="):
            Checkpoints(tmp_path).save(step, make_weight())  # pyright: ignore[reportArgumentType]


def test_background_write_error_is_raised_next_save_works(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    numbers = np.random.default_rng(0).normal(size=(8, 1024, 1024)).astype(np.float32)
    checkpoints = Checkpoints(folder)
    checkpoints.save(1, sx.Param(numbers))  # takes far longer to write than to remove
    (folder / "00000001" / "in the way").mkdir(parents=True)
    with pytest.raises(CheckpointWriteError, match=r"folder failed: .*None is complete\."):
        checkpoints.wait()
    checkpoints.save(2, sx.Param(jnp.ones(2)))
    checkpoints.close()
    assert checkpoints.steps() == [2]


def test_saving_into_a_moved_folder_is_refused(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path / "folder")
    checkpoints.save(1, make_weight())
    checkpoints.wait()
    (tmp_path / "folder").rename(tmp_path / "moved")
    with pytest.raises(CheckpointWriteError, match="folder was removed or moved"):
        checkpoints.save(2, make_weight())
    (tmp_path / "folder").write_text("in the way")
    with pytest.raises(CheckpointWriteError, match="folder was removed or moved"):
        checkpoints.save(2, make_weight())
    (tmp_path / "folder").unlink()
    (tmp_path / "moved").rename(tmp_path / "folder")
    checkpoints.close()


# --- kill -9 --------------------------------------------------------------------------------------

# Forks a process for each line that it is given: imports take longer than all else. JAX is used in
# the forked processes alone.
WRITERS = textwrap.dedent(
    """
    import os, sys
    import jax.numpy as jnp
    import orbax.checkpoint
    import shardax as sx

    while sys.stdin.readline():
        pid = os.fork()
        if pid == 0:
            break
        os.waitpid(pid, 0)
        print("ended", flush=True)
    else:
        sys.exit()
    weights = [sx.Param(jnp.zeros((256, 256))) for _ in range(12)]
    checkpoints = sx.train.Checkpoints(sys.argv[1], keep=2)
    step = checkpoints.latest()
    if step is None:
        step = -1
    else:
        checkpoints.restore(weights)
        assert all(bool((weight == step).all()) for weight in weights)
    print(os.getpid(), flush=True)
    while True:
        step += 1
        for weight in weights:
            weight[...] = jnp.full((256, 256), float(step))
        checkpoints.save(step, weights)
        print(step, flush=True)
    """
)


def test_last_complete_checkpoint_survives_sigkill_and_restores(tmp_path: Path) -> None:
    weights = [sx.Param(jnp.zeros((256, 256))) for _ in range(12)]
    seen = -1
    writers = subprocess.Popen(
        [sys.executable, "-c", WRITERS, str(tmp_path / "run")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OPENBLAS_NUM_THREADS": "1"},
    )
    with writers:
        assert writers.stdin is not None and writers.stdout is not None
        for _ in range(3):
            writers.stdin.write("another\n")
            writers.stdin.flush()
            pid, *started = [int(writers.stdout.readline()) for _ in range(3)]
            time.sleep(random.uniform(0, 0.3))  # it is killed wherever it is
            os.kill(pid, signal.SIGKILL)
            while (line := writers.stdout.readline()) != "ended\n":
                assert line
            checkpoints = Checkpoints(tmp_path / "run")
            latest = checkpoints.latest()
            # The save of step n begins when that of step n - 1 is complete.
            assert latest is not None and latest >= started[0] and started[0] == seen + 1
            checkpoints.restore(weights)
            for weight in weights:
                np.testing.assert_array_equal(weight.value, np.float32(latest))
            seen = latest
        writers.stdin.close()


def test_donated_arrays_are_refused_before_writing(tmp_path: Path) -> None:
    model = {"weight": make_weight(), "key": sx.Variable(jax.random.key(0)), "number": jnp.ones(2)}
    for leaf in (model["weight"].value, model["key"].value, model["number"]):
        leaf.delete()
    message = r"3 Variables hold arrays that were donated or deleted: \.weight, \.key, \.number\."
    with Checkpoints(tmp_path / "folder") as checkpoints:
        checkpoints.save(1, make_weight())
        for _ in range(2):
            with pytest.raises(DonationError, match=message):
                checkpoints.save(2, model)
            with pytest.raises(DonationError, match=message):
                save(model, tmp_path / "single")
        checkpoints.save(2, make_weight())
    assert checkpoints.steps() == [1, 2]
    assert sorted(path.name for path in (tmp_path / "folder").iterdir()) == ["00000001", "00000002"]
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]


def test_shared_array_is_copied_as_advised(tmp_path: Path) -> None:
    model = sx.nn.Linear(2, 2, rngs=sx.Rngs(0))
    with_values(model)
    twin, copy = sx.merge(*sx.split(model)), sx.clone(model)
    step = sx.jit(lambda model: model.bias.__setitem__(..., model.bias + 1), donate_argnums=0)
    step(model)
    with pytest.raises(DonationError, match=r"2 Variables hold .*: \.kernel, \.bias\.") as refused:
        save(twin, tmp_path / "twin")
    names: dict[str, Any] = {"sx": sx, "model": copy}
    save(run_advice(refused.value, "sx.clone(model)", names), tmp_path / "copy")


def test_refused_writes_leave_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints = Checkpoints(tmp_path)
    for step in (1, 2, 3):
        weight = sx.Param(jnp.ones(4))

        # A buffer that goes while it is copied: orbax is making directories by then.
        def describe_and_delete(*contents: Any, weight: sx.Param = weight) -> dict[str, Any]:
            weight.value.delete()
            return describe(*contents)

        with monkeypatch.context() as patched:
            patched.setattr("shardax.train.checkpoint.describe", describe_and_delete)
            with pytest.raises(CheckpointWriteError, match="Array has been deleted"):
                checkpoints.save(step, weight)
        assert list(tmp_path.iterdir()) == []
    checkpoints.save(1, make_weight())
    checkpoints.close()
    assert [path.name for path in tmp_path.iterdir()] == ["00000001"]


def test_files_named_by_numbers_are_no_checkpoints(tmp_path: Path) -> None:
    (tmp_path / "99999999").write_text("notes")
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        checkpoints.save(1, make_weight())
        checkpoints.save(2, make_weight())
    assert (checkpoints.all_steps(), checkpoints.latest()) == ([2], 2)
    weight = sx.Param(jnp.zeros(3))
    checkpoints.restore(weight)
    assert weight.value.tolist() == [1, 1, 1]
    assert (tmp_path / "99999999").read_text() == "notes"
