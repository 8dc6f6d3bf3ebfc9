# SPDX-License-Identifier: Apache-2.0
"""``jit(static="auto")``: what is static is found in every call; what is remembered is bounded."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import enum
import functools
import gc
import weakref
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import shardax as sx
from shardax._transforms.jit import cache as memory
from shardax.errors import StaticArgumentError
from tests.core.transforms.examples import Scale
from tests.core.transforms.test_dispatch import python_calls


class Mode(enum.IntEnum):
    """Equal to integers in Python."""

    ONE = 1


@dataclasses.dataclass(frozen=True)
class Config:
    """Frozen configuration."""

    width: Any


def counted(function: Callable[..., Any], **options: Any) -> tuple[Any, list[int]]:
    """Returns the function compiled with automatic statics, and a list that grows by traces."""
    traces: list[int] = []

    @functools.wraps(function)
    def noted(*args: Any, **kwargs: Any) -> Any:
        traces.append(1)
        return function(*args, **kwargs)

    return sx.jit(noted, **{"static": "auto", **options}), traces


def scaled(problem: Any) -> Any:
    """The example of the notes: arrays, a mode and a factor in one dict."""
    y = problem["x"] * problem["k"]
    return y + 1 if problem["mode"] == "a" else y - 1


# --- what is static ---


def test_choice_is_made_anew_in_every_call() -> None:
    run, traces = counted(lambda x, how: jnp.exp(x) if how == "exp" else x * how)
    x = jnp.zeros(2)
    for _ in range(2):
        assert run(x, 3).tolist() == [0.0, 0.0]
        assert run(x, "exp").tolist() == [1.0, 1.0]
        assert run(x + 1, np.float32(2)).tolist() == [2.0, 2.0]
        assert run(x + 1, jnp.full(2, 5.0)).tolist() == [5.0, 5.0]
    assert len(traces) == 4


def test_arrays_are_dynamic_at_every_depth() -> None:
    run, traces = counted(lambda a, *, b: a["x"][0] * b[0]["y"] + len(a["name"]))
    for kind in (jnp.asarray, np.asarray):
        for value in (1.0, 2.0):
            a = {"x": [kind(np.float32(value))], "name": "ab"}
            assert float(run(a, b=({"y": kind(np.float32(3))}, None))) == 3 * value + 2
    assert len(traces) == 1


def test_numbers_are_dynamic_and_one_program_serves_all() -> None:
    run, traces = counted(scaled)
    found = [
        run({"x": jnp.ones(1), "mode": "a", "k": k}).tolist() for k in (2.0, 3.0, float("nan"))
    ]
    np.testing.assert_array_equal(found, [[3.0], [4.0], [np.nan]])
    assert len(traces) == 1


def test_static_numbers_are_distinguished_by_type() -> None:
    run, traces = counted(scaled, static="numbers")
    problems = [("a", 1), ("b", 1), ("a", True), ("a", 1.0), ("a", 1)]
    for _ in range(2):
        found = [run({"x": jnp.ones(1), "mode": mode, "k": k}).tolist() for mode, k in problems]
        assert found == [[2.0], [0.0], [2.0], [2.0], [2.0]]
    assert len(traces) == 4


def test_static_numbers_shape_programs_nan_is_a_key() -> None:
    run, traces = counted(lambda n, sign: jnp.ones(n) * np.copysign(1.0, sign), static="numbers")
    for _ in range(2):
        assert run(2, 0.0).tolist() == [1.0, 1.0]
        assert run(3, -0.0).tolist() == [-1.0] * 3
        assert run(1, float("nan")).shape == (1,)
    assert len(traces) == 3


def test_remat_and_jitted_take_the_request_too() -> None:
    summed = sx.remat(lambda x, n: sum(x for _ in range(n)), static="numbers")
    assert float(jax.grad(lambda x: summed(x, 3))(1.0)) == 3.0

    class Repeat(sx.Module):
        def __call__(self, x: Any, n: int) -> Any:
            return jnp.tile(x, n)

    assert sx.Jitted(Repeat(), static="numbers")(jnp.ones(2), 3).shape == (6,)


@pytest.mark.parametrize(
    "value",
    ["relu", None, True, Mode.ONE, Config((1, "a")), jnp.tanh, np.sum, len, int, b"x", jnp.float32],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_automatic_static_takes_other_hashable_values_unchanged(value: Any) -> None:
    run, traces = counted(lambda x, options: (received.append(options), x)[1])
    received: list[Any] = []
    run(1.0, {"here": [value]})
    run(2.0, {"here": [value]})
    assert received == [{"here": [value]}] and type(received[0]["here"][0]) is type(value)
    assert len(traces) == 1


@pytest.mark.parametrize(
    "value",
    [jax.make_mesh((1,), ("x",)), jax.sharding.PartitionSpec("x"), jax.devices()[0], jax.nn.relu],
    ids=["mesh", "spec", "device", "custom_jvp"],
)
def test_jax_objects_are_static_by_identity(value: Any) -> None:
    run, traces = counted(lambda x, item: x)
    assert [float(run(x, value)) for x in (1.0, 2.0)] == [1.0, 2.0]
    assert len(traces) == 1


# --- methods, kwargs, other transforms ---


class Plain:
    """A class of the user's own, compared by identity."""

    def __init__(self, factor: Any) -> None:
        self.factor = factor

    @sx.jit(static="auto")
    def scale(self, x: Any, *, how: str = "times") -> Any:
        """Uses an attribute as a constant of the program."""
        return x * self.factor if how == "times" else x + self.factor


