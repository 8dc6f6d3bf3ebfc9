# SPDX-License-Identifier: Apache-2.0
"""Host functions run in programs as they would by themselves."""

from __future__ import annotations

import functools
import gc
import subprocess
import sys
import textwrap
import weakref
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import shardax as sx
from shardax.errors import HostFunctionError, StaticArgumentError, TransformError
from tests.tools.host.ways import FLOAT, Seen, doubling, same
from tests.tools.host.ways import way as way

host_function = sx.host.host_function

DTYPES = ["bool", "int8", "uint32", "int32", "float16", "bfloat16", "float32", "complex64"]


# --- in programs ----------------------------------------------------------------------------------


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("compiled", [lambda f: f, jax.jit, sx.jit], ids=["eager", "jit", "sx.jit"])
def test_function_receives_numpy_and_returns_jax_arrays(compiled: Any) -> None:
    seen = Seen()
    result = compiled(doubling(seen))(jnp.arange(3.0))
    assert isinstance(result, jax.Array)
    assert result.tolist() == [0.0, 2.0, 4.0]
    assert seen.calls == [((3,), "float32", np.ndarray)]


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("dtype", DTYPES)
def test_host_function_keeps_every_dtype_and_shape(dtype: str) -> None:
    arrays = tuple(jnp.ones(shape, dtype) for shape in [(), (0,), (3, 0, 2), (2, 3)])
    results = jax.jit(host_function(lambda arrays: list(arrays), out=same))(arrays)
    assert [(x.dtype, x.shape) for x in results] == [(x.dtype, x.shape) for x in arrays]
    assert all(bool((x == y).all()) for x, y in zip(results, arrays, strict=True))


def test_argument_trees_may_hold_numbers_strings_and_none() -> None:
    def shown(tree: Any, *, style: str) -> Any:
        kinds = jax.tree.map(lambda leaf: type(leaf).__name__, tree)
        assert kinds == {"a": ("ndarray", "ndarray"), "b": "str", "c": None}
        assert style == "plain"
        return {"sum": sum(tree["a"]), "length": len(tree["b"])}

    function = host_function(shown, out={"sum": FLOAT, "length": jax.ShapeDtypeStruct((), int)})
    tree = {"a": (1.0, jnp.float32(2)), "b": "text", "c": None}
    for f in (function, jax.jit(lambda x: function({**tree, "a": (x, 2.0)}, style="plain"))):
        result = f(1.0) if f is not function else f(tree, style="plain")
        assert (float(result["sum"]), int(result["length"])) == (3.0, 4)


def test_function_needs_no_arguments_and_no_results() -> None:
    three = host_function(lambda: 3, out=jax.ShapeDtypeStruct((), int))
    assert (int(three()), int(jax.jit(three)())) == (3, 3)
    assert jax.jit(host_function(lambda x: (), out=()))(1.0) == ()


def test_random_keys_arrive_as_words_for_seeding() -> None:
    def draw(key: np.ndarray) -> np.ndarray:
        assert (key.dtype, key.shape) == (np.dtype("uint32"), (2,))
        return np.random.default_rng(key).normal(size=3)

    function = host_function(draw, out=jax.ShapeDtypeStruct((3,), float))
    key = jax.random.key(1)
    assert bool((function(key) == jax.jit(function)(key)).all())
    lanes = jax.vmap(function)(jax.random.split(key, 2))
    assert not bool((lanes[0] == lanes[1]).any())


def test_host_function_receives_float0_as_it_is() -> None:
    """Such are the tangents and gradients of integers."""

    def names(x: np.ndarray) -> np.ndarray:
        return np.float32(x.dtype == jax.dtypes.float0)

    empty = np.zeros((2,), jax.dtypes.float0)
    function = host_function(names, out=FLOAT)
    assert (float(function(empty)), float(jax.jit(lambda: function(empty))())) == (1.0, 1.0)


