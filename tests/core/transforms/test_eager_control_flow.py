# SPDX-License-Identifier: Apache-2.0
"""Eager loops and branches are compiled once for equal functions, and are never stale."""

from __future__ import annotations

import functools
import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

import shardax as sx
from tests.values import with_values

X = np.arange(8, dtype=np.float32).reshape(2, 4) / 8
TRUE = jnp.array(True)
MESH = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])


class Layer(sx.Module):
    """A layer that counts its calls."""

    def __init__(self) -> None:
        self.scale = sx.Param(jnp.float32(2))
        self.calls = sx.Variable(jnp.int32(0))

    def __call__(self, x: Any) -> Any:
        self.calls += 1
        return x * self.scale


def twice(x: Any) -> Any:
    return 2 * x


def same(x: Any) -> Any:
    return x


def scanned(layer: Any, x: Any) -> Any:
    return sx.scan(lambda carry, row: (carry, carry(row)))(layer, x)[1]


def rule() -> Any:
    product = sx.custom_vjp(lambda layer, x: layer(x))
    product.defvjp(lambda layer, x: (layer(x), x), lambda x, given: (None, given))
    return product


# (x, layer) to a result; functions anew at each call, closures over ``layer`` in some.
CALLS: dict[str, Callable[[Any, Layer], Any]] = {
    "cond of arrays": lambda x, layer: sx.cond(TRUE, twice, same, x),
    "cond": lambda x, layer: sx.cond(TRUE, lambda m, x: m(x), lambda m, x: x, layer, x),
    "cond by name": lambda x, layer: sx.cond(TRUE, lambda m, x: m(x), lambda m, x: x, m=layer, x=x),
    "cond, captured": lambda x, layer: sx.cond(TRUE, lambda x: layer(x), lambda x: x, x),
    "cond, bound": lambda x, layer: sx.cond(TRUE, layer, same, x),
    "switch": lambda x, layer: sx.switch(1, [lambda m, x: x, lambda m, x: m(x)], layer, x),
    "while_loop": lambda x, layer: sx.while_loop(
        lambda c: c[1] < 3, lambda c: (c[0], c[1] + 1, c[0](c[2])), (layer, 0, x)
    )[2],
    "fori_loop": lambda x, layer: sx.fori_loop(0, 3, lambda i, c: (c[0], c[0](c[1])), (layer, x))[
        1
    ],
    "fori_loop, captured": lambda x, layer: sx.fori_loop(0, 3, lambda i, x: layer(x), x),
    "bounded_while_loop": lambda x, layer: sx.bounded_while_loop(
        lambda c: c[1] < 3, lambda c: (c[0], c[1] + 1, c[0](c[2])), (layer, 0, x), max_steps=5
    ).final[2],
    "scan": lambda x, layer: scanned(layer, x),
    "scan, captured": lambda x, layer: sx.scan(lambda _, row: (None, layer(row)))(None, x)[1],
    "remat": lambda x, layer: sx.remat(lambda m, x: m(x))(layer, x),
    "shard_map": lambda x, layer: sx.shard_map(
        lambda m, x: m(x),
        mesh=MESH,
        in_specs=(PartitionSpec(), PartitionSpec("data")),
        out_specs=PartitionSpec("data"),
    )(layer, x),
    "custom_vjp": lambda x, layer: rule()(layer, x),
    "vmap inside": lambda x, layer: sx.cond(TRUE, sx.vmap(lambda row: row * layer.scale), same, x),
}


@pytest.mark.parametrize("name", CALLS)
def test_third_call_compiles_nothing(name: str, compilations: Callable[[], int]) -> None:
    x, layers = jnp.asarray(X), [Layer() for _ in range(4)]
    expected = np.asarray(CALLS[name](x, layers[0])), int(layers[0].calls)
    CALLS[name](x, layers[1])
    for layer in layers[1:3]:
        layer.calls.value = jnp.int32(0)
    jnp.asarray(0) + 1
    compilations()
    for layer in layers[2:]:  # new objects of one structure
        result = CALLS[name](x, layer)
        if name != "shard_map":  # which moves a new model to the mesh
            assert compilations() == 0
        np.testing.assert_array_equal(result, expected[0])
        assert int(layer.calls) == expected[1]
    CALLS[name](x, layer)
    before = int(layer.calls)
    compilations()
    CALLS[name](x, layer)
    assert compilations() == 0
    assert int(layer.calls) == before + expected[1]


