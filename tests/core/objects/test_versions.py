# SPDX-License-Identifier: Apache-2.0
"""Which versions of JAX shardax imports with, and what holds on each of them."""

from __future__ import annotations

import inspect
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import shardax as sx
from shardax._core import _jax
from shardax.errors import ModuleError

WITH_VERSION = """
import jax
jax.__version_info__ = {version}
{broken}
import shardax
"""


def importing(version: tuple[int, ...], broken: str = "") -> subprocess.CompletedProcess[str]:
    """Imports shardax in a process in which JAX says that it is of a version."""
    program = WITH_VERSION.format(version=version, broken=broken)
    command = [sys.executable, "-W", "default", "-c", program]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_too_old_jax_is_refused_with_update_command() -> None:
    # An older version also lacks names that other modules import.
    done = importing((0, 9, 2), broken="del jax.sharding.AxisType")
    assert done.stderr.splitlines()[-1] == (
        "ImportError: shardax needs JAX 0.10 or newer, and JAX 0.9.2 is installed. "
        "Update it: pip install --upgrade 'jax>=0.10'."
    )


def test_untested_newer_jax_warns_once_and_works() -> None:
    done = importing((0, 13, 0))
    assert done.returncode == 0
    assert done.stderr.count("JAX 0.13.0 is newer than the versions that shardax is tested") == 1
    assert "pip install 'jax<0.13'" in done.stderr


def test_tested_jax_says_nothing() -> None:
    assert _jax.OLDEST <= jax.__version_info__[:2] <= _jax.NEWEST
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for minor in range(_jax.OLDEST[1], _jax.NEWEST[1] + 1):
            _jax.check_version((0, minor, 99))


@pytest.mark.parametrize("version", [(0, 4, 38), (0, 9, 99)])
def test_check_version_refuses_every_version_below_the_bound(version: tuple[int, ...]) -> None:
    with pytest.raises(ImportError, match="shardax needs JAX"):
        _jax.check_version(version)


# --- what each entry promises, on every version ---------------------------------------------------


def inline() -> None:
    inner = jax.jit(lambda x, unused: x + 1, inline=_jax.INLINE)
    (equation,) = jax.make_jaxpr(lambda x, y: inner(x, y))(1.0, 2.0).eqns
    assert equation.primitive.name == "add"


def tracer() -> None:
    seen: list[Any] = []
    jax.make_jaxpr(seen.append)(1.0)
    assert isinstance(seen[0], _jax.Tracer) and not isinstance(jnp.ones(()), _jax.Tracer)


def literal() -> None:
    (equation,) = jax.make_jaxpr(lambda x: x + 1)(1.0).eqns
    assert [isinstance(each, _jax.Literal) for each in equation.invars] == [False, True]


def jaxpr_as_fun() -> None:
    weight = jnp.arange(3.0)
    program = jax.make_jaxpr(lambda x: (x * weight, x + 1))(jnp.ones(3))
    found = _jax.jaxpr_as_fun(program)(jnp.full(3, 2.0))
    assert [each.tolist() for each in found] == [[0.0, 2.0, 4.0], [3.0, 3.0, 3.0]]


def trace_state() -> None:
    states: list[Any] = []

    def note(x: Any) -> Any:
        states.extend(_jax.trace_state() for _ in range(2))
        return x

    for run in (jax.jit(note), jax.vmap(note), jax.grad(lambda x: note(x).sum())):
        run(jnp.ones(2))
    outside = _jax.trace_state()
    assert outside == _jax.trace_state() and outside not in states
    assert all(states[i] == states[i + 1] for i in (0, 2, 4))
    assert all(states[i] != states[j] for i, j in ((0, 2), (0, 4), (2, 4)))


def eager() -> None:
    _jax.eager.cache_clear()
    inside: list[Any] = []
    jax.make_jaxpr(lambda x: inside.extend((_jax.eager(), _jax.trace_state())))(1.0)
    assert _jax.trace_state() == _jax.eager() == inside[0] != inside[1]
    other: list[bool] = []
    thread = threading.Thread(target=lambda: other.append(_jax.trace_state() == _jax.eager()))
    thread.start()
    thread.join()
    assert other == [True]


def refused_argument() -> None:
    w = sx.Param(jnp.ones(2))
    told = f"is a Param(float32[2]), {_jax.ARRAYS_ONLY}"
    with pytest.raises(TypeError, match="exp") as caught:
        jax.lax.exp(w)  # pyright: ignore[reportArgumentType]
    assert f"The argument x of jax.lax.exp {told}" in str(caught.value.__cause__)
    with pytest.raises(sx.errors.ShardaxError) as refused:
        jax.typeof(w)
    assert f"of jax.typeof {told}" in str(refused.value)