def test_function_may_keep_and_write_its_arguments() -> None:
    kept = []

    def keep(x: np.ndarray) -> np.ndarray:
        x += 1
        kept.append(x)
        return x

    function = host_function(keep, out=same)
    x = jnp.arange(4.0)
    results = [function(x), *(jax.jit(lambda x: function(x * 1.0) * 2)(x + i) for i in range(3))]
    jax.block_until_ready(results)
    assert x.tolist() == [0.0, 1.0, 2.0, 3.0]
    assert [array[0] for array in kept] == [1.0, 1.0, 2.0, 3.0]


def test_later_change_of_result_buffer_has_no_effect() -> None:
    buffer = np.zeros(64, "float32")

    def next_value(x: np.ndarray) -> np.ndarray:
        buffer[:] = x
        return buffer

    function = host_function(next_value, out=jax.ShapeDtypeStruct((64,), "float32"))
    first = function(1.0)
    function(2.0)
    assert set(first.tolist()) == {1.0}


def test_tracing_and_shapes_do_not_run_the_function() -> None:
    seen = Seen()
    function = doubling(seen)
    x = jax.ShapeDtypeStruct((3,), "float32")
    assert jax.eval_shape(function, x) == x
    jax.jit(function).lower(x).compile()
    assert seen.calls == []


def test_programs_show_the_name_of_the_function() -> None:
    cosine = host_function(np.cos, out=same)
    assert "<function cos at" in str(jax.make_jaxpr(cosine)(1.0))


def test_unused_result_means_function_is_not_called() -> None:
    seen = Seen()
    jax.jit(lambda x: (doubling(seen)(x), x + 1)[1])(1.0).block_until_ready()
    assert seen.calls == []


@pytest.mark.usefixtures("way")
def test_loops_and_conditionals_call_where_executed() -> None:
    double = doubling()

    def body(carry: Any, x: Any) -> Any:
        return jax.lax.cond(x > 0, double, lambda c: c + 1, carry), carry

    last, all_of_them = jax.lax.scan(body, 1.0, jnp.array([1, 0, 1]))
    assert (float(last), all_of_them.tolist()) == (6.0, [1.0, 2.0, 3.0])
    assert float(sx.while_loop(lambda c: c < 20, double, jnp.float32(3))) == 24.0


@pytest.mark.usefixtures("way")
def test_nested_call_on_the_host_is_direct() -> None:
    double = doubling()

    def twice(x: np.ndarray) -> np.ndarray:
        once = double(x)
        assert isinstance(once, np.generic)
        return double(once)

    function = host_function(twice, out=same)
    assert (float(function(1.0)), float(jax.jit(function)(1.0))) == (4.0, 4.0)


def test_host_function_without_jit_works_as_with_it() -> None:
    function = doubling()
    with jax.disable_jit():
        assert jax.jit(function)(1.0).tolist() == 2.0
        assert jax.jit(jax.vmap(function))(jnp.ones(2)).tolist() == [2.0, 2.0]


# --- vmap -----------------------------------------------------------------------------------------


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("vmap", ["sequential", "vectorized"])
@settings(max_examples=5)
@given(lanes=st.integers(1, 3), more=st.integers(1, 3))
def test_vmap_equals_a_python_loop(vmap: str, lanes: int, more: int) -> None:
    def matvec(a: np.ndarray, x: np.ndarray) -> np.ndarray:
        return (a @ x[..., None])[..., 0]

    function = host_function(matvec, out=lambda a, x: x, vmap=vmap)
    a = np.arange(lanes * 4, dtype="float32").reshape(lanes, 2, 2)
    x = np.arange(more * 2, dtype="float32").reshape(2, more)
    nested = jax.vmap(jax.vmap(function, (None, 1)), (0, None))(a, x)
    assert nested.tolist() == [
        [(a[i] @ x[:, j]).tolist() for j in range(more)] for i in range(lanes)
    ]


@pytest.mark.usefixtures("way")
def test_sequential_calls_per_lane_vectorized_calls_once() -> None:
    lanes = {}
    for method in ("sequential", "vectorized"):
        seen = Seen()
        jax.jit(jax.vmap(doubling(seen, vmap=method)))(jnp.ones((4, 3))).block_until_ready()
        lanes[method] = [shape for shape, _, _ in seen.calls]
    assert lanes == {"sequential": [(3,)] * 4, "vectorized": [(4, 3)]}


