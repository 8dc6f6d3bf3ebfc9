# SPDX-License-Identifier: Apache-2.0
"""Options that a transform does not take are refused, with those that it takes."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import Mesh, PartitionSpec

import shardax as sx
from shardax.errors import TransformError
from tests.advice import run_advice

P = PartitionSpec
X = jnp.arange(8.0)


def _square(x: Any) -> Any:
    return x * x


# Transforms that make a function, or a decorator where none is given.
DECORATORS: dict[str, Callable[..., Any]] = {
    "jit": sx.jit,
    "grad": sx.grad,
    "value_and_grad": sx.value_and_grad,
    "vjp": sx.vjp,
    "jvp": sx.jvp,
    "jacfwd": sx.jacfwd,
    "jacrev": sx.jacrev,
    "hessian": sx.hessian,
    "vmap": sx.vmap,
    "scan": sx.scan,
    "shard_map": sx.shard_map,
    "remat": sx.remat,
    "custom_vjp": sx.custom_vjp,
    "custom_jvp": sx.custom_jvp,
    "checkify": sx.checkify,
    "make_jaxpr": sx.make_jaxpr,
}

# The others, called with all that they need and one option more.
CALLS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "while_loop": (sx.while_loop, lambda **o: sx.while_loop(lambda x: x < 3, _square, 2, **o)),
    "fori_loop": (sx.fori_loop, lambda **o: sx.fori_loop(0, 2, lambda i, x: x, 2, **o)),
    "bounded_while_loop": (
        sx.bounded_while_loop,
        lambda **o: sx.bounded_while_loop(lambda x: x < 3, _square, 2, max_steps=3, **o),
    ),
    "safe_where": (
        sx.safe_where,
        lambda **o: sx.safe_where(X > 0, jnp.log, X, otherwise=0.0, stand_in=1.0, **o),
    ),
    "capture": (sx.capture, lambda **o: sx.capture(_square, sx.Intermediate, **o)),
    "Remat": (sx.Remat.__init__, lambda **o: sx.Remat(_layer(), **o)),
    "Jitted": (sx.jit, lambda **o: sx.Jitted(_layer(), **o)),
}


def _layer() -> Any:
    return sx.nn.Linear(8, 8, rngs=sx.Rngs(0))


def _options(transform: Callable[..., Any]) -> list[str]:
    parameters = inspect.signature(transform).parameters.values()
    return [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]


@pytest.mark.parametrize("name", DECORATORS)
def test_decorator_lists_its_options_where_it_is_given_an_unknown_one(name: str) -> None:
    transform = DECORATORS[name]
    calls: list[Callable[[], Any]] = [
        lambda: transform(_square, unknown=1),
        lambda: transform(unknown=1),
    ]
    for call in calls:
        with pytest.raises(TransformError, match=rf"sx\.{name} .* unknown ") as caught:
            call()
        assert [option for option in _options(transform) if option not in str(caught.value)] == []


@pytest.mark.parametrize("name", CALLS)
def test_call_lists_its_options_where_it_is_given_an_unknown_one(name: str) -> None:
    transform, call = CALLS[name]
    with pytest.raises(TransformError, match=rf"sx\.{name} .* unknown ") as caught:
        call(unknown=[1])
    assert [option for option in _options(transform) if option not in str(caught.value)] == []


def test_cond_gives_names_to_its_branches() -> None:
    def branch(x: Any, *, scale: Any) -> Any:
        return x * scale

    assert float(sx.cond(True, branch, branch, 2.0, scale=3.0)) == 6.0
    with pytest.raises(TypeError, match="unknown"):
        sx.cond(True, branch, branch, 2.0, scale=3.0, unknown=1)


@pytest.mark.parametrize("makes", [sx.jit, lambda f, **o: sx.jit(**o)(f), sx.Jitted])
def test_jit_names_what_replaces_device(makes: Any) -> None:
    device = jax.devices()[1]
    with pytest.raises(TransformError) as caught:
        makes(_layer() if makes is sx.Jitted else _square, device=device)

    names: dict[str, Any] = {"sx": sx, "jax": jax, "f": lambda x: x + 1, "device": device, "x": X}
    code = "sx.jit(f, in_shardings=jax.sharding.SingleDeviceSharding(device))"
    assert run_advice(caught.value, code, names)(1.0).device == device
    assert run_advice(caught.value, "jax.device_put(x, device)", names).device == device
    names["body"] = sx.jit(lambda: jnp.zeros(3))
    made = run_advice(caught.value, "with jax.default_device(device): ...", names)
    assert made.device == device


def test_jit_names_what_replaces_backend() -> None:
    with pytest.raises(TransformError) as caught:
        sx.jit(_square, backend="cpu")  # pyright: ignore[reportCallIssue]
    names = {"jax": jax, "backend": "cpu", "x": X}
    placed = run_advice(caught.value, "jax.device_put(x, jax.devices(backend)[0])", names)
    assert sx.jit(_square)(placed).device == jax.devices("cpu")[0]


def test_shard_map_names_what_replaces_check_rep_and_auto(auto_mesh: Mesh) -> None:
    specs: dict[str, Any] = {"mesh": auto_mesh, "in_specs": P("data"), "out_specs": P("data")}
    older: dict[str, Any] = {"check_rep": False, "auto": frozenset({"model"})}
    with pytest.raises(TransformError, match="check_vma") as caught:
        sx.shard_map(_square, **specs, **older)

    names: dict[str, Any] = {}
    run_advice(caught.value, "axis_names={'data'}", names)
    run = sx.jit(sx.shard_map(_square, **specs, check_vma=True, axis_names=names["axis_names"]))
    assert run(X).tolist() == (X * X).tolist()