def asks_from_c() -> None:
    printed: list[Any] = []  # by Python, where C++ meets an error that it does not expect
    before, sys.unraisablehook = sys.unraisablehook, printed.append
    try:
        with pytest.raises(TypeError):
            jax.lax.exp(sx.Param(jnp.ones(2)))  # pyright: ignore[reportArgumentType]
    finally:
        sys.unraisablehook = before
    assert printed == []


def rebuilds_arguments() -> None:
    def write(variable: Any) -> Any:
        variable.value = variable.value + 1
        return variable.value

    by_vjp, by_jvp = jax.custom_vjp(write), jax.custom_jvp(write)
    by_vjp.defvjp(lambda v: (write(v), None), lambda kept, given: (given,))
    by_jvp.defjvp(lambda given, tangents: (write(*given), tangents[0].value))
    for call in (by_vjp, by_jvp):
        with pytest.raises(ModuleError):
            call(sx.Param(jnp.ones(2)))
    assert write(jax.tree.map(jnp.negative, sx.Param(jnp.ones(2)))).tolist() == [0.0, 0.0]


def jaxprs() -> None:
    weight = jnp.arange(3.0)
    program = jax.make_jaxpr(
        lambda x: jax.lax.cond(x[0] > 0, jnp.sin, jax.jit(jnp.cos), x * weight)
    )
    opened = _jax.open_jaxpr(program(jnp.ones(3)))
    assert _jax.open_jaxpr(opened) is opened and len(opened.constvars) == 1
    (choice,) = [each for each in opened.eqns if each.primitive.name == "cond"]
    assert not any([*_jax.inner_jaxprs(each)] for each in opened.eqns if each is not choice)
    names = [[each.primitive.name for each in inner.eqns] for inner in _jax.inner_jaxprs(choice)]
    assert sorted(names) == [["jit"], ["sin"]]

    closed = program(jnp.ones(3))
    assert _jax.is_jaxpr(closed) and _jax.is_jaxpr(opened) and not _jax.is_jaxpr(choice)
    x, others = jnp.ones(3), jnp.array([2.0, 3.0, 4.0])
    inputs = _jax.with_constants_as_inputs(closed)
    assert (len(inputs.constvars), len(inputs.invars)) == (0, 2)
    assert _jax.evaluate(inputs, [others, x])[0].tolist() == jnp.sin(x * others).tolist()
    without = _jax.with_constants_as_inputs(jax.make_jaxpr(jnp.sin)(1.0))
    assert _jax.with_constants_as_inputs(without) is without
    again = _jax.with_inner(closed, opened.replace(eqns=list(opened.eqns)))
    assert jax.extend.core.jaxpr_as_fun(again)(x)[0].tolist() == jnp.sin(x * weight).tolist()


def never_changes_closures() -> None:
    policies = jax.checkpoint_policies
    saved = [policies.save_only_these_names("a", "b"), policies.save_only_these_names("b", "a")]
    for same in (
        saved,
        [policies.save_any_names_but_these("a") for _ in range(2)],
        [policies.save_from_both_policies(each, policies.dots_saveable) for each in saved],
    ):
        traced: list[int] = []

        @sx.jit
        def run(layer: Any, x: Any, traced: list[int] = traced) -> Any:
            traced.append(1)
            return layer(x)

        layers = [sx.Remat(sx.nn.Linear(2, 2, rngs=sx.Rngs(0)), policy=each) for each in same]
        assert sx.graphdef(layers[0]) == sx.graphdef(layers[1])
        for layer in layers:
            run(layer, jnp.ones(2))
        assert traced == [1]
    other = policies.save_only_these_names("a")
    assert len({sx.graphdef(sx.Remat(sx.Rngs(0), policy=each)) for each in (*saved, other)}) == 2
    assert not _jax.never_changes_closures(never_changes_closures)


def jit_options() -> None:
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    place = jax.NamedSharding(mesh, P("data"))
    given = {
        "static_argnums": (1,),
        "static_argnames": ("mode",),
        "donate_argnums": (0,),
        "keep_unused": True,
        "in_shardings": (place, None),
        "out_shardings": {"y": place},
        "compiler_options": {"xla_embed_ir_in_executable": True},
    }
    function = jax.jit(lambda x, mode, z: {"y": x}, **given)
    assert _jax.jit_options(function) == given | {"donate_argnames": ("x",)}
    assert _jax.jit_options(jax.jit(jnp.sin)) == {}
    with pytest.raises(TypeError, match="does not tell"):
        _jax.jit_options(print)