def test_unmapped_arguments_are_passed_without_copies() -> None:
    strides = []

    def add(x: np.ndarray, shared: np.ndarray) -> np.ndarray:
        strides.append((shared.shape, shared.strides[0]))
        return x + shared

    function = host_function(add, out=lambda x, shared: shared, vmap="vectorized")
    result = jax.vmap(function, (0, None))(jnp.ones((5, 1)), jnp.ones(3))
    assert (result.shape, strides) == ((5, 3), [((5, 3), 0)])


# --- shape rules, static arguments and dtypes -----------------------------------------------------


def test_shape_rule_sees_shapes_and_static_arguments() -> None:
    def first(x: np.ndarray, count: int = 2) -> np.ndarray:
        return x[:count]

    function = host_function(
        first,
        out=lambda x, count: jax.ShapeDtypeStruct((count, *x.shape[1:]), x.dtype),
        static_argnames="count",
        vjp=lambda args, result, ct: (jnp.zeros_like(args[0]).at[: args[1]].set(ct),),
    )
    x = jnp.arange(6.0).reshape(3, 2)
    for f in (function, jax.jit(function, static_argnames="count")):
        assert (f(x).shape, f(x, count=1).tolist()) == ((2, 2), [[0.0, 1.0]])
    gradient = jax.grad(lambda x: function(x, 1).sum())(x)
    assert gradient.tolist() == [[1.0, 1.0], [0.0, 0.0], [0.0, 0.0]]


def test_static_arguments_are_exact_in_type() -> None:
    function = host_function(
        lambda x, flag: x if flag is True else -x, out=lambda x, flag: x, static_argnums=1
    )
    compiled = jax.jit(lambda x: (function(x, True), function(x, 1)))
    assert [float(value) for value in compiled(3.0)] == [3.0, -3.0]


def test_unhashable_static_argument_is_refused_by_name() -> None:
    function = host_function(lambda x, sizes: x, out=lambda x, sizes: x, static_argnames="sizes")
    with pytest.raises(StaticArgumentError, match="sizes"):
        function(1.0, [2])
    with pytest.raises(StaticArgumentError, match="nosuch"):
        host_function(lambda x: x, out=same, static_argnames="nosuch")


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("x64", [False, True])
def test_wide_dtypes_count_as_those_that_jax_has(x64: bool) -> None:
    def library(x: np.ndarray) -> Any:
        return np.float64(0.1) * np.ones(2), np.arange(2, dtype=np.int64)

    out = (jax.ShapeDtypeStruct((2,), float), jax.ShapeDtypeStruct((2,), int))
    with jax.enable_x64(x64):
        function = host_function(library, out=out)
        for f in (function, jax.jit(function)):
            floats, integers = f(np.float64(1.0))
            width = "64" if x64 else "32"
            assert (floats.dtype, integers.dtype) == (f"float{width}", f"int{width}")
            assert floats.tolist() == (np.float64 if x64 else np.float32)([0.1, 0.1]).tolist()


def test_argument_dtypes_agree_inside_and_outside_jit() -> None:
    seen = Seen()
    for f in (doubling(seen), jax.jit(doubling(seen))):
        for x in (1.5, 3, np.float64(1), np.arange(2)):
            f(x)
    dtypes = [dtype for _, dtype, _ in seen.calls]
    assert dtypes == 2 * ["float32", "int32", "float32", "int32"]


def test_host_function_takes_all_forms_of_functions() -> None:
    class Scale:
        def __init__(self, by: float) -> None:
            self.by = by

        def apply(self, x: np.ndarray) -> np.ndarray:
            return self.by * x

        @host_function(out=lambda self, x: x)
        def decorated(self, x: np.ndarray) -> np.ndarray:
            return self.by * x

    @host_function(out=same)
    def decorated(x: np.ndarray) -> np.ndarray:
        """What it says."""
        return 3 * x

    partial = functools.partial(np.multiply, np.array([3.0]))
    functions = [
        decorated,
        host_function(Scale(3).apply, out=same),
        Scale(3).decorated,
        host_function(partial, out=same),
        host_function(np.frompyfunc(lambda x: 3 * x, 1, 1), out=FLOAT),
    ]
    arguments = [1.0, 1.0, 1.0, jnp.ones(1), 1.0]
    for function, x in zip(functions, arguments, strict=True):
        assert jax.jit(function)(x).tolist() in (3.0, [3.0])
    assert (decorated.__doc__, repr(decorated).split("<locals>")[-1]) == (
        "What it says.",
        ".decorated>",
    )


