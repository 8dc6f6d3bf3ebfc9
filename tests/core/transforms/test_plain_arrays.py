# SPDX-License-Identifier: Apache-2.0
"""Arrays that were not made Params: errors of what has nothing to learn name them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import shardax as sx
from shardax.errors import TrainError, TransformError
from tests.advice import run_advice


class Plain(sx.Module):
    """A model whose arrays are no Variables."""

    def __init__(self, array: Any) -> None:
        self.kernel = array
        self.steps = jnp.int32(0)  # nothing to differentiate

    def __call__(self) -> Any:
        return (self.kernel * 3).sum()


class Holder(sx.Module):
    """A model whose parts have them."""

    def __init__(self, parts: Any) -> None:
        self.parts = parts


def _plain(model: Any) -> Any:
    part = model
    while not isinstance(part, Plain):
        part = part.parts[0] if isinstance(part, Holder) else next(iter(part.values()))
    return part


def _loss(model: Any) -> Any:
    return _plain(model)()


def _models(array: Any) -> dict[str, tuple[Any, str]]:
    return {
        "Module": (Plain(array), ".model.kernel"),
        "list": (Holder([Plain(array)]), ".model.parts[0].kernel"),
        "dict": ({"a": Plain(array)}, ".model.a.kernel"),
        "nested": (Holder([Holder([Plain(array)])]), ".model.parts[0].parts[0].kernel"),
    }


USES: dict[str, tuple[Callable[[Any], Any], type[Exception]]] = {
    "grad": (sx.grad(_loss), TransformError),
    "value_and_grad": (lambda model: sx.value_and_grad(_loss)(model)[1], TransformError),
    "grad in jit": (sx.jit(sx.grad(_loss)), TransformError),
    "vjp": (lambda model: sx.vjp(_loss, model)[1](1.0)[0], TransformError),
}


@pytest.mark.parametrize("kind", ["Module", "list", "dict", "nested"])
@pytest.mark.parametrize("use", USES)
def test_gradients_name_arrays_that_are_no_params(use: str, kind: str) -> None:
    call, error = USES[use]
    model, path = _models(jnp.ones(2))[kind]
    with pytest.raises(error, match="has no Variable that the filter Param matches") as caught:
        call(model)
    text = str(caught.value)
    assert f"Plain arrays ({path}) are no parameters" in text
    part = _plain(model)
    names = {"array": part.kernel, "sx": sx}
    part.kernel = run_advice(caught.value, "sx.Param(array)", names)
    (gradient,) = jax.tree.leaves(call(model))
    np.testing.assert_array_equal(gradient, [3, 3])


@pytest.mark.parametrize(
    "make",
    [lambda model: sx.train.Optimizer(model, optax.sgd(1.0)), lambda model: sx.train.EMA(model)],
    ids=["Optimizer", "EMA"],
)
def test_training_names_arrays_that_are_no_params(make: Callable[[Any], Any]) -> None:
    chosen = {"EMA": sx.train.EMA, "decay": 0.5, "Optimizer": sx.train.Optimizer}
    chosen |= {"tx": optax.sgd(1.0), "filter": sx.BatchStat}
    chosen["model"] = Holder([sx.BatchStat(jnp.ones(2))])
    model = Plain(np.ones(2, np.float32))
    with pytest.raises(TrainError, match=r"Plain arrays \(\.kernel\) are no") as caught:
        make(model)
    averages = "EMA(" in str(caught.value)
    code = "EMA(model, decay, wrt=filter)" if averages else "Optimizer(model, tx, wrt=filter)"
    run_advice(caught.value, code, chosen)
    names = {"array": model.kernel, "sx": sx}
    model.kernel = run_advice(caught.value, "sx.Param(array)", names)
    make(model)


def test_models_without_arrays_have_no_such_hint() -> None:
    with pytest.raises(TransformError) as caught:
        sx.grad(lambda model: 1.0)(Holder([]))
    assert "Plain arrays" not in str(caught.value) and "`wrt=filter`" in str(caught.value)
    counts, names = sx.BatchStat(jnp.ones(2)), {"sx": sx, "filter": sx.BatchStat}
    chosen = run_advice(caught.value, "argnums=sx.DiffState(0, filter)", names)
    gradient = sx.grad(lambda v: (v.value**2).sum(), argnums=names["argnums"])(counts)
    assert chosen is None
    np.testing.assert_array_equal(gradient, [2, 2])
    assert run_advice(caught.value, "wrt=filter", names) is None
    gradient = sx.grad(lambda v: (v.value**2).sum(), wrt=names["wrt"])(counts)
    np.testing.assert_array_equal(gradient, [2, 2])