def varying_axes() -> None:
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    seen: list[Any] = []

    def look(x: Any, y: Any) -> Any:
        seen.extend(map(_jax.varying_axes, (x, y, x.sum() + y, jnp.ones(2), 1.0)))
        return x

    specs = {"in_specs": (P("data"), P(None, "model")), "out_specs": P("data")}
    jax.eval_shape(jax.shard_map(look, mesh=mesh, **specs), *[jnp.ones((8, 8))] * 2)
    assert seen == [{"data"}, {"model"}, {"data", "model"}, frozenset(), frozenset()]


def policies_within_regions() -> None:
    everything = jax.checkpoint_policies.everything_saveable
    assert _jax.outside_inner_regions(everything) is everything
    assert _jax.outside_inner_regions(None) is None
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    asked: set[str] = set()

    def keeps(primitive: Any, *_: Any, **__: Any) -> bool:
        asked.add(primitive.name)
        return True

    def region(x: Any) -> Any:
        inner = jax.shard_map(
            jnp.tanh, in_specs=P("model"), out_specs=P("model"), axis_names={"model"}
        )
        # JAX differentiates no region within another one.
        function = jax.custom_vjp(inner)
        function.defvjp(lambda x: (y := inner(x), y), lambda y, given: ((1 - y**2) * given,))
        policy = _jax.outside_inner_regions(keeps)
        assert policy is _jax.outside_inner_regions(keeps)
        return jax.checkpoint(lambda x: jnp.exp(function(x)), policy=policy)(x)

    outer = jax.shard_map(
        region, mesh=mesh, in_specs=P("data"), out_specs=P("data"), axis_names={"data"}
    )
    x = jnp.arange(8.0)
    gradient = jax.jit(jax.grad(lambda x: outer(x).sum()))(x)
    assert jnp.allclose(gradient, jnp.exp(jnp.tanh(x)) * (1 - jnp.tanh(x) ** 2), atol=1e-5)
    assert "exp" in asked and "tanh" not in asked


def random_keys() -> None:
    keys = jax.random.split(jax.random.key(0), 2)
    stand_in = jax.eval_shape(lambda: keys)
    assert all(map(_jax.is_prng_key, (keys, keys[0], stand_in)))
    no_keys = jax.random.key_data(keys), jnp.ones(2), 3, None, "key"
    assert not any(map(_jax.is_prng_key, no_keys))


def sharding_type_errors() -> None:
    explicit = (jax.sharding.AxisType.Explicit,)
    mesh = jax.make_mesh((2,), ("data",), axis_types=explicit)
    sharding = jax.NamedSharding(mesh, jax.P(None, "data"))
    x = jax.device_put(jnp.ones((2, 2)), sharding)
    with pytest.raises(Exception, match="sharding") as caught:
        x @ x.T
    assert _jax.is_sharding_type_error(caught.value)
    assert not _jax.is_sharding_type_error(TypeError("sharding"))


PROMISES: dict[str, Callable[[], None]] = {
    "INLINE": inline,
    "is_prng_key": random_keys,
    "Tracer": tracer,
    "Literal": literal,
    "jaxpr_as_fun": jaxpr_as_fun,
    "trace_state": trace_state,
    "eager": eager,
    "is_sharding_type_error": sharding_type_errors,
    "refused_argument": refused_argument,
    "ARRAYS_ONLY": refused_argument,
    "asks_from_c": asks_from_c,
    "rebuilds_arguments": rebuilds_arguments,
    "open_jaxpr": jaxprs,
    "inner_jaxprs": jaxprs,
    "is_jaxpr": jaxprs,
    "with_constants_as_inputs": jaxprs,
    "with_inner": jaxprs,
    "evaluate": jaxprs,
    "never_changes_closures": never_changes_closures,
    "jit_options": jit_options,
    "varying_axes": varying_axes,
    "outside_inner_regions": policies_within_regions,
    "_outside_regions_within": policies_within_regions,
}


@pytest.mark.parametrize("promise", dict.fromkeys(PROMISES.values()), ids=lambda f: f.__name__)
def test_jax_entry_keeps_its_promise_on_this_version(promise: Callable[[], None]) -> None:
    promise()


def test_jax_entries_all_promise_something() -> None:
    # What is no function of the module, or is none any more once it was used.
    other = {"INLINE", "ARRAYS_ONLY", "Tracer", "Literal", "jaxpr_as_fun", "trace_state"}
    own = {
        name
        for name, item in vars(_jax).items()
        if inspect.isfunction(inspect.unwrap(item)) and item.__module__ == _jax.__name__
    }
    # check_version has tests of its own; __getattr__ imports two of the others on first use.
    assert PROMISES.keys() == (own | other) - {"check_version", "__getattr__"}
