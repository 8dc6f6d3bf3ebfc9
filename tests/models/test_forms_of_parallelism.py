# SPDX-License-Identifier: Apache-2.0
"""Every form of parallelism, alone and with others, on 1, 2 and 8 devices: as one device.

Those on 4 devices run in two processes, in ``tests/training/distributed/test_training.py``.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import AxisType

import shardax as sx
from tests.models.forms import FORMS, Form, make_batch, run, step, whole
from tests.values import with_values


@functools.cache
def alone() -> tuple[float, Any]:
    loss, gradients = step(whole(), make_batch())
    return float(loss), gradients.flat()


IN_ONE_PROCESS = [form for form in FORMS if math.prod(form.sizes.values()) != 4]


@pytest.mark.parametrize("form", IN_ONE_PROCESS, ids=lambda form: form.name)
def test_loss_and_gradients_equal_one_device(form: Form) -> None:
    value, wanted = alone()
    loss, gradients = run(form)
    assert float(loss) == pytest.approx(value, abs=1e-5)
    found = gradients.flat()
    assert found.keys() == wanted.keys()
    for path, each in found.items():
        np.testing.assert_allclose(each, wanted[path], atol=2e-5, err_msg=str(path))


def test_loss_and_gradients_over_explicit_axes() -> None:
    value, wanted = alone()
    loss, gradients = run(FORMS[-2], AxisType.Explicit)
    assert float(loss) == pytest.approx(value, abs=1e-5)
    for path, each in gradients.flat().items():
        np.testing.assert_allclose(each, wanted[path], atol=2e-5, err_msg=str(path))


def mean_square(stack: Any, x: Any) -> Any:
    return sx.value_and_grad(lambda stack, x: (stack(x) ** 2).mean())(stack, x)


# What a policy keeps of a ring that is within a stage: its results, and nothing inside.
@pytest.mark.parametrize(
    ("schedule", "remat"),
    [
        ("circular", None),
        ("circular", "dots_saveable"),
        ("gpipe", "dots_saveable"),
        ("gpipe", "everything_saveable"),
        ("gpipe", jax.checkpoint_policies.save_only_these_names("ring")),
    ],
    ids=lambda value: value if isinstance(value, str | None) else "ring",
)
def test_rings_in_pipelines_take_every_policy(schedule: Any, remat: Any) -> None:
    def make(**options: Any) -> Any:
        def layer() -> Any:
            return sx.nn.MultiHeadAttention(8, 2, causal=True, rope_base=1e2, rngs=sx.Rngs(0))

        return with_values(sx.nn.Stack(layer, 4, **options))

    x = np.random.default_rng(0).normal(size=(4, 8, 8)).astype("float32")
    value, wanted = sx.jit(mean_square)(make(), x)
    mesh = jax.make_mesh((2, 2), ("stage", "context"), axis_types=(AxisType.Auto,) * 2)
    rules = [("layers", "stage"), ("seq", "context")]
    stack = sx.shard(make(remat=remat, microbatches=2, schedule=schedule), mesh, rules)
    with jax.set_mesh(mesh), sx.axis_rules(rules), sx.parallel(context="ring"):
        loss, gradients = sx.jit(mean_square)(stack, x)
    assert float(loss) == pytest.approx(float(value), rel=1e-5)
    for path, each in gradients.flat().items():
        expected = np.asarray(wanted.flat()[path])
        atol = 1e-4 * np.abs(expected).max()
        np.testing.assert_allclose(each, expected, rtol=0, atol=atol, err_msg=str(path))
