# SPDX-License-Identifier: Apache-2.0
"""Views of one part of stacked objects: they read and write it, and never stand for a copy."""

from __future__ import annotations

import copy
import gc
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import shardax as sx
from shardax._core.graph.stacking import stack_objects
from shardax._core.graph.views import _views, view
from shardax.errors import ForeignMutationError, ModuleError, TransformError
from tests.advice import run_advice


class Layer(sx.Module):
    def __init__(self, rngs: sx.Rngs) -> None:
        normal = jax.nn.initializers.normal()
        self.kernel = sx.Param(sx.Init(normal, (2,), rngs=rngs), axes=("embed",), tag="a")
        self.parts = [sx.BatchStat(jnp.zeros(2))]
        self.calls = sx.Variable(0)
        self.rate = 0.5

    def __call__(self, x: Any) -> Any:
        self.calls += 1
        self.parts[0][...] = self.parts[0] + x
        return x * self.kernel * self.rate


def stacked() -> Any:
    rngs = sx.Rngs(0)
    return stack_objects([Layer(rngs) for _ in range(3)], "layers").root


def numbers(variable: Any) -> Any:
    return np.asarray(variable.value).tolist()


def calls_of(function: Any) -> int:
    """Counts the calls of Python functions that a call makes."""
    count = 0

    def profile(_frame: Any, event: str, _argument: Any) -> None:
        nonlocal count
        count += event == "call"

    sys.setprofile(profile)
    try:
        function()
    finally:
        sys.setprofile(None)
    return count


# --- what a view is -------------------------------------------------------------------------------


def test_view_has_types_and_structure_of_layer() -> None:
    root = stacked()
    second = view(root, 1)
    assert type(second) is Layer and isinstance(second.kernel, sx.Param)
    assert type(second.kernel).__name__ == "Param"
    assert (second.kernel.shape, second.kernel.axes) == ((2,), ("embed",))
    assert dict(second.kernel.metadata) == {"tag": "a"}
    assert sx.graphdef(second) == sx.graphdef(Layer(sx.Rngs(0))) == sx.graphdef(view(root, 2))


def test_view_of_each_part_is_one_object_held_weakly() -> None:
    gc.collect()
    before = len(_views)
    root = stacked()
    assert view(root, 1) is view(root, 1)
    held = view(root, 1).kernel
    assert view(root, 1).kernel is held
    del root, held
    gc.collect()
    assert len(_views) == before


def test_view_reads_and_writes_its_part() -> None:
    root = stacked()
    second = view(root, 1)
    assert second.kernel.is_lazy and root.kernel.is_lazy
    whole = root.kernel.value
    np.testing.assert_array_equal(second.kernel.value, whole[1])
    second.kernel[...] = jnp.array([3.0, 4.0])
    second.kernel[0] = 5.0
    np.testing.assert_array_equal(root.kernel.value, whole.at[1].set(jnp.array([5.0, 4.0])))
    root.kernel[1] = jnp.zeros(2)
    assert numbers(second.kernel) == [0, 0]


def test_lazy_part_reads_as_the_stacked_layer() -> None:
    root, rngs = stacked(), sx.Rngs(0)
    layers = [Layer(rngs) for _ in range(3)]
    np.testing.assert_array_equal(view(root, 2).kernel.value, layers[2].kernel.value)
    assert not root.kernel.is_lazy


def test_numpy_stays_numpy_other_lazy_values_materialize() -> None:
    class Count(sx.Module):
        def __init__(self) -> None:
            self.stream = sx.Rngs(dropout=0).dropout
            self.scale = sx.Param(sx.Init(jax.nn.initializers.ones, (3, 2)))

    model = Count()
    model.stream.count.value = np.zeros(3, np.uint32)
    model.stream.key.value = jax.random.split(jax.random.key(0), 3)
    second = view(model, 1)
    second.stream()
    assert numbers(model.stream.count) == [0, 1, 0]
    assert second.scale.is_lazy and numbers(second.scale) == [1, 1]


def test_views_of_views() -> None:
    root = stack_objects([stacked(), stacked()], "outer").root
    inner = view(view(root, 1), 2)
    inner.kernel[...] = jnp.array([1.0, 2.0])
    assert inner.kernel.axes == ("embed",)
    np.testing.assert_array_equal(root.kernel.value[1, 2], [1, 2])
    with pytest.raises(ModuleError, match=r"\.first\.kernel .* \.second\.kernel"):
        sx.jit(lambda first, second: None)(view(root, 1), inner)