def test_method_follows_assignments_to_its_object() -> None:
    plain, other = Plain(2), Plain(5)
    assert [float(p.scale(1.0)) for p in (plain, other)] == [2.0, 5.0]
    plain.factor = 3
    assert [float(p.scale(1.0)) for p in (plain, other)] == [3.0, 5.0]
    assert float(plain.scale(1.0, how="plus")) == 4.0


def test_static_argument_follows_assignments_to_it() -> None:
    def times(plain: Plain, x: Any) -> Any:
        return x * plain.factor

    run, plain = sx.jit(times, static_argnums=0), Plain(2)
    first = float(run(plain, 1.0))
    plain.factor = 3
    assert (first, float(run(plain, 1.0))) == (2.0, 3.0)


def test_bound_method_argument_follows_its_object() -> None:
    plain = Plain(2)

    def times(self: Plain, x: Any) -> Any:
        return x * self.factor

    run = sx.jit(lambda act, x: act(x), static="auto")
    first = float(run(times.__get__(plain), 1.0))
    plain.factor = 3
    assert (first, float(run(times.__get__(plain), 1.0))) == (2.0, 3.0)


@pytest.mark.filterwarnings("ignore::shardax.errors.UncertainCaptureWarning")
def test_object_may_hold_models_and_itself() -> None:
    plain = Plain(Scale())
    vars(plain)["itself"] = plain
    run = sx.jit(lambda plain, x: plain.factor(x), static="auto")
    assert [run(plain, 1.0).tolist() for _ in range(2)] == [[0.5, 0.5]] * 2
    assert int(plain.factor.calls) == 2
    plain.factor = Scale()
    plain.factor.factor[...] = jnp.full(2, 8.0)
    assert run(plain, 1.0).tolist() == [4.0, 4.0] and int(plain.factor.calls) == 1


def test_models_may_accompany_static_leaves() -> None:
    run, traces = counted(lambda m, x, *, name, other: m(x) * len(name) + other["m"].factor)
    models = [Scale(), Scale()]
    for _ in range(3):
        for model in models:
            found = run(model, 1.0, name="ab", other={"m": models[0], "flag": True})
            assert found.tolist() == [2.0, 2.0]
    assert len(traces) == 2  # once with the same model twice, once with two
    assert [int(m.calls) for m in models] == [3, 3]


