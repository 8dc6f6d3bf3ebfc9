# SPDX-License-Identifier: Apache-2.0
"""What ``functools.wraps`` writes onto a wrapper is shown, and changes nothing that it runs."""

from __future__ import annotations

import copy
import functools
import pickle
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

import shardax as sx

P = PartitionSpec
X = jnp.array([3.0, 4.0])


def square(x: Any) -> Any:
    return (x * x).sum()


def other(x: Any, y: Any = None) -> Any:
    """Another function, with attributes that have the names of ours."""
    return 100 + x


# Not "body": the attributes of a Module are its data, also those of ``Jitted`` and ``Remat``.
for _name in ("function", "options", "memory", "rule", "fwd", "bwd", "out", "executor"):
    setattr(other, _name, None)
sx.jit(other)  # leaves its programs as an attribute


def _square_rule(primals: Any, tangents: Any) -> Any:
    return square(primals[0]), 2 * (primals[0] * tangents[0]).sum()


def _custom_vjp(function: Any) -> Any:
    made = sx.custom_vjp(function)
    made.defvjp(lambda x: (function(x), x), lambda x, ct: (2 * x * ct,))
    return made


def _custom_jvp(function: Any) -> Any:
    made = sx.custom_jvp(function)
    made.defjvp(_square_rule)
    return made


def _bound(function: Any) -> Any:
    class Owner(sx.Module):
        @sx.jit
        def apply(self, x: Any) -> Any:
            return function(x)

    return Owner().apply


class Caller(sx.Module):
    """A Module that calls a function."""

    def __init__(self, function: Any) -> None:
        self.function = function

    def __call__(self, x: Any) -> Any:
        return self.function(x)


def _sow(model: Any, x: Any) -> Any:
    return model(x)


def _shard_map(function: Any) -> Any:
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    return sx.shard_map(
        lambda x: function(x)[None], mesh=mesh, in_specs=P("data"), out_specs=P("data")
    )


class Kind(NamedTuple):
    """A kind of wrapper."""

    make: Callable[[Any], Any]
    call: Callable[[Any], Any] = lambda wrapper: wrapper(X)


KINDS = {
    "jit": Kind(sx.jit),
    "bound jit": Kind(_bound),
    "vmap": Kind(sx.vmap),
    "grad": Kind(sx.grad),
    "value_and_grad": Kind(sx.value_and_grad),
    "vjp": Kind(sx.vjp, lambda wrapper: wrapper(X)[0]),
    "jvp": Kind(sx.jvp, lambda wrapper: wrapper((X,), (X,))),
    "jacfwd": Kind(sx.jacfwd),
    "jacrev": Kind(sx.jacrev),
    "hessian": Kind(sx.hessian),
    "scan": Kind(lambda f: sx.scan(lambda c, x: (c + f(x), c)), lambda wrapper: wrapper(0.0, X)),
    "remat": Kind(sx.remat),
    "shard_map": Kind(_shard_map),
    "custom_vjp": Kind(_custom_vjp, lambda wrapper: (wrapper(X), sx.grad(wrapper)(X))),
    "custom_jvp": Kind(_custom_jvp, lambda wrapper: (wrapper(X), sx.grad(wrapper)(X))),
    "checkify": Kind(sx.checkify, lambda wrapper: wrapper(X)[1]),
    "make_jaxpr": Kind(sx.make_jaxpr, lambda wrapper: str(wrapper(X))),
    "capture": Kind(
        lambda f: sx.capture(lambda model, x: f(x)), lambda wrapper: wrapper(Caller(None), X)
    ),
    "axis_rules": Kind(sx.axis_rules({})),
    "with_rngs": Kind(sx.with_rngs(split=2)),
    "host_function": Kind(
        lambda f: sx.host.host_function(
            lambda x: np.float32(f(x)), out=jax.ShapeDtypeStruct((), "float32")
        )
    ),
    "remote": Kind(lambda f: sx.host.remote(f, executor=ThreadPoolExecutor(1))),
    "Jitted": Kind(lambda f: sx.Jitted(Caller(f))),
    "Remat": Kind(lambda f: sx.Remat(Caller(f))),
}