# --- never stale ----------------------------------------------------------------------------------

SCALE: Any = 1.0


def by_global(x: Any) -> Any:
    return x * SCALE


def helper(x: Any) -> Any:
    return by_global(x) + 1


class Options:
    """An ordinary object."""

    def __init__(self, scale: float) -> None:
        self.scale = scale

    def apply(self, x: Any) -> Any:
        return x * self.scale


def test_global_bound_again_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    results = []
    for scale in (1.0, 1.0, 1.0, 3.0, 3.0, 3.0, True, np.float32(2)):
        monkeypatch.setattr(f"{__name__}.SCALE", scale)
        # Functions made anew: of one function JAX remembers the trace, and so does shardax.
        made = [lambda x, f=f: f(x) for f in (by_global, helper)]
        results.append([float(sx.cond(TRUE, f, same, 2.0)) for f in made])
    assert results == [[2.0, 3.0]] * 3 + [[6.0, 7.0]] * 3 + [[2.0, 3.0], [4.0, 5.0]]


@pytest.mark.parametrize(
    ("start", "change"),
    [
        ([1.0], lambda held: held.append(2.0)),
        ({"a": 1.0}, lambda held: held.update(a=3.0)),
        ({"a": {"b": [1.0]}}, lambda held: held["a"]["b"].append(3.0)),
        (Options(1.0), lambda held: setattr(held, "scale", 3.0)),
        ([jnp.ones(3)], lambda held: held.append(jnp.ones(2))),
    ],
    ids=["list", "dict", "nested", "object", "JAX array"],
)
def test_eager_cond_sees_changes_of_what_a_closure_holds(
    start: Any, change: Callable[[Any], None]
) -> None:
    def total(held: Any) -> Any:
        held = vars(held) if isinstance(held, Options) else held
        return sum(jnp.sum(leaf) for leaf in jax.tree.leaves(held))

    def call() -> float:
        return float(sx.cond(TRUE, lambda x: x + total(start), same, 1.0))

    first = float(total(start))
    assert [call() for _ in range(3)] == [1 + first] * 3
    change(start)
    second = float(total(start))
    assert second != first
    assert [call() for _ in range(3)] == [1 + second] * 3


def test_name_bound_again_is_seen_by_a_function_made_anew() -> None:
    results = []
    for scale in (2.0, 2.0, 2.0, 3, 3, 3, jnp.float32(4), jnp.float32(5)):

        def body(i: Any, x: Any, scale: Any = scale) -> Any:
            return x * scale

        results.append(float(sx.fori_loop(0, 2, body, 1.0)))
    assert results == [4.0] * 3 + [9.0] * 3 + [16.0, 25.0]


def test_eager_fori_loop_reads_settings_when_traced_as_in_jax() -> None:
    settings = {"scale": 2.0}

    def body(i: Any, x: Any) -> Any:
        return x * settings["scale"]

    def results(loop: Any) -> list[Any]:
        settings["scale"] = 2.0
        first = float(loop(0, 1, body, jnp.float32(1)))
        settings["scale"] = 3.0
        return [first, float(loop(0, 1, body, jnp.float32(1))), loop(0, 1, body, X[0]).tolist()]

    assert results(sx.fori_loop) == results(jax.lax.fori_loop) == [2.0, 2.0, (3 * X[0]).tolist()]


def test_methods_of_changing_objects_are_not_stale() -> None:
    options = Options(2.0)
    results = []
    for scale in (2.0, 2.0, 2.0, 5.0):
        options.scale = scale
        results.append(float(sx.cond(TRUE, options.apply, lambda x: x, 1.0)))
    assert results == [2.0, 2.0, 2.0, 5.0]


def test_configuration_of_a_captured_module_counts() -> None:
    layer = Layer()
    layer.power = 1
    results = []
    for power in (1, 1, 1, 2, 2):
        layer.power = power
        results.append(float(sx.fori_loop(0, 1, lambda i, x: x**layer.power, jnp.float32(3))))
    assert results == [3.0, 3.0, 3.0, 9.0, 9.0]


