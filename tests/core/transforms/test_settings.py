# SPDX-License-Identifier: Apache-2.0
"""Settings objects: what is changed in them in place is traced anew, at every depth."""

from __future__ import annotations

import array
import collections
import dataclasses
import functools
import gc
import itertools
import pickle
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import shardax as sx
from shardax.errors import StaticArgumentError, StaticAttributeError
from tests.core.transforms.test_dispatch import python_calls


class Schedule:
    """Settings as a plain class has them: compared by identity."""

    def __init__(self, k: Any = 1.0) -> None:
        self.k = k

    def __call__(self, x: Any) -> Any:
        return x * self.k


class Warmup(Schedule):
    """Settings of a derived class."""


class Slotted:
    """Settings in slots, without weak references."""

    __slots__ = ("k",)

    def __init__(self, k: Any = 1.0) -> None:
        self.k = k

    def __call__(self, x: Any) -> Any:
        return x * self.k


class SlottedBelow(Slotted):
    """Settings in the slots of a base class and in ``__dict__``."""

    __slots__ = ("__dict__",)


class Compared(Schedule):
    """Settings with a comparison of their own, which do not notice a change of themselves."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Compared) and other.k == self.k

    def __hash__(self) -> int:
        return 1


class Hooked(Schedule):
    """Settings that answer any name, in their own way."""

    def __getattr__(self, name: str) -> Any:
        return {"rate": 2.0}[name]


class Guarded(Schedule):
    """Settings whose hooks are not to be run."""

    def __getattribute__(self, name: str) -> Any:
        if name not in ("k", "__class__"):
            raise KeyError(name)
        return super().__getattribute__(name)


@dataclasses.dataclass(frozen=True)
class Frozen:
    """Frozen configuration around settings."""

    inner: Any


class Pair(NamedTuple):
    """A named tuple around settings."""

    inner: Any
    name: str = "a"


def _call(held: Any, x: Any) -> Any:
    return held(x)


class Model(sx.Module):
    """A Module with whatever as an attribute, and a function that reads it."""

    def __init__(self, held: Any, read: Callable[[Any, Any], Any] = _call) -> None:
        self.weight = sx.Param(jnp.float32(2))
        self.held = held
        self.read = read

    def __call__(self, x: Any) -> Any:
        return self.read(self.held, x * self.weight)


class Traced:
    """A call of a model in one of the ways of compiling, and how often it was traced."""

    def __init__(self, way: str, model: Model) -> None:
        self.model = model
        # Beside the model, which may hold a function that counts and none that reaches the model.
        self._counts = {"traces": 0}
        self._call = getattr(self, f"_{way}")()

    def __call__(self, x: float = 1.0) -> float:
        return float(self._call(x))

    @property
    def traces(self) -> int:
        return self._counts["traces"]

    def _forward(self, model: Model, x: Any) -> Any:
        self._counts["traces"] += 1
        return model(x)

    def _noted(self, read: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
        counts = self._counts

        def noted(held: Any, x: Any) -> Any:
            counts["traces"] += 1
            return read(held, x)

        return noted

    def _jit(self) -> Callable[[float], Any]:
        compiled = sx.jit(lambda model, x: self._forward(model, x))
        return lambda x: compiled(self.model, x)

    def _automatic(self) -> Callable[[float], Any]:
        compiled = sx.jit(lambda model, x, _: self._forward(model, x), static="auto")
        return lambda x: compiled(self.model, x, "name")

    def _by_name(self) -> Callable[[float], Any]:
        compiled = sx.jit(lambda *, model, x: self._forward(model, x))
        return lambda x: compiled(model=self.model, x=x)

    def _closure(self) -> Callable[[float], Any]:
        model = self.model
        return sx.jit(lambda x: self._forward(model, x))

    def _module(self) -> Callable[[float], Any]:
        self.model.read = self._noted(self.model.read)
        return sx.jit(self.model)

    def _jitted(self) -> Callable[[float], Any]:
        self.model.read = self._noted(self.model.read)
        return sx.Jitted(self.model)

    def _argument(self) -> Callable[[float], Any]:
        def call(held: Any, x: Any) -> Any:
            self._counts["traces"] += 1
            return self.model.read(held, x * 2)

        compiled = sx.jit(call, static="auto")
        return lambda x: compiled(self.model.held, x)

    def _static(self) -> Callable[[float], Any]:
        def call(held: Any, x: Any) -> Any:
            self._counts["traces"] += 1
            return self.model.read(held, x * 2)

        compiled = sx.jit(call, static_argnums=0)
        return lambda x: compiled(self.model.held, x)


OF_MODELS = ["jit", "automatic", "by_name", "closure", "module", "jitted"]
OF_ARGUMENTS = ["argument", "static"]


def assert_follows(traced: Traced, change: Callable[[], object]) -> None:
    """Asserts that a call gives 2.0, and 10.0 after a change, and is traced once for each."""
    first = [traced(), traced()]
    change()
    second = [traced(), traced()]
    assert (first, second, traced.traces) == ([2.0, 2.0], [10.0, 10.0], 2)


# --- where settings are ---


@pytest.mark.parametrize("way", [*OF_MODELS, *OF_ARGUMENTS])
@pytest.mark.parametrize(
    "kind", [Schedule, Warmup, Slotted, SlottedBelow, Compared, Hooked, Guarded]
)
def test_settings_changed_in_place_are_traced_anew(way: str, kind: type[Any]) -> None:
    held = kind()
    assert_follows(Traced(way, Model(held)), lambda: setattr(held, "k", 5.0))


PLACES: dict[str, tuple[Callable[[Any], Any], Callable[[Any, Any], Any]]] = {
    "tuple": (lambda s: ("a", (s,)), lambda held, x: held[1][0](x)),
    "named tuple": (Pair, lambda held, x: held.inner(x)),
    "frozenset": (lambda s: frozenset({s, "a"}), lambda held, x: min(held, key=str)(x)),
    "frozen dataclass": (Frozen, lambda held, x: held.inner(x)),
    "partial": (lambda s: functools.partial(lambda s, x: s(x), s), lambda held, x: held(x)),
    "partial by name": (
        lambda s: functools.partial(lambda x, s: s(x), s=s),
        lambda held, x: held(x),
    ),
    "function of a partial": (functools.partial, lambda held, x: held(x)),
    "bound method": (lambda s: s.__call__, lambda held, x: held(x)),
    "settings": (Schedule, lambda held, x: held.k(x)),
    "settings of settings": (lambda s: Schedule(Slotted(s)), lambda held, x: held.k.k(x)),
    "list in settings": (lambda s: Schedule([0, [s]]), lambda held, x: held.k[1][0](x)),
    "dict in settings": (lambda s: Slotted({"a": s}), lambda held, x: held.k["a"](x)),
    "set in settings": (lambda s: Schedule({s}), lambda held, x: min(held.k, key=str)(x)),
    "partial in settings": (
        lambda s: Schedule(functools.partial(s)),
        lambda held, x: held.k.func(x),
    ),
    "bound method in settings": (lambda s: Schedule(s.__call__), lambda held, x: held.k(x)),
    "namespace in settings": (
        lambda s: Schedule(types.SimpleNamespace(a=s)),
        lambda held, x: held.k.a(x),
    ),
}


# Where settings are is looked up in one way for all, so the ways take turns.
@pytest.mark.parametrize(
    ("place", "way"),
    [
        *zip(PLACES, itertools.cycle(["jit", "module", "jitted", *OF_ARGUMENTS]), strict=False),
        *zip(reversed(PLACES), itertools.cycle(["jit", "module", "jitted"]), strict=False),
    ],
)
def test_settings_are_found_at_every_depth(place: str, way: str) -> None:
    hold, read = PLACES[place]
    schedule = Schedule()
    assert_follows(Traced(way, Model(hold(schedule), read)), lambda: setattr(schedule, "k", 5.0))


@pytest.mark.parametrize("way", ["jit", "module", "jitted"])
@pytest.mark.parametrize(
    ("hold", "read"),
    [
        (lambda s: ["a", s], lambda held, x: held[1](x)),
        (lambda s: {"a": {"b": s}}, lambda held, x: held["a"]["b"](x)),
        (lambda s: (sx.Param(1.0), s), lambda held, x: held[1](x)),
        (lambda s: functools.partial(lambda m, s, x: s(x), Model(len), s), lambda held, x: held(x)),
    ],
    ids=["List", "Dict", "tuple with a Variable", "partial with a Module"],
)
def test_settings_are_found_in_containers_of_models(
    way: str, hold: Callable[[Any], Any], read: Callable[[Any, Any], Any]
) -> None:
    schedule = Schedule()
    assert_follows(Traced(way, Model(hold(schedule), read)), lambda: setattr(schedule, "k", 5.0))


def test_settings_deeper_than_pythons_stack_are_followed() -> None:
    schedule: Any = Schedule()
    inmost = schedule
    for _ in range(3000):
        schedule = Schedule([schedule])

    def read(held: Any, x: Any) -> Any:
        while isinstance(held.k, list):
            held = held.k[0]
        return held(x)

    assert_follows(Traced("jit", Model(schedule, read)), lambda: setattr(inmost, "k", 5.0))


def test_settings_in_cycles_are_followed() -> None:
    schedule, other = Schedule(), Schedule()
    vars(schedule).update(other=other, itself=[schedule])
    vars(other)["back"] = schedule
    model = Model(schedule, lambda held, x: held.other.back.itself[0](x))
    assert_follows(Traced("jit", model), lambda: setattr(schedule, "k", 5.0))


# --- what settings hold ---


def _contents() -> Iterator[tuple[str, Callable[[], tuple[Any, Callable[[Any], Any]]]]]:
    """Yields (name, function that returns a container and what adds 4 to its sum)."""
    objects = np.array([1.0, [0.0]], object)
    yield "list", lambda: ([1.0], lambda held: held.append(4.0))
    yield "deque", lambda: (collections.deque([1.0]), lambda held: held.append(4.0))
    yield "dict", lambda: ({"a": 1.0}, lambda held: held.update(b=4.0))
    yield "set", lambda: ({1.0}, lambda held: held.add(4.0))
    yield "bytearray", lambda: (bytearray([1]), lambda held: held.append(4))
    yield "array", lambda: (np.array([1.0, 0.0]), lambda held: np.copyto(held, [1.0, 4.0]))
    yield "large array", lambda: (np.r_[1.0, np.zeros(4096)], lambda held: held.put(7, 4.0))
    yield "objects", lambda: (objects.copy(), lambda held: held.put(1, 4.0))
    yield "namespace", lambda: (types.SimpleNamespace(a=1.0), lambda held: setattr(held, "b", 4.0))
    yield (
        "list of collections",
        lambda: (collections.UserList([1.0]), lambda held: held.append(4.0)),
    )


CONTENTS = dict(_contents())


@pytest.mark.parametrize("way", ["jit", "jitted", "argument"])
@pytest.mark.parametrize("kind", CONTENTS)
def test_content_of_settings_is_compared(way: str, kind: str) -> None:
    content, change = CONTENTS[kind]()

    def flat(part: Any) -> Iterator[float]:
        if isinstance(part, (float, int)):
            yield part
            return
        part = vars(part) if isinstance(part, types.SimpleNamespace) else part
        for item in part.values() if isinstance(part, dict) else part:
            yield from flat(item)

    model = Model(Schedule(content), lambda held, x: x * sum(flat(held.k)))
    assert_follows(Traced(way, model), lambda: change(content))


@pytest.mark.parametrize("values", [(1, True), (1, 1.0), (0.0, -0.0), ((1,), [1]), ("1", b"1")])
def test_types_in_settings_count(values: tuple[Any, Any]) -> None:
    schedule = Schedule(values[0])
    traced = Traced("jit", Model(schedule, lambda held, x: x))
    traced()
    schedule.k = values[1]
    assert [traced(), traced(), traced.traces] == [2.0, 2.0, 2]


def test_arrays_of_jax_in_settings_count_by_identity() -> None:
    schedule = Schedule(jnp.float32(1))
    assert_follows(Traced("jit", Model(schedule)), lambda: setattr(schedule, "k", jnp.float32(5)))


def test_objects_of_libraries_in_settings_count_by_identity() -> None:
    held = Schedule([threading.Lock(), jax.make_mesh((1,), ("x",)), np.random.default_rng(0), {}])
    traced = Traced("jit", Model(held, lambda held, x: x))
    traced()
    held.k[2].random()
    assert (traced(), traced.traces) == (2.0, 1)


@pytest.mark.filterwarnings("ignore::shardax.errors.UncertainCaptureWarning")
def test_models_in_settings_given_as_arguments_are_inputs() -> None:
    held = Schedule(Model(Schedule()))
    run = sx.jit(lambda held, x: held.k(x), static="auto")
    first = float(run(held, 1.0))
    held.k.weight.value = jnp.float32(3)
    assert (first, float(run(held, 1.0))) == (2.0, 3.0)


# --- when they are compared ---


def test_settings_that_stay_are_traced_once() -> None:
    schedule = Schedule([1.0, {"a": Slotted(2)}])
    traced = Traced("jit", Model((schedule, Frozen(schedule)), lambda held, x: x))
    unrelated = Model(Schedule())
    sx.jit(lambda m: m.weight * 1)(unrelated)
    for turn in range(5):
        traced()
        unrelated.name = f"turn {turn}"  # an edit of structure elsewhere
    assert traced.traces == 1


def test_settings_back_as_they_were_find_their_program() -> None:
    schedule = Schedule()
    traced = Traced("jit", Model(schedule))
    found = []
    for k in (1.0, 5.0, 1.0, 5.0):
        schedule.k = k
        found.append(traced())
    assert (found, traced.traces) == ([2.0, 10.0, 2.0, 10.0], 2)


def test_settings_shared_by_models_count_for_both() -> None:
    schedule = Schedule()
    run = sx.jit(lambda one, other, x: one(x) + other(x))
    one, other = Model(schedule), Model((schedule,), lambda held, x: held[0](x))
    first = float(run(one, other, 1.0))
    schedule.k = 5.0
    assert (first, float(run(one, other, 1.0))) == (4.0, 20.0)


def test_settings_of_a_replacing_model_are_read() -> None:
    traced = Traced("jit", Model(Schedule()))
    found = [traced()]
    schedule = Schedule(3.0)
    traced.model = Model(schedule, traced.model.read)
    found.append(traced())
    schedule.k = 5.0
    found.append(traced())
    assert found == [2.0, 6.0, 10.0]


def test_settings_replaced_by_equal_ones_are_followed() -> None:
    model = Model(Compared())
    traced = Traced("jit", model)
    traced()
    model.held = Compared()
    assert traced() == 2.0
    model.held.k = 5.0
    assert (traced(), traced.traces) == (10.0, 2)


@pytest.mark.parametrize(
    "transform",
    [
        lambda f, m: sx.vmap(f, in_axes=(None, 0))(m, jnp.ones(3))[0],
        lambda f, m: sx.grad(lambda x: f(m, x))(1.0),
        lambda f, m: sx.scan(lambda c, _: (f(m, c), None), length=1)(jnp.float32(1), None)[0],
        lambda f, m: sx.remat(f)(m, 1.0),
        lambda f, m: sx.cond(True, lambda: f(m, 1.0), lambda: f(m, 1.0)),
    ],
    ids=["vmap", "grad", "scan", "remat", "cond"],
)
@pytest.mark.parametrize("eager", [True, False])
def test_settings_are_followed_under_transforms(
    transform: Callable[[Any, Any], Any], eager: bool
) -> None:
    schedule = Schedule()
    model = Model(schedule)
    run = functools.partial(transform, lambda model, x: model(x))
    call = run if eager else sx.jit(run)
    found = [float(call(model)), float(call(model))]
    schedule.k = 5.0
    assert [*found, float(call(model)), float(call(model))] == [2.0, 2.0, 10.0, 10.0]


def test_settings_changed_within_a_trace_are_followed_there() -> None:
    schedule = Schedule()
    model = Model(schedule)
    inner = sx.jit(lambda model, x: model(x))

    @sx.jit
    def outer(model: Model) -> Any:
        schedule.k = 1.0
        first = inner(model, 1.0)
        schedule.k = 5.0
        return first, inner(model, 1.0)

    assert [*map(float, outer(model))] == [2.0, 10.0]
    assert [*map(float, outer(model))] == [2.0, 10.0]


def test_plain_jax_jit_follows_settings_of_models() -> None:
    schedule = Schedule()
    model, run = Model(schedule), jax.jit(lambda model, x: model(x))
    first = float(run(model, 1.0))
    schedule.k = 5.0
    assert (first, float(run(model, 1.0))) == (2.0, 10.0)


# --- what a trace writes ---


class Counting(Schedule):
    """Settings in which every trace leaves something."""

    def __init__(self, k: float = 1.0) -> None:
        super().__init__(k)
        self.traces = 0
        self.shapes: list[Any] = []

    def __call__(self, x: Any) -> Any:
        self.traces += 1
        self.shapes.append(jnp.shape(x))
        return x * self.table * self.k

    @functools.cached_property
    def table(self) -> float:
        """Made by the first trace."""
        return 1.0


@pytest.mark.parametrize("way", [*OF_MODELS, *OF_ARGUMENTS])
def test_settings_written_by_a_trace_are_traced_once(way: str) -> None:
    counting = Counting()
    traced = Traced(way, Model(counting))
    found = [traced() for _ in range(4)]
    counting.k = 5.0
    found += [traced() for _ in range(4)]
    counting.traces = 100
    found += [traced() for _ in range(4)]
    assert (found, traced.traces, counting.traces) == ([2.0] * 4 + [10.0] * 8, 3, 101)


def test_settings_written_by_traces_of_several_models_settle() -> None:
    counting = Counting()
    one, other = Model(counting), Model((counting,), lambda held, x: held[0](x))
    run = sx.jit(lambda model, x: model(x))
    for _ in range(4):
        for model in (one, other):
            assert float(run(model, 1.0)) == 2.0
    assert counting.traces == 2
    counting.k = 5.0
    for _ in range(4):
        for model in (one, other):
            assert float(run(model, 1.0)) == 10.0
    assert counting.traces == 4


def test_settings_written_by_traces_for_other_shapes_settle() -> None:
    counting = Counting()
    model, run = Model(counting), sx.jit(lambda model, x: model(x))
    for _ in range(3):
        for size in (1, 2, 3):
            run(model, jnp.ones(size))
    assert (counting.traces, len(counting.shapes)) == (3, 3)


def test_value_written_by_its_trace_is_traced_anew() -> None:
    def read(held: Compared, x: Any) -> Any:
        held.k += 1.0
        return x * (held.k - 1.0)

    traced = Traced("jit", Model(Compared(), read))
    assert [traced() for _ in range(3)] == [2.0, 4.0, 6.0]


@pytest.mark.parametrize("edit", [False, True])
def test_settings_written_by_a_trace_survive_edits(edit: bool) -> None:
    counting = Counting()
    model = Model((sx.Param(1.0), counting), lambda held, x: held[1](x))
    run = sx.jit(lambda model, x: model(x))
    for turn in range(4):
        run(model, 1.0)
        if edit:
            model.name = f"turn {turn}"
            model.name = "name"
    assert counting.traces == (2 if edit else 1)


@pytest.mark.parametrize(
    "body",
    [
        lambda m, x: sx.vmap(lambda m, x: m(x), in_axes=(None, 0))(m, x[None])[0],
        lambda m, x: sx.grad(lambda x: m(x))(x),
        lambda m, x: sx.grad(lambda m, x: m(x))(m, x)["weight"],
        lambda m, x: sx.scan(lambda c, _: (m(c), None), length=1)(x, None)[0],
        lambda m, x: sx.fori_loop(0, 1, lambda _, pair: (pair[0], m(x)), (m, x))[1],
        lambda m, x: sx.remat(lambda m, x: m(x))(m, x),
        lambda m, x: sx.cond(x > 0, lambda m: m(x), lambda m: m(x), m),
        lambda m, x: jax.jit(lambda x: m(x))(x),
    ],
    ids=["vmap", "grad", "grad of a model", "scan", "fori_loop", "remat", "cond", "jax.jit"],
)
def test_settings_written_within_transforms_settle(body: Callable[[Any, Any], Any]) -> None:
    counting = Counting()
    model, run = Model(counting), sx.jit(body)
    run(model, jnp.float32(1))
    traces = counting.traces
    found = [float(run(model, jnp.float32(1))) for _ in range(3)]
    assert (len({*found}), counting.traces) == (1, traces)


def test_compiled_program_takes_settings_that_its_trace_wrote() -> None:
    counting = Counting()
    model = Model(counting)
    compiled = sx.jit(lambda model, x: model(x)).lower(model, 1.0).compile()
    assert (float(compiled(model, 1.0)), counting.traces) == (2.0, 1)
    counting.k = 5.0
    with pytest.raises(sx.errors.TransformError, match="another structure"):
        compiled(model, 1.0)


# --- what is refused ---


INCOMPARABLE = {
    "array": lambda: array.array("i", [1]),
    "memoryview": lambda: memoryview(bytearray(1)),
    "dict_keys": lambda: {"a": 1}.keys(),
}


@pytest.mark.parametrize("kind", INCOMPARABLE)
def test_incomparable_part_of_an_argument_is_named(kind: str) -> None:
    held = Schedule({"a": [Slotted(INCOMPARABLE[kind]())]})
    text = rf"The Schedule {{}} is static configuration; .* of the {kind} at its \.k\.a\[0\]\.k "
    runs: list[Any] = []
    automatic = sx.jit(lambda held: runs.append(held), static="auto")
    with pytest.raises(StaticArgumentError, match=text.format(r"at \.held\.x")):
        automatic({"x": held})
    static = sx.jit(lambda held: runs.append(held), static_argnums=0)
    with pytest.raises(
        StaticArgumentError, match=text.format("given as the static argument 'held'")
    ):
        static(held)
    assert runs == []


@pytest.mark.parametrize("kind", INCOMPARABLE)
def test_incomparable_part_of_an_attribute_is_refused(kind: str) -> None:
    held = Schedule((1, INCOMPARABLE[kind]()))
    with pytest.raises(
        StaticAttributeError,
        match=rf"The Schedule given as attribute 'held' of Model .* of the {kind} at its \.k\[1\] ",
    ):
        Model(held)


def test_incomparable_part_set_later_is_named() -> None:
    schedule = Schedule()
    traced = Traced("jit", Model((schedule,), lambda held, x: held[0](x)))
    traced()
    schedule.k = memoryview(bytearray(1))
    with pytest.raises(
        StaticAttributeError,
        match=r"The tuple at \.model\.held .* change of the memoryview at its \[0\]\.k could not",
    ):
        traced()
    assert traced.traces == 1


# --- structure ---


def test_graphdef_differs_with_settings() -> None:
    schedule = Schedule()
    model = Model(schedule)
    before = sx.graphdef(model)
    assert sx.graphdef(model) is before
    schedule.k = 5.0
    assert sx.graphdef(model) != before
    schedule.k = 1.0
    assert sx.graphdef(model) == before


def test_graphdef_with_settings_survives_pickling() -> None:
    model = Model(Compared())
    assert pickle.loads(pickle.dumps(sx.graphdef(model))) == sx.graphdef(model)


def test_retrace_is_explained_by_the_attribute_that_changed() -> None:
    inner = Slotted()
    traced = Traced("jit", Model(Schedule([inner]), lambda held, x: held.k[0](x)))
    traced()
    inner.k = 5.0
    with sx.explain_retraces(file=False) as retraces:
        traced()
    assert retraces[0].reasons == (".model.held.k[0].k was changed in place",)


# --- what it costs ---


def test_steady_call_without_settings_asks_for_none() -> None:
    def calls(held: Any) -> list[str]:
        model, run = Model(held, lambda held, x: x), sx.jit(lambda model, x: model(x))
        for _ in range(3):
            run(model, 1.0)
        found = python_calls(run, model, 1.0)
        return [call for call in found if "_core/graph/" in call]

    assert calls(Frozen((1, "a", jnp.tanh))) == []
    assert calls(Schedule()) != []


@pytest.mark.usefixtures("collecting_only_what_is_new")
def test_settings_and_their_models_are_not_kept_alive() -> None:
    model = Model(Schedule())
    run = sx.jit(lambda model, x: model(x))
    run(model, 1.0)
    model.held.k = 5.0
    run(model, 1.0)
    watches = [weakref.ref(model), weakref.ref(model.held)]
    run.clear_cache()
    del model
    gc.collect()
    assert [watch() for watch in watches] == [None, None]


# --- the law ---

KINDS = [Schedule, Slotted, SlottedBelow, Compared, Hooked]
NUMBERS = st.integers(-3, 3)
HELD = st.recursive(
    NUMBERS,
    lambda inner: (
        st.builds(lambda kind, k: kind(k), st.sampled_from(KINDS), inner)
        | st.lists(inner, max_size=2)
        | st.tuples(inner, inner)
        | st.dictionaries(st.sampled_from("xyz"), inner, max_size=2)
        | st.builds(Frozen, inner)
    ),
    max_leaves=6,
)


def _changeable(held: Any) -> Iterator[Any]:
    """Yields every place of a number that can be set, as a function of the number."""
    for key, item in _items(held):
        if isinstance(item, int) and not isinstance(held, (tuple, Frozen)):
            put = setattr if isinstance(held, (Schedule, Slotted)) else type(held).__setitem__
            yield functools.partial(put, held, key)
        else:
            yield from _changeable(item)


def _items(held: Any) -> list[tuple[Any, Any]]:
    if isinstance(held, (Schedule, Slotted)):
        return [("k", held.k)]
    if isinstance(held, Frozen):
        return [("inner", held.inner)]
    if isinstance(held, dict):
        return list(held.items())
    return list(enumerate(held)) if isinstance(held, (tuple, list)) else []


def _digest(held: Any) -> int:
    if isinstance(held, int):
        return held
    return 7 * len(_items(held)) + sum(
        (i + 2) * _digest(v) for i, (_, v) in enumerate(_items(held))
    )


@settings(max_examples=25, deadline=None)
@given(held=HELD, data=st.data())
def test_compiled_call_gives_what_the_settings_give_now(held: Any, data: st.DataObject) -> None:
    model = Model(Schedule(held), lambda held, x: x * 0 + _digest(held))
    traced = Traced("jit", model)
    assert traced() == _digest(model.held)
    places = [*_changeable(model.held)]
    for _ in range(2 if places else 0):
        data.draw(st.sampled_from(places))(data.draw(NUMBERS))
        assert [traced(), traced()] == [_digest(model.held)] * 2
