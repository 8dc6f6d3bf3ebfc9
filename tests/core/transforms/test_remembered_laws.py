# SPDX-License-Identifier: Apache-2.0
"""Laws of what a compiled function remembers.

Random programs read numbers and call Modules that stand in random places. Of numbers a compiled
function remembers what ``jax.jit`` of the same function would; of Modules nothing: each call uses
those that plain Python would use.
"""

from __future__ import annotations

import types
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

import shardax as sx

# How a program's text reaches each place.
PLACES = {
    "cell": "cell_{kind}",
    "global": "global_{kind}",
    "default": "default_{kind}",
    "module": "module.{kind}",
    "class": "Class.{kind}",
    "instance": "instance.{kind}",
    "item of a list": "items_{kind}[-1]",
    "item of nested dicts": "nested_{kind}['a']['b'][0]",
    "item of a tuple": "pair_{kind}[1]",
    "result of a helper": "helper_{kind}()",
}
KINDS = ("number", "model")


class Model(sx.Module):
    """Multiplies, and counts its calls."""

    def __init__(self, factor: float) -> None:
        self.factor = sx.Param(jnp.float32(factor))
        self.calls = sx.Variable(jnp.int32(0))

    def __call__(self, x: Any) -> Any:
        self.calls += 1
        return x * self.factor


class World:
    """The places, and functions that read some of them."""

    def __init__(self) -> None:
        self.scope: dict[str, Any] = {
            "module": types.ModuleType("settings"),
            "Class": type("Class", (), {}),
            "instance": types.SimpleNamespace(),
        }
        self.held: dict[tuple[str, str], Any] = {}
        self.cells: list[Callable[[str, Any], None]] = []
        self.functions: list[types.FunctionType] = []
        for place in PLACES:
            self.put(place, "number", 1.0)
            self.put(place, "model", Model(1.0))

    def put(self, place: str, kind: str, value: Any) -> None:
        """Binds what stands in a place anew, or changes its container in place."""
        self.held[place, kind] = value
        if place == "cell":
            for set_cell in self.cells:
                set_cell(kind, value)
        elif place == "default":
            for function in self.functions:
                # A function of numbers alone has no Module among its defaults.
                kinds = KINDS[: len(function.__defaults__ or ())]
                function.__defaults__ = tuple(self.held["default", each] for each in kinds)
        elif place in ("module", "class", "instance"):
            holder = self.scope["Class" if place == "class" else place]
            setattr(holder, kind, value)
        elif place == "global":
            self.scope[f"global_{kind}"] = value
        elif place == "item of a list":
            self.scope.setdefault(f"items_{kind}", [0.0] * 70)[-1] = value
        elif place == "item of nested dicts":
            nested = self.scope.setdefault(f"nested_{kind}", {"a": {"b": [None]}})
            nested["a"]["b"][0] = value
        elif place == "item of a tuple":
            self.scope[f"pair_{kind}"] = (0.0, value)
        else:
            self.scope[f"helper_{kind}"] = lambda: value

    def make(self, numbers: list[str], models: list[str]) -> types.FunctionType:
        """Returns a new function (x) that reads numbers and calls models in these places."""
        texts = [f"x * {PLACES[place].format(kind='number')}" for place in numbers]
        calls = [f"{PLACES[place].format(kind='model')}(x)" for place in models]
        # A function of numbers alone names no Module, whose structure would count otherwise.
        cells = "cell_number, cell_model" if models else "cell_number"
        default_model = ", default_model=default_model_" if models else ""
        source = (
            "def build(cell_number, cell_model, default_number_, default_model_):\n"
            "    def set_cell(kind, value):\n"
            "        nonlocal cell_number, cell_model\n"
            "        if kind == 'number': cell_number = value\n"
            "        else: cell_model = value\n"
            f"    def function(x, default_number=default_number_{default_model}):\n"
            f"        {cells}\n"
            f"        return {' + '.join(['x * 0', *texts])}, {' + '.join(['x * 0', *calls])}\n"
            "    return function, set_cell\n"
        )
        # The places that are no names are in the globals of the function.
        exec(source, self.scope)
        held = [self.held[place, kind] for place in ("cell", "default") for kind in KINDS]
        function, set_cell = self.scope["build"](*held)
        self.cells.append(set_cell)
        self.functions.append(function)
        return function


places = st.sampled_from(list(PLACES))
steps = st.one_of(
    st.tuples(st.just("number"), places, st.integers(1, 4)),
    st.tuples(st.just("model"), places, st.integers(1, 4)),
    st.tuples(st.just("alias"), places, places),
    st.tuples(st.just("write"), places, st.integers(1, 4)),
    st.tuples(st.just("call"), st.integers(0, 2), st.sampled_from([(), (2,)])),
    st.tuples(st.just("make"), st.lists(places, max_size=2), st.lists(places, max_size=2)),
)


def by_jit(function: Any) -> Any:
    return sx.jit(function)


def by_cond(function: Any) -> Any:
    return lambda x: sx.cond(True, function, function, x)


def by_remat(function: Any) -> Any:
    return sx.remat(function)


@given(
    transform=st.sampled_from([by_jit, by_cond, by_remat]),
    numbers=st.lists(places, min_size=1, max_size=2),
    models=st.lists(places, max_size=2),
    sequence=st.lists(steps, min_size=3, max_size=10),
)
@settings(max_examples=60, deadline=None)
def test_compiled_function_remembers_what_jax_would(
    transform: Any, numbers: list[str], models: list[str], sequence: list[Any]
) -> None:
    world = World()
    made: list[tuple[Any, Any, types.FunctionType, bool]] = []

    def make(numbers: list[str], models: list[str]) -> None:
        function = world.make(numbers, models)
        # JAX gets a function of its own over the numbers alone, made at the same time.
        plain = world.make(numbers, [])
        made.append((transform(function), jax.jit(plain), function, not models))

    def call(index: int, shape: tuple[int, ...]) -> None:
        compiled, in_jax, function, has_numbers_alone = made[index % len(made)]
        x = jnp.full(shape, 2.0)
        models_before = {id(m): m for m in world.held.values() if isinstance(m, Model)}
        calls_before = {key: int(m.calls) for key, m in models_before.items()}
        remembered = np.asarray(in_jax(x)[0])
        result = [np.asarray(part) for part in compiled(x)]
        calls = {key: int(m.calls) - calls_before[key] for key, m in models_before.items()}

        expected = [np.asarray(part) for part in function(x)]
        expected_calls = {
            key: int(m.calls) - calls_before[key] - calls[key] for key, m in models_before.items()
        }
        np.testing.assert_array_equal(result[1], expected[1])
        assert calls == expected_calls
        # Traced anew for a Module, a function reads numbers anew; never older ones than in JAX.
        is_fresh = not has_numbers_alone and np.array_equal(result[0], expected[0])
        assert is_fresh or np.array_equal(result[0], remembered)

    make(numbers, models)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", sx.errors.UncertainCaptureWarning)
        call(0, ())
        for kind, *rest in sequence:
            if kind in ("number", "model"):
                place, number = rest
                world.put(place, kind, float(number) if kind == "number" else Model(number))
            elif kind == "alias":
                place, other = rest
                world.put(place, "model", world.held[other, "model"])
            elif kind == "write":
                place, number = rest
                world.held[place, "model"].factor.value = jnp.float32(number)
            elif kind == "make":
                make(*rest)
                call(-1, ())
            else:
                call(*rest)
        for index in range(len(made)):
            call(index, ())
