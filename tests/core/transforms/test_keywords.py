# SPDX-License-Identifier: Apache-2.0
"""Calls by name: an argument means the same by its name as by its position."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import pytest

import shardax as sx
from shardax.errors import PrefixError, TransformError
from tests.core.transforms.examples import Scale, values

XS = jnp.arange(6.0).reshape(3, 2)
BY_TYPE = sx.StateAxes({sx.Param: 0, ...: None})


def _call(model: Any, x: Any, factor: Any = 1.0, *, shift: Any = 0.0) -> Any:
    return model.factor * x * factor + shift


def _carry(model: Any, x: Any, factor: Any = 1.0) -> Any:
    model.factor += x
    return model, model.factor * factor


def _batched() -> Scale:
    model = Scale()
    model.factor.value = XS + 1
    return model


def _loss(x: Any, model: Any, factor: Any = 2.0, power: Any = 2) -> Any:
    return (model.factor * x * factor).sum() ** power


CALLS: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "vmap": (
        lambda: sx.vmap(_call, in_axes=(BY_TYPE, None))(_batched(), jnp.ones(2)),
        lambda: sx.vmap(_call, in_axes=(BY_TYPE, None))(x=jnp.ones(2), model=_batched()),
    ),
    "vmap, some": (
        lambda: sx.vmap(_call, in_axes=(None, 1))(Scale(3), XS),
        lambda: sx.vmap(_call, in_axes=(None, 1))(Scale(3), x=XS),
    ),
    "vmap, one entry for all": (
        lambda: sx.vmap(lambda x, y: x - y, in_axes=1)(XS, 2 * XS),
        lambda: sx.vmap(lambda x, y: x - y, in_axes=1)(y=2 * XS, x=XS),
    ),
    "vmap, after a gap": (
        lambda: sx.vmap(lambda x, y=2.0, z=1.0: x * y * z, in_axes=(0, None, 1))(XS, 2.0, XS.T),
        lambda: sx.vmap(lambda x, y=2.0, z=1.0: x * y * z, in_axes=(0, None, 1))(XS, z=XS.T),
    ),
    "vmap, without an entry": (
        lambda: sx.vmap(_call, in_axes=(None, None, 0))(Scale(), jnp.ones(2), XS[:, 0]),
        lambda: sx.vmap(_call, in_axes=(None, None))(Scale(), jnp.ones(2), factor=XS[:, 0]),
    ),
    "scan": (
        lambda: sx.scan(_carry)(Scale(), XS)[1],
        lambda: sx.scan(_carry)(x=XS, model=Scale())[1],
    ),
    "scan, along another axis": (
        lambda: sx.scan(_carry, in_axes=(sx.Carry, 1))(Scale(3), XS)[1],
        lambda: sx.scan(_carry, in_axes=(sx.Carry, 1))(Scale(3), x=XS)[1],
    ),
    "grad": (
        lambda: sx.grad(_loss, argnums=1)(jnp.ones(2), Scale())["factor"],
        lambda: sx.grad(_loss, argnums=1)(model=Scale(), x=jnp.ones(2))["factor"],
    ),
    "grad, after a gap": (
        lambda: sx.grad(_loss, argnums=3)(jnp.ones(2), Scale(), 2.0, 3.0),
        lambda: sx.grad(_loss, argnums=3)(jnp.ones(2), power=3.0, model=Scale()),
    ),
    "value_and_grad": (
        lambda: sx.value_and_grad(_loss, argnums=-1)(jnp.ones(2), Scale())[1]["factor"],
        lambda: sx.value_and_grad(_loss, argnums=-1)(jnp.ones(2), model=Scale())[1]["factor"],
    ),
    "cond": (
        lambda: sx.cond(True, lambda m, x: m(x), lambda m, x: x, Scale(), XS[1]),
        lambda: sx.cond(
            pred=True, true_fun=lambda m, x: m(x), false_fun=lambda x, m: x, x=XS[1], m=Scale()
        ),
    ),
    "switch": (
        lambda: sx.switch(1, [lambda m, x: x, lambda m, x: m(x)], Scale(), XS[1]),
        lambda: sx.switch(1, branches=[lambda m, x: x, lambda x, m: m(x)], x=XS[1], m=Scale()),
    ),
    "while_loop": (
        lambda: sx.while_loop(lambda x: x.sum() < 100, lambda x: 2 * x, XS),
        lambda: sx.while_loop(
            cond_fun=lambda x: x.sum() < 100, body_fun=lambda x: 2 * x, init_val=XS
        ),
    ),
    "fori_loop": (
        lambda: sx.fori_loop(0, 3, lambda i, x: x + i, XS),
        lambda: sx.fori_loop(lower=0, upper=3, body_fun=lambda i, x: x + i, init_val=XS),
    ),
}


@pytest.mark.parametrize(("by_position", "by_name"), CALLS.values(), ids=CALLS.keys())
def test_keyword_arguments_equal_positional_ones(
    by_position: Callable[[], Any], by_name: Callable[[], Any]
) -> None:
    expected = by_position()
    assert by_name().tolist() == expected.tolist()
    assert sx.jit(by_name)().tolist() == expected.tolist()


def test_module_passed_by_name_is_written() -> None:
    def step(model: Scale, x: Any) -> Any:
        return model(x).sum()

    model = Scale()
    sx.grad(step)(x=jnp.ones(2), model=model)
    sx.cond(True, lambda model: model.grow(1.0), lambda model: None, model=model)
    sx.scan(_carry)(model=model, x=XS)
    assert values(model) == {("factor",): [8.0, 11.0], ("calls",): 1}


def test_keyword_only_arguments_have_no_position() -> None:
    with pytest.raises(TransformError, match=r"argnums=3 is out of range: .* by name"):
        sx.grad(lambda model, x, *, w: (x * w).sum(), argnums=3)(Scale(), XS, w=1.0)
    with pytest.raises(PrefixError, match="in_axes has 3 entries"):
        sx.vmap(lambda x, y, *, z: x, in_axes=(0, 0, 0))(XS, XS, z=XS)
    with pytest.raises(TransformError, match=r"\.z"):
        sx.vmap(lambda x, *, z: x, in_axes=None)(XS, z=1.0)