def test_automatic_static_needs_one_trace_under_every_transform() -> None:
    run, _ = counted(scaled)
    call = lambda x: run({"x": x, "mode": "a", "k": 2.0})  # noqa: E731
    results = [
        call(jnp.float32(1)),
        jax.jit(call)(jnp.float32(1)),
        jax.vmap(call)(jnp.ones(1))[0],
        jax.grad(call)(jnp.float32(1)) + 1,
    ]
    assert [float(r) for r in results] == [3.0] * 4
    assert len(run.specializations) == 1


def test_donation_and_stages_work_with_static_leaves() -> None:
    run = sx.jit(lambda p: p["x"] + len(p["mode"]), static="auto", donate_argnums=0)
    for _ in range(3):
        x = jnp.ones(3)
        assert run({"x": x, "mode": "ab"}).tolist() == [3.0] * 3 and x.is_deleted()
    given = {"x": jnp.ones(3), "mode": "a", "k": 2.0}
    compiled = sx.jit(scaled, static="numbers").lower(given).compile()
    assert compiled(given).tolist() == [3.0] * 3
    assert sx.jit(scaled, static="numbers").eval_shape(given).shape == (3,)


def test_references_of_jax_and_keys_are_dynamic() -> None:
    def draw(given: Any) -> Any:
        given["total"][...] += 1.0
        return jax.random.normal(given["key"]) + given["total"][...]

    run, traces = counted(draw)
    total = jax.new_ref(jnp.float32(0))
    found = [float(run({"total": total, "key": jax.random.key(0), "how": "a"})) for _ in range(2)]
    assert found[1] == pytest.approx(found[0] + 1) and float(total[...]) == 2.0
    assert len(traces) == 1


# --- what is refused ---


@pytest.mark.parametrize(
    ("call", "path"),
    [
        (lambda run: run({"layers": [1, {2}]}), r"the set at \.config\.layers\[1\]"),
        (lambda run: run(1, options=({"a": bytearray(1)},)), r"\.options\[0\]\.a"),
        (lambda run: run(1, "fixed", bytearray(1)), r"\.last"),
    ],
)
def test_unhashable_value_is_named_by_its_path(call: Any, path: str) -> None:
    def run(config: Any, fixed: Any = "x", last: Any = None, options: Any = ()) -> Any:
        return 1.0

    for static_argnums in ((), (1,)):
        compiled = sx.jit(run, static="auto", static_argnums=static_argnums)
        with pytest.raises(StaticArgumentError, match=path):
            call(compiled)
        assert compiled._cache_size() == 0


def test_error_path_in_method_begins_with_parameter() -> None:
    class Model(Scale):
        @sx.jit(static="auto")
        def run(self, x: Any, names: Any) -> Any:
            return self(x)

    model = Model()
    with pytest.raises(StaticArgumentError, match=r"set at \.names\.a "):
        model.run(1.0, {"a": set()})
    assert int(model.calls) == 0


# --- what is remembered ---


def test_retraces_are_explained_by_path_and_value() -> None:
    run, _ = counted(scaled, static="numbers")
    problem = {"x": jnp.ones(1), "mode": "a", "k": 1}
    run(problem)
    with sx.explain_retraces(file=False) as retraces:
        run({**problem, "mode": "b"})
        run({**problem, "k": 1.0})
        run({**problem, "k": jnp.float32(1)})
    assert [r.reasons for r in retraces[:2]] == [
        (".problem.mode: 'a' (str) -> 'b' (str)",),
        (".problem.k: 1 (int) -> 1.0 (float)",),
    ]
    assert len(retraces) == 3