def test_number_read_while_tracing_is_read_anew() -> None:
    threshold = sx.Variable(jnp.float32(1))

    def branch(x: Any) -> Any:
        return x + 10 if float(threshold) > 0 else x - 10  # concrete in an eager call

    results = []
    for value in (1, 1, 1, -1, -1, 1):
        threshold.value = jnp.float32(value)
        results.append(float(sx.cond(TRUE, branch, same, 0.0)))
    assert results == [10.0, 10.0, 10.0, -10.0, -10.0, 10.0]


class Slot:
    """An object whose attributes cannot be listed."""

    __slots__ = ("__weakref__", "layer")


def test_objects_that_no_key_sees_are_found_anew() -> None:
    slot = Slot()
    layers = [Layer() for _ in range(5)]
    for layer in layers:
        slot.layer = layer
        sx.cond(TRUE, lambda x: slot.layer(x), same, jnp.ones(4))
    assert [int(layer.calls) for layer in layers] == [1] * 5


# --- as before ------------------------------------------------------------------------------------


def test_error_changes_nothing_and_is_raised_anew() -> None:
    layer = Layer()
    fails = {"now": False}

    def body(i: Any, x: Any) -> Any:
        x = layer(x)
        if fails["now"]:
            raise RuntimeError("in the middle")
        return x

    for count in range(1, 4):
        sx.fori_loop(0, 2, body, jnp.ones(4))
        assert int(layer.calls) == 2 * count
    fails["now"] = True
    for _ in range(3):
        with pytest.raises(RuntimeError, match="in the middle"):
            sx.fori_loop(0, 2, lambda i, x: body(i, x), jnp.ones(4))
    assert int(layer.calls) == 6
    fails["now"] = False
    sx.fori_loop(0, 2, lambda i, x: body(i, x), jnp.ones(4))
    assert int(layer.calls) == 8


def test_refused_calls_are_refused_every_time() -> None:
    for _ in range(4):
        with pytest.raises(sx.errors.TransformError, match="leave different forms"):
            sx.cond(TRUE, lambda x: x, lambda x: x.astype(jnp.int32), jnp.ones(2))
        with pytest.raises(sx.errors.TransformError, match=r"pred of sx\.cond must be one boolean"):
            sx.cond(jnp.ones(2), twice, same, 1.0)


def test_bad_operands_are_refused_after_good_ones() -> None:
    for _ in range(3):
        sx.cond(TRUE, twice, same, jnp.ones(2))
    with pytest.raises(sx.errors.TransformError, match=r"pred of sx\.cond"):
        sx.cond(jnp.ones(2), twice, same, jnp.ones(2))
    with pytest.raises(sx.errors.ShardaxError):
        sx.cond(TRUE, twice, same, "text")


def test_structural_changes_and_identity_are_carried_back() -> None:
    for _ in range(4):
        layer = Layer()

        def change(layer: Any) -> Any:
            layer.extra = sx.Variable(jnp.ones(2))
            return layer

        assert sx.cond(TRUE, change, change, layer) is layer
        assert layer.extra.value.tolist() == [1.0, 1.0]


def test_random_numbers_go_on() -> None:
    def draw(rngs: Any) -> Any:
        return jax.random.normal(rngs.noise(), (2,))

    rngs, plain = sx.Rngs(0), sx.Rngs(0)
    drawn = [np.asarray(sx.cond(TRUE, draw, draw, rngs)) for _ in range(4)]
    expected = [np.asarray(draw(plain)) for _ in range(4)]
    np.testing.assert_array_equal(drawn, expected)


def test_threads_use_their_own_functions() -> None:
    results: dict[int, list[float]] = {}

    def work(number: int) -> None:
        layer = Layer()
        layer.scale.value = jnp.float32(number)
        scale = number
        results[number] = [
            float(sx.cond(TRUE, lambda x: layer(x).sum() + scale, lambda x: x.sum(), jnp.ones(4)))
            for _ in range(6)
        ]

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {number: [5.0 * number] * 6 for number in range(4)}


def test_disabled_jit_runs_the_function_every_time() -> None:
    seen = []

    def branch(x: Any) -> Any:
        seen.append(x)
        return x

    with jax.disable_jit():
        for _ in range(3):
            sx.cond(TRUE, branch, branch, 1.0)
    assert len(seen) >= 3


# --- what is kept alive ---------------------------------------------------------------------------


