# SPDX-License-Identifier: Apache-2.0
"""``v[...] = x`` and operators in place keep shape and dtype; ``v.value = x`` replaces."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardax as sx
from shardax.errors import VariableValueError
from tests.advice import run_advice


def _param(dtype: Any = jnp.float32) -> sx.Param[Any]:
    return sx.Param(jnp.zeros((2, 3), dtype), axes=("a", "b"))


NEW = [7.0, np.arange(3.0)[None], np.ones((2, 1)), jnp.arange(3)[None], jnp.ones((2, 3))]


@pytest.mark.parametrize("index", [..., slice(None), (), (..., slice(None))], ids=str)
def test_whole_write_broadcasts_and_casts(index: Any) -> None:
    for new in NEW:
        variable = _param(jnp.bfloat16)
        variable[index] = new
        assert (variable.dtype, variable.axes) == (jnp.bfloat16, ("a", "b"))
        _assert_broadcast(variable, new)


def test_whole_write_in_jit_broadcasts() -> None:
    variables = [_param(jnp.bfloat16) for _ in NEW]

    @sx.jit
    def write(variables: Any, arrays: Any) -> None:
        for variable, array in zip(variables, arrays, strict=True):
            variable[...] = array

    write(variables, NEW)
    for variable, new in zip(variables, NEW, strict=True):
        assert variable.dtype == jnp.bfloat16
        _assert_broadcast(variable, new)


def _assert_broadcast(variable: Any, new: Any) -> None:
    numbers = np.asarray(variable.value, np.float32)
    np.testing.assert_array_equal(numbers, np.broadcast_to(np.asarray(new), (2, 3)))


@pytest.mark.parametrize(
    ("dtype", "new", "words"),
    [
        (jnp.float32, np.zeros(2), r"shape \[2\], which does not broadcast"),
        (jnp.float32, np.zeros((1, 2, 3)), r"shape \[1, 2, 3\], which does not broadcast"),
        (jnp.float32, {"a": 1.0}, "given a dict"),
        (jnp.int32, jnp.ones(3), "float32, which it cannot hold"),
        (jnp.int32, 0.5, "number 0.5, which it cannot hold"),
        (jnp.int8, 300, "number 300, which it cannot hold"),
        (jnp.float32, 1j, "number 1j, which it cannot hold"),
        (jnp.bool_, jnp.ones(3, jnp.int32), "int32, which it cannot hold"),
    ],
    ids=["short", "deep", "dict", "floats", "fraction", "large", "complex", "flags"],
)
def test_whole_write_refuses_misfits(dtype: Any, new: Any, words: str) -> None:
    variable = _param(dtype)
    with pytest.raises(VariableValueError, match=words):
        variable[...] = new
    np.testing.assert_array_equal(variable.value, np.zeros((2, 3)))
    variable.value = jnp.asarray(1.0) if isinstance(new, dict) else new  # as the error says


def test_whole_write_takes_exact_numbers() -> None:
    count, flag = sx.Variable(jnp.int32(3)), sx.Variable(jnp.zeros(2, bool))
    count[...], flag[...] = 0.0, 1
    assert (int(count), count.dtype) == (0, jnp.int32)
    assert flag.value.tolist() == [True, True]


def test_whole_write_keeps_the_dtype_of_keys() -> None:
    keys = sx.Variable(jax.random.split(jax.random.key(0), 2))
    keys[...] = jax.random.key(1)
    data = jax.random.key_data(jax.random.key(1))
    np.testing.assert_array_equal(jax.random.key_data(keys.value), [data, data])
    with pytest.raises(VariableValueError, match="uint32, which it cannot hold"):
        keys[...] = jnp.uint32(1)


def test_whole_write_keeps_structure() -> None:
    nested = sx.Variable({"a": jnp.zeros(2), "b": jnp.zeros((), jnp.int32)})
    nested[...] = {"a": 1.0, "b": 2}
    assert jax.tree.map(lambda x: x.tolist(), nested.value) == {"a": [1.0, 1.0], "b": 2}
    with pytest.raises(VariableValueError, match=r"holds|of PyTreeDef.*v\.value = x"):
        nested[...] = jnp.ones(2)
    empty = sx.Variable(None)
    empty[...] = jnp.ones(2)
    assert empty.value.tolist() == [1.0, 1.0]


def test_whole_write_of_a_named_array() -> None:
    variable = sx.Variable(sx.named.wrap(jnp.zeros((2, 3)), "a", "b"))
    variable[...] = sx.named.wrap(jnp.arange(3.0), "b")
    assert variable.value.axes == {"a": 2, "b": 3}
    np.testing.assert_array_equal(variable.value.unwrap("a", "b"), [[0, 1, 2]] * 2)


def test_whole_write_of_lazy_values() -> None:
    variable = sx.Param(sx.Init(jax.nn.initializers.ones, (2, 3)))
    variable[...] = sx.Init(jax.nn.initializers.zeros, (2, 3))
    assert variable.is_lazy and variable.value.tolist() == [[0.0] * 3] * 2
    variable = sx.Param(sx.Init(jax.nn.initializers.ones, (2, 3)))
    variable[...] = 5
    assert (variable.dtype, variable.value.tolist()) == (jnp.float32, [[5.0] * 3] * 2)


def test_whole_write_stays_on_the_mesh() -> None:
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    place = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    variable = sx.Param(jax.device_put(jnp.ones((2, 3)), place))
    variable[...] = np.arange(3.0)
    assert variable.sharding == place and variable.value.tolist() == [[0.0, 1.0, 2.0]] * 2


def test_whole_write_keeps_an_explicit_layout() -> None:
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Explicit,))
    with jax.set_mesh(mesh):
        place = jax.sharding.PartitionSpec("data", None)
        variable = sx.Param(jax.device_put(jnp.ones((2, 3)), place))

        @sx.jit
        def reset(variable: Any) -> None:
            variable[...] = 0

        reset(variable)
        assert jax.typeof(variable.value).sharding.spec == place


def test_whole_write_of_a_view() -> None:
    stack = sx.nn.Stack(lambda: sx.nn.Linear(2, 3, rngs=sx.Rngs(0)), 2)
    stack[1].bias[...] = 4
    assert stack[0].bias.value.tolist() == [0.0] * 3 and stack[1].bias.value.tolist() == [4.0] * 3


def test_operators_in_place_keep_shape_and_dtype() -> None:
    weight, count = sx.Param(jnp.ones((1, 2), jnp.bfloat16)), sx.Variable(jnp.int32(1))
    weight += jnp.ones((1, 2), jnp.float32)
    count += 2
    assert (weight.dtype, weight.value.tolist()) == (jnp.bfloat16, [[2.0, 2.0]])
    assert (count.dtype, int(count)) == (jnp.int32, 3)
    with pytest.raises(VariableValueError, match="float32, which it cannot hold"):
        count *= 0.5
    with pytest.raises(VariableValueError, match=r"shape \[3, 2\]"):
        weight *= jnp.ones((3, 1))
    count.value = count * 0.5  # as the error says
    assert float(count) == 1.5


def test_ref_keeps_its_shape_and_dtype() -> None:
    variable = _param()
    variable.value = jax.new_ref(jnp.ones(3))
    new = np.zeros(4, np.float32)
    with pytest.raises(
        VariableValueError, match=r"a jax\.Ref of float32\[3\].*float32\[4\]"
    ) as caught:
        variable.value = new
    np.testing.assert_array_equal(variable.value, np.ones(3))
    run_advice(caught.value, "v.value = jax.new_ref(x)", {"jax": jax, "v": variable, "x": new})
    np.testing.assert_array_equal(variable.value, new)


def test_part_of_a_variable_refuses_another_kind() -> None:
    weight = sx.Param(jnp.ones((2, 3)))
    with pytest.raises(VariableValueError) as caught:
        weight[0] = jnp.ones(3, jnp.complex64)
    assert str(caught.value) == (
        "v[...] = x keeps shape and dtype, but a Param of float32[2, 3] was given complex64, which "
        "it cannot hold (v[...] = x.astype(v.dtype) casts nevertheless); nothing was written. To "
        "replace the value write v.value = x."
    )
    assert weight.tolist() == [[1.0] * 3] * 2


@pytest.mark.parametrize(
    ("index", "text", "part"),
    [
        (slice(None), ":", "[2, 3]"),
        (0, "0", "[3]"),
        ((slice(0, 1), -1), "0:1, -1", "[1]"),
        ((..., slice(None, None, 2)), "..., ::2", "[2, 2]"),
        (np.array([True, False]), "<ndarray[2]>", "[1, 3]"),
    ],
)
@pytest.mark.parametrize("around", [lambda f: f, sx.jit], ids=["eager", "jit"])
def test_part_that_does_not_fit_names_path_and_shapes(
    index: Any, text: str, part: str, around: Any
) -> None:
    class Model(sx.Module):
        def __init__(self) -> None:
            self.layer = {"w": sx.Param(jnp.ones((2, 3)))}

    model = Model()

    def write(model: Model) -> None:
        model.layer["w"][index] = jnp.ones(5)

    with pytest.raises(VariableValueError) as caught:
        around(write)(model)
    assert str(caught.value).startswith(
        f"model.layer.w: v[{text}] = x writes float32{part}, but x has float32[5], which does not "
        "broadcast to it; nothing was written."
    )
    run_advice(caught.value, "v.value = x", {"v": model.layer["w"], "x": jnp.ones(5)})
    assert model.layer["w"].shape == (5,)


def test_whole_write_that_does_not_fit_names_the_path() -> None:
    model = {"layer": sx.nn.Linear(2, 3, rngs=sx.Rngs(0))}
    layer = model["layer"]
    with pytest.raises(VariableValueError, match=r"^layer\.bias: v\[\.\.\.\] = x keeps shape"):
        layer.bias[...] = jnp.ones(4)
    with pytest.raises(VariableValueError, match=r"^layer\.bias: v\[\.\.\.\] = x .* complex64"):
        layer.bias[0] = jnp.ones((), jnp.complex64)


def test_index_that_does_not_fit_is_an_error_of_jax_with_a_note() -> None:
    layer = sx.nn.Linear(2, 3, rngs=sx.Rngs(0))
    for index, error in ((("a"), TypeError), ((0, 0, 0), IndexError), (1.5, TypeError)):
        with pytest.raises(error) as caught:
            layer.kernel[index] = 1.0
        assert caught.value.__notes__[-1] == (
            "In a write into layer.kernel, a Param of shape (2, 3)."
        )


def test_shape_assigned_to_an_abstract_variable_keeps_form() -> None:
    weight = sx.abstract(sx.Param(jnp.ones((2, 3))))
    weight[...] = jax.ShapeDtypeStruct((3,), jnp.bfloat16)
    assert weight.value == jax.ShapeDtypeStruct((2, 3), jnp.float32)