def test_least_recently_used_program_is_evicted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "MAX_SPECIALIZATIONS", 2)
    run, traces = counted(lambda x, name: x * len(name))
    for name, known in [
        ("a", False),
        ("bb", False),
        ("a", True),  # so "bb" is the one to go
        ("ccc", False),
        ("a", True),
        ("ccc", True),
        ("bb", False),  # in place of "a"
        ("ccc", True),
        ("a", False),
    ]:
        before = len(traces)
        assert float(run(1.0, name)) == len(name)
        assert (len(traces) == before) is known, name
        assert len(run.specializations) <= 2 and len(run.calls) <= 2


def test_threads_may_crowd_each_others_programs_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "MAX_SPECIALIZATIONS", 2)
    run, _ = counted(lambda x, name: x * len(name))

    def lengths(name: str) -> set[float]:
        return {float(run(1.0, name)) for _ in range(30)}

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        assert [*pool.map(lengths, ["a", "bb", "ccc", "dddd"])] == [{1.0}, {2.0}, {3.0}, {4.0}]


@pytest.mark.usefixtures("collecting_only_what_is_new")
def test_evicted_program_releases_its_static_values(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "MAX_SPECIALIZATIONS", 1)
    run = sx.jit(lambda x, plain: x, static="auto")
    plain = Plain(2)
    run(1.0, plain)
    run(1.0, plain)
    watch = weakref.ref(plain)
    del plain
    run(1.0, "other")
    gc.collect()
    assert watch() is None


def test_containers_of_many_shapes_keep_memory_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_MAX_CALLS", 4)
    run, _ = counted(lambda xs, name: sum(xs))
    for count in (1, 2, 3, 4, 5, 6, 1):
        assert float(run([1.0] * count, "a")) == count
        assert len(run.calls) <= 4


def test_steady_call_overhead_is_independent_of_leaves() -> None:
    run = sx.jit(lambda p: p["x0"] * 2, static="auto")
    counts = []
    for size in (2, 40):
        problem = {f"x{i}": jnp.ones(1) for i in range(size)} | {"mode": "a", "flag": True}
        for _ in range(3):
            run(problem)
        counts.append(len(python_calls(run, problem)))
    assert counts[0] == counts[1] < 24


# --- the law ---

LEAVES = st.one_of(
    st.sampled_from(["a", "b", None, True, False, Mode.ONE, jnp.negative, Config(1)]),
    st.integers(-3, 3),
    st.floats(-2, 2, width=16),
    st.integers(0, 2).map(lambda n: np.full(2, n, np.float32)),
)
TREES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=2)
        | st.tuples(inner, inner)
        | st.dictionaries(st.sampled_from("xyz"), inner, max_size=2)
    ),
    max_leaves=5,
)


def _digest(tree: Any, xp: Any = jnp) -> Any:
    """Numbers that depend on every leaf: arrays and numbers by value, the rest by type and text."""
    total = xp.float32(0)
    for place, leaf in enumerate(jax.tree.leaves(tree)):
        if isinstance(leaf, (jax.Array, np.ndarray, float)) or type(leaf) is int:
            part = xp.sum(xp.asarray(leaf, xp.float32))
        else:
            part = xp.float32(sum(map(ord, f"{type(leaf).__name__}{leaf!r}"[:12])))
        total = total + part * (place + 1)
    return total


DIGESTS = {
    mode: sx.jit(lambda *args, **kwargs: _digest((args, kwargs)), static=mode)
    for mode in ("auto", "numbers")
}


@pytest.mark.parametrize("mode", DIGESTS)
@settings(max_examples=15, deadline=None)
@given(args=st.lists(TREES, max_size=2), kwargs=st.dictionaries(st.just("k"), TREES))
def test_compiled_function_gives_what_the_function_gives(
    mode: str, args: list[Any], kwargs: dict[str, Any]
) -> None:
    expected = float(_digest((args, kwargs), np))
    for _ in range(2):
        assert float(DIGESTS[mode](*args, **kwargs)) == pytest.approx(expected)
