# SPDX-License-Identifier: Apache-2.0
"""A Variable stands where its array could: operators, conversions, NumPy and JAX on either side."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import shardax as sx
from shardax.errors import ModuleError, VariableValueError
from tests.advice import run_advice
from tests.strategies import assert_equal_values

FLOATS, INTS = jnp.asarray([[1.5, -2.0], [0.5, 3.0]]), jnp.asarray([[5, 2], [3, 7]])
ARITHMETIC = [
    operator.add, operator.sub, operator.mul, operator.truediv, operator.floordiv, operator.mod,
    operator.pow, operator.matmul,
]  # fmt: skip
BITWISE = [operator.and_, operator.or_, operator.xor, operator.lshift, operator.rshift]
COMPARISONS = [operator.eq, operator.ne, operator.lt, operator.le, operator.gt, operator.ge]
IN_PLACE = [
    operator.iadd, operator.isub, operator.imul, operator.itruediv, operator.ifloordiv,
    operator.imod, operator.ipow, operator.imatmul,
]  # fmt: skip
IN_PLACE_BITWISE = [
    operator.iand, operator.ior, operator.ixor, operator.ilshift, operator.irshift,
]  # fmt: skip


def _name(function: Any) -> str:
    return function.__name__


@pytest.mark.parametrize("function", [*ARITHMETIC, *COMPARISONS, divmod], ids=_name)
@pytest.mark.parametrize("convert", [jnp.asarray, np.asarray, sx.Param], ids=_name)
def test_binary_operators_equal_array_operators_on_both_sides(
    function: Callable[[Any, Any], Any], convert: Callable[[Any], Any]
) -> None:
    other = jnp.asarray([[2.0, 1.0], [4.0, 2.0]])
    assert_equal_values(function(sx.Param(FLOATS), convert(other)), function(FLOATS, other))
    assert_equal_values(function(convert(other), sx.Param(FLOATS)), function(other, FLOATS))


@pytest.mark.parametrize("function", BITWISE, ids=_name)
@pytest.mark.parametrize("convert", [jnp.asarray, np.asarray, sx.Variable], ids=_name)
def test_bitwise_operators_equal_array_operators_on_both_sides(
    function: Callable[[Any, Any], Any], convert: Callable[[Any], Any]
) -> None:
    other = jnp.asarray([[1, 2], [3, 1]])
    assert_equal_values(function(sx.Variable(INTS), convert(other)), function(INTS, other))
    assert_equal_values(function(convert(other), sx.Variable(INTS)), function(other, INTS))


@pytest.mark.parametrize("number", [2, 2.0, np.float32(2), np.int32(2)], ids=repr)
def test_numbers_promote_as_with_the_array(number: Any) -> None:
    for function in (operator.add, operator.truediv, operator.pow, operator.lt):
        for array in (INTS, FLOATS.astype(jnp.bfloat16)):
            assert_equal_values(function(sx.Variable(array), number), function(array, number))
            assert_equal_values(function(number, sx.Variable(array)), function(number, array))


@pytest.mark.parametrize(
    "function", [operator.neg, operator.pos, abs, operator.invert, round, lambda v: round(v, 1)]
)
def test_unary_operators_equal_those_of_the_array(function: Callable[[Any], Any]) -> None:
    array = INTS if function is operator.invert else FLOATS
    assert_equal_values(function(sx.Variable(array)), function(array))


@pytest.mark.parametrize("function", [*IN_PLACE, *IN_PLACE_BITWISE], ids=_name)
def test_in_place_operators_write_into_the_variable(function: Callable[[Any, Any], Any]) -> None:
    array = INTS if function in IN_PLACE_BITWISE else FLOATS
    for other in (array, sx.Variable(array), np.asarray(array)):
        variable = sx.Param(array, tag="kept")
        assert function(variable, other) is variable
        assert_equal_values(variable.value, function(array, array))
        assert dict(variable.metadata) == {"tag": "kept"}


def test_in_place_operator_on_attribute_keeps_the_variable() -> None:
    class Counter(sx.Module):
        def __init__(self) -> None:
            self.count = sx.Variable(0)

    counter = Counter()
    variable = counter.count
    counter.count += 2
    assert counter.count is variable and int(variable) == 2


def test_conversions_equal_those_of_the_array() -> None:
    assert (bool(sx.Variable(1)), bool(sx.Variable(0.0))) == (True, False)
    assert (int(sx.Variable(2.7)), float(sx.Variable(2)), complex(sx.Variable(1j))) == (2, 2.0, 1j)
    assert [10, 20, 30][sx.Variable(1)] == 20
    assert f"{sx.Variable(1.25):.1f}" == f"{jnp.float32(1.25):.1f}" == "1.2"
    assert f"{sx.Variable(1.25)}" == "Variable(float32[])"
    with pytest.raises(TypeError, match="integer"):
        operator.index(sx.Variable(1.5))
    with pytest.raises(ValueError, match="ambiguous"):
        bool(sx.Variable(FLOATS))


def test_variable_is_a_sequence_as_its_array_is() -> None:
    variable = sx.Param(FLOATS)
    assert len(variable) == 2
    assert [row.tolist() for row in variable] == FLOATS.tolist()
    assert 3.0 in variable[1] and 3.0 in sx.Param(FLOATS[1]) and 9.0 not in sx.Param(FLOATS[1])
    with pytest.raises(TypeError):
        len(sx.Param(1.0))


def test_methods_and_properties_of_the_array_are_there() -> None:
    variable = sx.Param(FLOATS)
    assert variable.T.tolist() == FLOATS.T.tolist()
    assert float(variable.sum()) == float(FLOATS.sum())
    assert variable.at[0, 0].set(9.0)[0, 0] == 9.0
    assert variable.astype(jnp.bfloat16).dtype == jnp.bfloat16
    with pytest.raises(AttributeError, match="no_such_method"):
        _ = variable.no_such_method
    with pytest.raises(AttributeError, match="Param has no attribute '_private'"):
        _ = variable._private


def test_numpy_reads_it_as_an_array() -> None:
    variable = sx.Param(FLOATS)
    assert np.asarray(variable).tolist() == FLOATS.tolist()
    assert np.asarray(variable, np.int32).dtype == np.int32
    assert np.sin(variable).tolist() == np.sin(np.asarray(FLOATS)).tolist()
    assert np.stack([variable, variable]).shape == (2, 2, 2)
    copied = np.array(variable, copy=True)
    copied[0, 0] = 100
    assert float(variable[0, 0]) == 1.5


@pytest.mark.parametrize(
    "function",
    [
        *(jnp.sin, jnp.sum, jnp.asarray, jax.nn.relu, jax.nn.softmax, jnp.linalg.norm, jnp.argmax),
        lambda v: jnp.dot(v, v),
        lambda v: jnp.where(v > 0, v, 0.0),
        lambda v: jnp.stack([v, v]),
        lambda v: jnp.einsum("ij,jk->ik", v, v),
        lambda v: jax.jit(jnp.sin)(v),
    ],
)
def test_jax_functions_take_it_as_an_array(function: Callable[[Any], Any]) -> None:
    assert_equal_values(jax.tree.leaves(function(sx.Param(FLOATS))), [function(FLOATS)])


def test_hash_is_identity_while_equality_is_elementwise() -> None:
    one, other = sx.Param(FLOATS), sx.Param(FLOATS)
    assert {one: 1, other: 2}[one] == 1
    assert (one == other).tolist() == [[True, True], [True, True]]


def test_in_place_numpy_operator_behaves_as_with_array() -> None:
    with_array = with_variable = np.zeros((2, 2), np.float32)
    with_array += FLOATS
    with_variable += sx.Param(FLOATS)
    assert type(with_variable) is type(with_array)
    assert_equal_values(with_variable, with_array)


# --- which values are allowed ---


@pytest.mark.parametrize(
    ("value", "dtype"),
    [
        (True, jnp.bool_), (1, jnp.int32), (1.0, jnp.float32), (1j, jnp.complex64),
        (np.float64(1), jnp.float32), (np.ones(2), jnp.float32), (np.arange(2), jnp.int32),
        (np.ones(2, np.float16), jnp.float16), (np.ones(2, jnp.bfloat16), jnp.bfloat16),
        (np.uint64(3), jnp.uint32), ([], None), (None, None),
    ],
    ids=repr,
)  # fmt: skip
def test_numbers_and_numpy_arrays_get_jax_canonical_dtype(value: Any, dtype: Any) -> None:
    variable = sx.Variable(value)
    if dtype is None:
        assert variable.value == value
    else:
        assert isinstance(variable.value, jax.Array)
        assert variable.dtype == variable.value.dtype == dtype


@given(seed=st.integers(-(2**31), 2**31 - 1))
def test_variable_keeps_every_int32(seed: int) -> None:
    assert int(sx.Variable(seed)) == seed


@pytest.mark.parametrize("number", [2**31, -(2**31) - 1, 2**40])
def test_number_too_wide_for_jax_is_refused(number: int) -> None:
    with pytest.raises(VariableValueError, match=f"{number} does not fit into int32"):
        sx.Variable(number)


@pytest.mark.parametrize(
    "value",
    [
        *("relu", object(), len, {"a": "text"}, [1.0, sx.List()], sx.Dict(), np.array(["a"])),
        *(np.array([object()]), np.array(["2020"], np.datetime64), np.zeros(1, [("a", int)])),
    ],
    ids=lambda value: type(value).__name__,
)
def test_variable_refuses_value_not_made_of_arrays(value: Any) -> None:
    with pytest.raises(VariableValueError, match="A Variable holds arrays"):
        sx.Variable(value)
    variable = sx.Variable(1.0)
    with pytest.raises(VariableValueError, match="A Variable holds arrays"):
        variable.value = value
    assert float(variable) == 1.0


def test_variable_given_as_value_contributes_its_value() -> None:
    inner = sx.Param(jnp.ones(2), axes=("embed",))
    for variable in (sx.BatchStat(inner), sx.BatchStat(0.0).replace(inner)):
        assert isinstance(variable.value, jax.Array) and variable.axes is None
    outer = sx.Variable(0.0)
    outer.value = inner
    assert isinstance(outer.value, jax.Array)
    outer[...] = inner
    assert isinstance(outer.value, jax.Array)
    assert isinstance(sx.Variable({"a": inner}).value["a"], jax.Array)


def test_later_numpy_writes_do_not_reach_the_variable() -> None:
    source = np.zeros(1000, np.float32)
    before_reading, read = sx.Param(source), sx.Param(source)
    read_value = read.value
    source[:] = 1
    assert float(before_reading.sum()) == float(read.sum()) == float(read_value.sum()) == 0.0


def test_abstract_variable_knows_shape_and_refuses_to_compute() -> None:
    variable = sx.Param(jax.ShapeDtypeStruct((2, 3), jnp.bfloat16), axes=("embed", "mlp"))
    assert (variable.shape, variable.dtype, variable.is_abstract) == ((2, 3), jnp.bfloat16, True)
    for use in (lambda v: v + 1, np.sin, np.asarray, float, lambda v: v.sum(), abs):
        with pytest.raises(ModuleError, match=r"abstract \(bfloat16\[2, 3\]\)") as caught:
            use(variable)
        model = [sx.Param(jax.ShapeDtypeStruct((2, 3), jnp.bfloat16))]
        names = {"sx": sx, "model": model, "state": {0: jnp.ones((2, 3), jnp.bfloat16)}}
        run_advice(caught.value, "sx.update(model, state)", names)
        assert float(model[0].sum()) == 6.0


def test_pytree_in_a_variable_has_no_array_method() -> None:
    pair = sx.Variable((jnp.ones(2), jnp.ones(3)))
    with pytest.raises(AttributeError) as caught:
        pair.sum()
    assert str(caught.value) == (
        "This Variable holds a pytree of 2 arrays, which has no single shape or dtype; look at "
        "jax.tree.leaves(v.value)."
    )
    with pytest.raises(AttributeError, match="'tuple' object has no attribute 'colour'"):
        _ = pair.colour