def references_to_a_closure() -> list[Any]:
    # It writes no captured Variable: that ends a trace, and JAX 0.10 to 0.12 keep arrays of one.
    layer, array, options = Layer(), jnp.arange(4.0) + 1, Options(2.0)

    def branch(x: Any) -> Any:
        return layer.scale * x + array * options.scale

    for _ in range(4):
        sx.cond(TRUE, branch, same, jnp.ones(4))
        sx.scan(lambda carry, x: (carry, branch(x)))(None, jnp.ones((2, 4)))
        sx.jit(branch)(jnp.ones(4))
    return [weakref.ref(item) for item in (layer, array, options, branch)]


@pytest.mark.usefixtures("collecting_only_what_is_new")
def test_nothing_of_a_closure_is_kept_alive() -> None:
    references = references_to_a_closure()
    for _ in range(3):  # programs go when the functions are gone
        gc.collect()
    assert [reference() for reference in references] == [None] * 4


@pytest.mark.usefixtures("collecting_only_what_is_new")
def test_model_with_a_function_of_itself_dies() -> None:
    references = []
    for _ in range(4):
        layer = Layer()
        layer.act = functools.partial(lambda layer, x: layer.scale * x, layer)
        sx.cond(TRUE, lambda layer, x: x, lambda layer, x: x + 1, layer, jnp.ones(4))
        sx.jit(lambda layer: jnp.ones(()))(layer)
        references.append(weakref.ref(layer))
        layer = Layer()
        layer.act = layer.__call__
        sx.cond(TRUE, lambda layer, x: x, lambda layer, x: x + 1, layer, jnp.ones(4))
        references.append(weakref.ref(layer))
    del layer
    gc.collect()
    assert [ref() for ref in references] == [None] * 8


@pytest.mark.usefixtures("collecting_only_what_is_new")
def test_models_that_were_passed_die() -> None:
    references = []
    for _ in range(4):
        model = with_values(sx.nn.Linear(4, 4, rngs=sx.Rngs(0)))
        sx.fori_loop(0, 2, lambda i, c: (c[0], c[0](c[1])), (model, jnp.asarray(X)))
        references.append(weakref.ref(model))
    del model
    gc.collect()
    assert [ref() for ref in references] == [None] * 4


# --- jit made anew --------------------------------------------------------------------------------


def test_jit_of_one_function_made_anew_traces_once() -> None:
    traces = []

    def step(layer: Any, x: Any) -> Any:
        traces.append(None)
        return layer(x)

    layer = Layer()
    for _ in range(5):
        sx.jit(step)(layer, jnp.ones(4))
    assert (len(traces), int(layer.calls)) == (1, 5)
    sx.jit(step, donate_argnums=0)(layer, jnp.ones(4))
    assert len(traces) == 2
    sx.jit(step)(layer, jnp.ones(4))
    assert len(traces) == 2
    sx.jit(step).clear_cache()
    sx.jit(step)(layer, jnp.ones(4))
    assert len(traces) == 3


def test_lambdas_of_one_code_share_programs(compilations: Callable[[], int]) -> None:
    layer, x = Layer(), jnp.ones(4)
    for count in range(1, 6):
        sx.jit(lambda layer, x: layer(x) * by_global(1.0))(layer, x)
        if count > 2:
            assert compilations() == 0
        compilations()
        assert int(layer.calls) == count


def test_program_of_another_global_is_not_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    def make() -> Any:
        return sx.jit(lambda x: x * SCALE)

    first = make()
    monkeypatch.setattr(f"{__name__}.SCALE", 2.0)
    assert float(first(1.0)) == 2.0  # as it was traced
    monkeypatch.setattr(f"{__name__}.SCALE", 1.0)
    assert [float(make()(1.0)) for _ in range(3)] == [1.0] * 3


def test_jit_made_anew_of_one_function_is_as_in_jax() -> None:
    scale: Any = 1.0

    def step(x: Any) -> Any:
        return x * scale

    results = []
    for scale in (1.0, 1.0, 2.0, jnp.float32(3)):
        results.append([float(jit(step)(2.0)) for jit in (sx.jit, jax.jit)])
        made = [jit(lambda x, scale=scale: x * scale) for jit in (sx.jit, jax.jit)]
        results.append([float(function(2.0)) for function in made])
    assert results == [[2.0] * 2] * 5 + [[4.0] * 2, [2.0] * 2, [6.0] * 2]