def test_view_returns_shared_object_itself() -> None:
    class Shared(sx.Module):
        def __init__(self, stream: Any) -> None:
            self.stream = stream
            self.scale = sx.Param(1.0)

    stream = sx.Rngs(dropout=0).dropout
    root = stack_objects([Shared(stream), Shared(stream)], "layers").root
    assert view(root, 0, [stream]).stream is stream


def test_values_are_placed_like_the_stack(mesh: Mesh) -> None:
    there = NamedSharding(mesh, P(None, "data", "model"))
    stacked = sx.Param(jax.device_put(jnp.zeros((3, 4, 8)), there))
    part = view(stacked, 1)
    part[...] = jnp.ones((4, 8))
    assert stacked.sharding == there
    assert stacked.value.sum() == 32 and part.value.sum() == 32


# --- transforms -----------------------------------------------------------------------------------


def test_layer_views_share_one_trace_and_write_through() -> None:
    root = stacked()
    traces = []

    @sx.jit
    def call(layer: Any, x: Any) -> Any:
        traces.append(1)
        return layer(x)

    for index in (0, 1, 2, 1):
        out = call(view(root, index), jnp.ones(2))
        np.testing.assert_allclose(out, root.kernel.value[index] * 0.5)
    assert len(traces) == 1
    assert numbers(root.calls) == [1, 2, 1]
    assert numbers(root.parts[0]) == [[1, 1], [2, 2], [1, 1]]


def test_gradients_with_respect_to_a_view() -> None:
    root = stacked()
    gradient = sx.grad(lambda layer: layer(jnp.ones(2)).sum())(view(root, 1))
    assert numbers(root.calls) == [0, 1, 0]
    assert {path: leaf.tolist() for path, leaf in gradient.flat().items()} == {
        ("kernel",): [0.5, 0.5]
    }


def test_views_inside_transform_use_the_transforms_copy() -> None:
    root = stacked()

    @sx.jit
    def run(root: Any, x: Any) -> Any:
        for index in range(3):
            x = view(root, index)(x)
        return x, root.calls.value

    first, second, third = np.asarray(root.kernel.value)
    out, calls = run(root, jnp.ones(2))
    np.testing.assert_allclose(out, first * second * third / 8, rtol=1e-6)
    assert calls.tolist() == [1, 1, 1] and numbers(root.calls) == [1, 1, 1]


@pytest.mark.parametrize("transform", [sx.grad, lambda f: sx.jit(sx.grad(f))], ids=["grad", "jit"])
def test_captured_view_follows_its_stack_inside_transform(transform: Any) -> None:
    kernel = sx.Param(jnp.array([[1.0], [2.0]]))
    second = view(kernel, 1)

    def double(x: Any) -> Any:
        second[...] = second * 2
        return (second * x).sum()

    assert float(transform(double)(1.0)) == 4 and numbers(kernel) == [[1], [4]]


def test_captured_view_and_its_captured_stack_agree() -> None:
    kernel = sx.Param(jnp.array([[1.0], [2.0]]))
    second = view(kernel, 1)

    def both(x: Any) -> Any:
        second[...] = second * 2
        return (kernel * x).sum()

    assert float(sx.grad(both)(1.0)) == 5 and numbers(kernel) == [[1], [4]]


def test_plain_jax_sees_a_layer_by_itself() -> None:
    root = stacked()
    second = view(root, 1)
    doubled = jax.jit(lambda layer: jax.tree.map(lambda x: x * 2, layer))(second)
    assert type(doubled.kernel) is sx.Param
    np.testing.assert_array_equal(doubled.kernel.value, second.kernel.value * 2)
    with pytest.raises(sx.errors.ModuleError):
        jax.jit(lambda root: view(root, 0)(jnp.ones(2)))(root)


@pytest.mark.parametrize("duplicate", [sx.clone, copy.deepcopy], ids=["clone", "deepcopy"])
def test_copies_are_layers_of_their_own(duplicate: Any) -> None:
    root = stacked()
    before = np.asarray(root.kernel.value)
    twin = duplicate(view(root, 1))
    assert type(twin.kernel) is sx.Param
    twin.kernel[...] = jnp.zeros(2)
    twin.rate = 1.0
    np.testing.assert_array_equal(root.kernel.value, before)


# --- structure ------------------------------------------------------------------------------------


def test_view_follows_changes_of_the_stack() -> None:
    root = stacked()
    second, parts = view(root, 1), view(root, 1).parts
    root.rate = 2.0
    root.parts.append(sx.Param(jnp.arange(3.0)))
    root.kernel.set_metadata(axes=("layers", "mlp"))
    assert (second.rate, len(parts), float(parts[1]), second.kernel.axes) == (2, 2, 1, ("mlp",))
    del root.rate
    assert not hasattr(second, "rate")