# --- what is not valid ----------------------------------------------------------------------------


def test_options_are_checked_when_the_function_is_made() -> None:
    with pytest.raises(HostFunctionError, match="'sequential' or 'vectorized'"):
        host_function(np.sin, out=same, vmap="expand_dims")
    with pytest.raises(HostFunctionError, match="vjp and nondiff"):
        host_function(np.sin, out=same, vjp=lambda *_: (None,), nondiff=True)


@pytest.mark.parametrize(
    ("out", "path"),
    [
        (None, "does not say what it returns"),
        (3.0, "3.0"),
        ({"a": (FLOAT, "float32")}, r"\.a\[1\]"),
        ({"a": jax.ShapeDtypeStruct((), jax.random.key(0).dtype)}, r"\.a "),
        (np.array(["text"]), "<U4"),
        (lambda x: x.shape, r"\[0\]"),
    ],
)
def test_promise_that_is_none_names_the_place(out: Any, path: str) -> None:
    seen = Seen()
    with pytest.raises(HostFunctionError, match=path):
        host_function(seen, out=out)(jnp.ones(3))
    assert seen.calls == []


def test_non_numeric_arrays_are_refused_in_every_context() -> None:
    texts = np.array(["a", "b"])
    for function in (doubling(), jax.jit(lambda: doubling()(texts))):
        with pytest.raises(TransformError, match=r"<U1 at \.x.*tuple"):
            function(*([texts] if isinstance(function, sx.host.HostFunction) else []))


@pytest.mark.filterwarnings("ignore::shardax.errors.UncertainCaptureWarning")
def test_shape_rule_may_read_shapes_from_closure() -> None:
    w = sx.Param(jnp.ones(3))
    function = host_function(lambda x: x * np.ones(3), out=lambda x: w)
    assert sx.jit(function)(2.0).tolist() == [2.0, 2.0, 2.0]


def test_wrong_arguments_are_those_of_the_function() -> None:
    with pytest.raises(TypeError, match="missing a required argument: 'x'"):
        doubling()()


# --- what is kept ---------------------------------------------------------------------------------


@pytest.mark.usefixtures("collecting_only_what_is_new")
def test_programs_that_are_gone_keep_no_function_alive() -> None:
    seen = Seen()
    function = doubling(seen, nondiff=True)
    jax.jit(function)(jnp.ones(2)).block_until_ready()
    jax.jit(jax.grad(function))(1.0).block_until_ready()
    known = weakref.ref(seen)
    del seen, function
    gc.collect()
    assert known() is None


CACHED = """
    import os, sys
    import jax, numpy as np
    import shardax as sx

    jax.config.update("jax_compilation_cache_dir", sys.argv[1])
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    times = sx.host.host_function(lambda x: int(sys.argv[2]) * x, out=lambda x: x)

    def with_host(x):
        return times(x) + 1

    def without(x):
        return 2 * x + 1

    print(float(jax.jit(with_host)(2.0)), float(jax.jit(without)(2.0)))
    assert "jit_without" in {name.split("-")[0] for name in os.listdir(sys.argv[1])}
"""


def test_program_cached_on_disk_calls_the_reader_process(tmp_path: Path) -> None:
    # Before JAX 0.12 it holds the address of a function, and is not kept.
    for factor, printed in (("2", "5.0 5.0\n"), ("3", "7.0 5.0\n")):
        command = [sys.executable, "-c", textwrap.dedent(CACHED), str(tmp_path), factor]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.stdout == printed, done.stderr


def test_lanes_outside_of_programs_are_traced_once() -> None:
    function = doubling()
    lanes = jax.vmap(function)
    lanes(jnp.ones(2))
    lanes(jnp.ones(2))
    assert function._staged.cache_info()[:2] == (1, 1)