def _same(first: Any, second: Any) -> bool:
    if isinstance(first, str):
        return first == second
    return jax.tree.all(jax.tree.map(lambda a, b: bool(jnp.array_equal(a, b)), first, second))


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS.keys())
def test_wrapper_with_metadata_of_another_runs_its_own_function(kind: Kind) -> None:
    expected = kind.call(kind.make(square))

    wrapper = kind.make(square)
    shown = functools.wraps(other)(wrapper)
    assert shown is wrapper
    assert (shown.__wrapped__, shown.__name__, shown.__doc__) == (other, "other", other.__doc__)
    assert _same(kind.call(shown), expected)
    assert _same(kind.call(shown), expected)

    # Inside of a compiled function, too.
    if not isinstance(expected, str):
        assert _same(sx.jit(lambda: kind.call(shown))(), expected)


_WITHOUT_MODULES = {name: KINDS[name] for name in KINDS if name not in ("Jitted", "Remat")}


@pytest.mark.parametrize("kind", _WITHOUT_MODULES.values(), ids=_WITHOUT_MODULES.keys())
def test_wrapper_with_attributes_of_every_other_runs_its_own_function(kind: Kind) -> None:
    expected = kind.call(kind.make(square))
    wrapper = kind.make(square)
    for another in KINDS.values():
        functools.update_wrapper(wrapper, another.make(other))
    assert _same(kind.call(wrapper), expected)
    assert _same(kind.call(wrapper), expected)


@pytest.mark.parametrize("name", ["jit", "custom_vjp", "custom_jvp"])
@pytest.mark.parametrize(
    "copied", [copy.copy, copy.deepcopy, lambda w: pickle.loads(pickle.dumps(w))]
)
def test_copy_of_wrapper_runs_its_own_function(name: str, copied: Any) -> None:
    kind = KINDS[name]
    if name == "custom_vjp":
        made = sx.custom_vjp(square)
        made.defvjp(_forward, _backward)
    else:
        made = kind.make(square)
    expected = kind.call(made)
    again = copied(functools.wraps(other)(made))
    assert type(again) is type(made)
    assert _same(kind.call(again), expected)


def _forward(x: Any) -> Any:
    return square(x), x


def _backward(x: Any, ct: Any) -> Any:
    return (2 * x * ct,)


def test_clone_of_model_holds_wrapper_of_its_own() -> None:
    class Counter(sx.Module):
        def __init__(self) -> None:
            self.count = sx.Variable(jnp.zeros(()))
            self.step = functools.wraps(other)(sx.jit(self.add))

        def add(self, by: Any) -> Any:
            self.count += by
            return self.count * 1

    model = Counter()
    clone = sx.clone(model)
    assert float(clone.step(2.0)) == 2.0
    assert (float(model.count), float(clone.count)) == (0.0, 2.0)


@pytest.mark.filterwarnings("ignore::shardax.errors.UncertainCaptureWarning")
@pytest.mark.parametrize("make", [sx.jit, sx.remat, sx.vmap, sx.grad, _custom_vjp])
def test_compiled_function_follows_what_wrapped_function_reads(make: Any) -> None:
    held = {"scale": sx.Variable(jnp.float32(2.0))}

    def scaled(x: Any) -> Any:
        return (x * held["scale"]).sum()

    plain, shown = make(scaled), functools.wraps(other)(make(scaled))
    run, run_shown = sx.jit(lambda x: plain(x)), sx.jit(shown)
    assert _same(run_shown(X), run(X))
    held["scale"] = sx.Variable(jnp.float32(5.0))
    assert _same(run_shown(X), run(X))
    assert not _same(run_shown(X), make(square)(X))
