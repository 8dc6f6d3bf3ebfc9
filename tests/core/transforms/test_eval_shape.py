# SPDX-License-Identifier: Apache-2.0
"""``eval_shape``: what would be returned, without computing, allocating or changing anything."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

import shardax as sx
from tests.core.transforms.examples import Box, Scale, Tied, values


class Lazy(sx.Module):
    """A lazy kernel, a bias and a random stream."""

    def __init__(self, size: int = 4) -> None:
        self.rngs = sx.Rngs(0)
        self.kernel = sx.Param(
            sx.Init(jax.nn.initializers.normal(), (size, size), rngs=self.rngs), axes=("in", "out")
        )
        self.bias = sx.Param(sx.Init(jax.nn.initializers.zeros, (size,)))

    def __call__(self, x: Any) -> Any:
        return self.kernel @ x + self.bias


def _shapes(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: (leaf.shape, str(leaf.dtype)), tree)


def _live_bytes() -> int:
    return sum(array.nbytes for array in jax.live_arrays())


def test_arrays_become_shapes_and_numbers_too() -> None:
    result = sx.eval_shape(lambda x, n: {"a": x @ x, "b": n + 1}, jnp.ones(3), 2)
    assert _shapes(result) == {"a": ((), "float32"), "b": ((), "int32")}


def test_shape_structs_replace_arrays_and_keywords_pass() -> None:
    x = jax.ShapeDtypeStruct((2, 4), jnp.bfloat16)
    result = sx.eval_shape(lambda m, *, x, scale: m.kernel @ x.T * scale, Lazy(), x=x, scale=2.0)
    assert _shapes(result) == ((4, 2), "float32")


def test_model_larger_than_memory_can_be_evaluated() -> None:
    before = _live_bytes()
    model = sx.eval_shape(lambda: Lazy(10**6))
    assert model.kernel.is_abstract
    assert (model.kernel.shape, model.kernel.axes) == ((10**6, 10**6), ("in", "out"))
    assert _live_bytes() - before < 10**4


def test_class_can_be_given_directly() -> None:
    model = sx.eval_shape(Scale)
    assert type(model) is Scale and model.rate == 0.5
    assert _shapes(sx.state(model).flat()) == {
        ("factor",): ((2,), "float32"),
        ("calls",): ((), "int32"),
    }


def test_lazy_models_stay_lazy() -> None:
    model, x = Lazy(), jax.ShapeDtypeStruct((4,), jnp.float32)
    assert sx.eval_shape(lambda m, x: m(x), model, x).shape == (4,)
    assert sx.eval_shape(lambda x: model(x), x).shape == (4,)
    assert sx.eval_shape(model, x).shape == (4,)
    assert sx.eval_shape(model.__call__, x).shape == (4,)
    assert model.kernel.is_lazy and model.bias.is_lazy


def test_given_model_is_not_changed() -> None:
    model, counter = Scale(), sx.Variable(0)
    structure = sx.graphdef(model)

    def run(m: Scale) -> Any:
        m.factor += 1
        m.extra = sx.Param(jnp.ones(3))
        counter[...] += 1
        return m

    copy = sx.eval_shape(run, model)
    assert copy is not model and copy.extra.shape == (3,)
    assert sx.graphdef(model) == structure and int(counter) == 0
    assert values(model) == {("factor",): [1.0, 1.0], ("calls",): 0}


def test_abstract_copies_keep_structure_and_sharing() -> None:
    model = Box()
    model.tied, model.static = Tied(), ("x", 1)
    model.tied.back = model
    copy = sx.eval_shape(lambda m: m, model)
    assert sx.graphdef(copy) == sx.graphdef(model)
    assert copy.tied.embed is copy.tied.head and copy.tied.back is copy


def test_abstract_model_can_be_given_again() -> None:
    def draw(m: Lazy) -> Any:
        return m(jnp.ones(4)) + jax.random.normal(m.rngs.noise(), (4,))

    model = sx.eval_shape(Lazy)
    assert sx.eval_shape(draw, model).shape == (4,)
    assert sx.eval_shape(lambda: draw(model)).shape == (4,)
    assert model.kernel.is_abstract


def test_random_streams_are_followed_and_do_not_advance() -> None:
    rngs = sx.Rngs(0)
    result = sx.eval_shape(lambda r: jax.random.normal(r.noise(), (3,)), rngs)
    assert result.shape == (3,) and int(rngs.noise.count) == 0


def test_works_inside_compiled_functions() -> None:
    @sx.jit
    def run(model: Scale) -> Any:
        assert sx.eval_shape(lambda m: m(jnp.ones(2)), model).shape == (2,)
        return model(1.0)

    model = Scale()
    run(model)
    assert int(model.calls) == 1


def test_jitted_eval_shape_takes_static_arguments() -> None:
    run = sx.jit(lambda m, times, x: [m(x)] * times, static_argnums=1)
    model = Scale()
    assert [s.shape for s in run.eval_shape(model, 2, jnp.ones(2))] == [(2,), (2,)]
    assert int(model.calls) == 0


def test_exception_propagates_and_changes_nothing() -> None:
    model = Scale()

    def run(m: Scale) -> Any:
        m.grow(1.0)
        return m.factor @ jnp.ones(3)

    with pytest.raises(TypeError, match="dot_general"):
        sx.eval_shape(run, model)
    assert values(model) == {("factor",): [1.0, 1.0], ("calls",): 0}


def test_eval_shape_of_a_known_function_traces_only_what_is_new() -> None:
    traced: list[Any] = []
    model = sx.nn.Linear(2, 3, rngs=sx.Rngs(0))

    def apply(x: Any) -> Any:
        traced.append(x.shape)
        return model(x)

    def shape(rows: int) -> tuple[int, ...]:
        return sx.eval_shape(apply, jax.ShapeDtypeStruct((rows, 2), jnp.float32)).shape

    assert [shape(rows) for rows in (1, 1, 1, 1, 4, 4, 1)] == [
        (r, 3) for r in (1, 1, 1, 1, 4, 4, 1)
    ]
    assert len(traced) == 3 and model.kernel.is_lazy

    # What it closes over is looked up at every call.
    model = sx.nn.Linear(2, 5, rngs=sx.Rngs(0))
    assert shape(1) == (1, 5)
    model.bias = None
    assert shape(1) == (1, 5) and model.kernel.is_lazy
    model = sx.nn.Linear(3, 5, rngs=sx.Rngs(0))
    for _ in range(2):
        with pytest.raises(sx.errors.LayerInputError):
            shape(1)
    model = sx.nn.Linear(2, 4, rngs=sx.Rngs(0))
    assert shape(1) == (1, 4)


def test_eval_shape_of_a_known_function_returns_new_copies() -> None:
    model = sx.nn.Linear(2, 3, rngs=sx.Rngs(0))

    def widened(model: Any) -> Any:
        model.extra = sx.Param(jnp.zeros(7))
        return model

    copies = [sx.eval_shape(widened, model) for _ in range(4)]
    assert len({id(copy) for copy in copies}) == 4 and not hasattr(model, "extra")
    for copy in copies:
        assert copy.extra.shape == (7,) and copy.kernel.axes == model.kernel.axes
        assert isinstance(copy.kernel.value, jax.ShapeDtypeStruct)