def refused() -> dict[str, Any]:
    def write(value: Any) -> Any:
        return lambda root: setattr(view(root, 1).kernel, "value", value)

    return {
        "attribute": (ForeignMutationError, lambda root: setattr(view(root, 1), "rate", 1.0)),
        "list": (ForeignMutationError, lambda root: view(root, 1).parts.append(1)),
        "inside": (
            ForeignMutationError,
            lambda root: sx.jit(lambda layer: setattr(layer, "new", 1))(view(root, 1)),
        ),
        "metadata": (ModuleError, lambda root: view(root, 1).kernel.set_metadata(b=1)),
        "metadata inside": (
            ModuleError,
            lambda root: sx.jit(lambda layer: layer.kernel.set_metadata(b=1))(view(root, 1)),
        ),
        "shape": (ModuleError, write(jnp.ones(3))),
        "dtype": (ModuleError, write(jnp.ones(2, jnp.bfloat16))),
        "abstract": (ModuleError, write(jax.ShapeDtypeStruct((2,), jnp.float32))),
        "together": (ModuleError, lambda root: sx.state((root, view(root, 1)))),
        "returned": (TransformError, lambda root: sx.jit(lambda root: view(root, 1))(root)),
        "attached": (
            TransformError,
            lambda root: sx.jit(lambda root: setattr(root, "first", view(root, 0)))(root),
        ),
        "stack inside": (
            ModuleError,
            lambda root: sx.grad(lambda layer: (layer.kernel * root.kernel).sum())(view(root, 1)),
        ),
    }


@pytest.mark.parametrize("what", refused())
def test_unsupported_view_operation_is_refused_without_effect(what: str) -> None:
    root = stacked()
    sx.state(root)
    before = sx.graphdef(root), sx.state(root).flat()
    error, action = refused()[what]
    with pytest.raises(error, match=r"layer") as caught:
        action(root)
    if "sx.clone(stack[i])" in str(caught.value):
        names = {"sx": sx, "stack": [view(root, i) for i in range(3)], "i": 1}
        layer = run_advice(caught.value, "sx.clone(stack[i])", names)
        assert len(sx.state((root, layer)).flat()) == 6
    assert sx.graphdef(root) == before[0]
    for path, value in sx.state(root).flat().items():
        np.testing.assert_array_equal(value, before[1][path])


def test_view_writes_are_all_cancelled_when_one_is_refused() -> None:
    root = stacked()
    sx.state(root)

    @sx.jit
    def spoil(layer: Any) -> None:
        layer.calls += 1
        layer.kernel.value = jnp.ones(3)

    with pytest.raises(ModuleError, match=r"float32\[3\].*float32\[2\]"):
        spoil(view(root, 1))
    assert numbers(root.calls) == [0, 0, 0]


def test_part_of_an_abstract_stack_is_abstract() -> None:
    kernel = sx.Param(jax.ShapeDtypeStruct((3, 2), jnp.float32))
    part = view(kernel, 1)
    assert part.is_abstract and part.shape == (2,)
    with pytest.raises(ModuleError, match="abstract"):
        part.value = jnp.ones(2)


def test_edits_leave_views_of_others_alone() -> None:
    other = Layer(sx.Rngs(0))

    def edit() -> None:
        sx.graphdef(other)  # remembered, so that an edit must tell
        other.rate += 1.0

    edit()
    before = calls_of(edit)
    roots = [stacked() for _ in range(3)]
    held = [view(root, index) for root in roots for index in range(3)]
    assert calls_of(edit) == before
    # Those of a view's views follow too.
    outer = stack_objects([stacked(), stacked()], "blocks").root
    inner = view(view(outer, 1), 2)
    outer.parts.append(sx.BatchStat(jnp.ones((2, 3, 2))))
    outer.rate = 0.25
    assert (numbers(inner.parts[1]), inner.rate) == ([1.0, 1.0], 0.25)
    assert {layer.rate for layer in held} == {0.5}


def test_shape_is_written_to_a_part_without_effect() -> None:
    kernel = sx.Param(jax.ShapeDtypeStruct((3, 2), jnp.float32))
    view(kernel, 1).value = jax.ShapeDtypeStruct((2,), jnp.float32)
    assert kernel.value == jax.ShapeDtypeStruct((3, 2), jnp.float32)


def test_lazy_value_written_to_a_part_is_made() -> None:
    kernel = sx.Param(jnp.zeros((3, 2)))
    view(kernel, 1).value = sx.Init(jax.nn.initializers.ones, (2,))
    assert kernel.tolist() == [[0.0, 0.0], [1.0, 1.0], [0.0, 0.0]]
