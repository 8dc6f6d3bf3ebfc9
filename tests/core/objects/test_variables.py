# SPDX-License-Identifier: Apache-2.0
"""Variables: cells with identity, a value, and metadata."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardax as sx
from shardax.errors import MetadataError, VariableValueError
from tests.advice import run_advice
from tests.strategies import Custom, assert_equal_values
from tests.structure import structure_epoch

BUILT_IN = [
    *(sx.Variable, sx.Param, sx.BatchStat, sx.Cache, sx.Intermediate, sx.Perturbation),
    *(sx.RngState, sx.OptState, sx.MetricState),
]


@pytest.mark.parametrize("kind", [*BUILT_IN, Custom])
def test_variable_type_is_its_own_pytree_node(kind: type[sx.Variable[Any]]) -> None:
    variable = kind(jnp.ones(2), axes=("embed",), tag="x")
    doubled = jax.tree.map(lambda x: 2 * x, variable)
    assert type(doubled) is kind and doubled is not variable
    assert (doubled.value.tolist(), doubled.axes) == ([2.0, 2.0], ("embed",))
    assert dict(doubled.metadata) == {"tag": "x"}


def test_subclass_may_define_constructor_and_methods() -> None:
    class Scaled(sx.Param[jax.Array]):
        def __init__(self, value: Any, factor: float) -> None:
            super().__init__(value, factor=factor)

        def scaled(self) -> jax.Array:
            return self.value * self.metadata["factor"]

    variable = Scaled(jnp.ones(2), 3.0)
    copied = jax.tree.map(lambda x: x + 1, variable)
    assert (variable.scaled().tolist(), copied.scaled().tolist()) == ([3.0, 3.0], [6.0, 6.0])


def test_untracked_attributes_are_refused() -> None:
    for variable in (sx.Param(1.0), Custom(1.0)):
        with pytest.raises(AttributeError):
            variable.note = "lost"


# --- reading and writing ---


def test_missing_attribute_names_the_variable_and_its_metadata() -> None:
    v = sx.Param(jnp.ones(3), note="slow", axes=("embed",))
    with pytest.raises(AttributeError) as caught:
        v.note  # noqa: B018
    described = "Param(float32[3], axes=('embed',), note='slow')"
    assert str(caught.value) == (
        f"{described} has no attribute 'note': it is an entry of its metadata, v.metadata['note']."
    )
    assert run_advice(caught.value, "v.metadata['note']", {"v": v}) == "slow"
    assert (caught.value.name, caught.value.obj) == ("note", v)
    with pytest.raises(AttributeError) as caught:
        v.vale  # noqa: B018
    assert str(caught.value) == f"{described} has no attribute 'vale', nor has its value."
    assert v.mean() == 1 and not hasattr(v, "axis")


def test_reads_whole_or_at_an_index() -> None:
    variable = sx.Param(jnp.arange(6).reshape(2, 3))
    assert_equal_values(variable[...], variable.value)
    assert variable[1].tolist() == [3, 4, 5]
    assert variable[0, ::2].tolist() == [0, 2]
    assert variable[jnp.asarray([1, 1]), 0].tolist() == [3, 3]


def test_replacing_a_value_takes_its_dtype() -> None:
    variable = sx.Param(jnp.ones(2, jnp.float32), axes=("embed",))
    variable.value = jnp.ones(2, jnp.bfloat16)
    assert variable.dtype == jnp.bfloat16
    variable.value = np.arange(2)
    assert variable.dtype == jnp.int32
    assert variable.axes == ("embed",)


def test_indexed_write_keeps_the_variable_dtype() -> None:
    variable = sx.Param(jnp.zeros(3, jnp.int32))
    variable[1] = 5
    variable[2:] = np.asarray([7.0], np.float32).astype(np.int32)
    assert variable.value.tolist() == [0, 5, 7] and variable.dtype == jnp.int32
    variable[:2] += 1
    assert variable.value.tolist() == [1, 6, 7]


def test_indexed_write_works_on_numpy_lazy_and_nested() -> None:
    from_numpy, from_recipe = sx.Param(np.zeros(2)), sx.Param(_ones((2,)))
    from_numpy[0] = from_recipe[0] = 3.0
    assert (from_numpy.value.tolist(), from_recipe.value.tolist()) == ([3.0, 0.0], [3.0, 1.0])
    nested = sx.Variable({"a": jnp.zeros(2), "b": jnp.ones(2)})
    before = nested.value
    nested["a"] = jnp.full(2, 7.0)
    assert nested["a"].tolist() == [7.0, 7.0] and before["a"].tolist() == [0.0, 0.0]
    with pytest.raises(VariableValueError, match="index 0 of a value of type tuple"):
        sx.Variable((jnp.zeros(1),))[0] = jnp.ones(1)


def test_writing_a_value_is_never_a_structural_change() -> None:
    variable = sx.Param(jnp.ones(2))
    sx.graphdef(sx.List([variable]))
    before = structure_epoch()
    variable.value = jnp.ones(5, jnp.int8)
    variable.value = {"now": jnp.ones(2), "a": (jnp.zeros(1),)}
    variable.value = _ones((3,))
    assert structure_epoch() == before


def _ones(shape: tuple[int, ...]) -> sx.Init:
    return sx.Init(jax.nn.initializers.ones, shape)


# --- what is known without reading ---


@pytest.mark.parametrize(
    "value",
    [
        jnp.ones((2, 3)), np.ones((2, 3), np.float32), _ones((2, 3)), {"one": jnp.ones((2, 3))},
        jax.ShapeDtypeStruct((2, 3), jnp.float32),
    ],
    ids=["array", "numpy", "lazy", "pytree of one", "abstract"],
)  # fmt: skip
def test_shape_and_dtype_are_known_for_every_value(value: Any) -> None:
    variable = sx.Param(value)
    assert (variable.shape, variable.ndim, variable.size) == ((2, 3), 2, 6)
    assert variable.dtype == jnp.float32
    assert variable.is_lazy is isinstance(value, sx.Init)  # knowing does not materialise
    assert variable.is_abstract is isinstance(value, jax.ShapeDtypeStruct)


def test_variable_of_several_arrays_has_no_single_shape() -> None:
    with pytest.raises(AttributeError, match="pytree of 2 arrays, which has no single shape"):
        _ = sx.Variable((jnp.ones(1), jnp.ones(2))).shape


def test_sharding_is_that_of_array_or_none(auto_mesh: Any) -> None:
    sharding = jax.NamedSharding(auto_mesh, jax.P("data"))
    assert sx.Param(jax.device_put(jnp.ones(2), sharding)).sharding == sharding
    assert sx.Param(_ones((2,))).sharding is None
    abstract = jax.ShapeDtypeStruct((2,), jnp.float32, sharding=sharding)
    assert sx.Param(abstract).sharding == sharding


# --- metadata ---


def test_axes_must_match_rank_wherever_given() -> None:
    message = r"Param of shape \(2, 3\) has 2 dimensions but was given 1 axis names: \('a',\)"
    for value in (jnp.ones((2, 3)), np.ones((2, 3)), _ones((2, 3))):
        with pytest.raises(MetadataError, match=message):
            sx.Param(value, axes=("a",))
    variable = sx.Param(jnp.ones((2, 3)), axes=("a", None))
    with pytest.raises(MetadataError, match=message):
        variable.set_metadata(axes=("a",), note=1)
    assert variable.axes == ("a", None) and not variable.metadata
    with pytest.raises(MetadataError, match=r"shape \(3,\) has 1 dimensions"):
        variable.replace(jnp.ones(3))


def test_metadata_is_read_only_except_by_set_metadata() -> None:
    variable = sx.Param(jnp.ones(2), tag="x")
    with pytest.raises(TypeError):
        variable.metadata["tag"] = "y"  # pyright: ignore[reportIndexIssue] (that is the point)
    variable.set_metadata(tag="y", axes=["embed"], more=(1,))
    assert dict(variable.metadata) == {"tag": "y", "more": (1,)} and variable.axes == ("embed",)
    variable.set_metadata(axes=None)
    assert variable.axes is None


def test_set_metadata_is_structural_only_when_effective() -> None:
    variable, unseen = sx.Param(1.0, note=1), sx.Param(1.0)
    sx.graphdef([variable])
    before = structure_epoch()
    variable.set_metadata(note=1)
    unseen.set_metadata(note=1)
    assert structure_epoch() == before
    variable.set_metadata(note=True)
    assert structure_epoch() == before + 1


# --- copies ---


def test_replace_creates_variable_with_same_type_and_metadata() -> None:
    variable = Custom(jnp.zeros(2), axes=("embed",), tag="x")
    new = variable.replace(np.ones(2))
    assert type(new) is Custom and new.metadata == variable.metadata and new.axes == ("embed",)
    assert (variable.value.tolist(), new.value.tolist()) == ([0.0, 0.0], [1.0, 1.0])


@pytest.mark.parametrize(
    "value",
    [
        jnp.arange(3), np.arange(3), jax.random.key(1), {"a": jnp.ones(1), "b": (np.ones(2),)},
        _ones((2,)), jnp.ones(2, jnp.bfloat16),
    ],
    ids=["array", "numpy", "key", "pytree", "lazy", "bfloat16"],
)  # fmt: skip
def test_pickle_and_copies_keep_type_value_and_metadata(value: Any) -> None:
    variable = Custom(value, tag="x", exact=(1, True))
    copies = [copy.deepcopy(variable), copy.copy(variable), pickle.loads(pickle.dumps(variable))]
    for copied in copies:
        assert copied is not variable and type(copied) is Custom
        assert copied.metadata == variable.metadata
        assert_equal_values(copied.value, variable.value)


@pytest.mark.parametrize(
    "value", [jnp.ones(2), jax.random.key(0), (jnp.ones(2),)], ids=["array", "key", "pytree"]
)
def test_deep_copy_survives_donation_of_the_original(value: Any) -> None:
    variable = sx.Param(jax.tree.map(jnp.copy, value))
    copied = copy.deepcopy(sx.List([variable]))
    jax.tree.map(lambda array: array.delete(), variable.value)  # as donating it does
    assert_equal_values(copied[0].value, value)


def test_copies_of_lazy_variable_draw_same_numbers() -> None:
    recipe = sx.Init(jax.nn.initializers.normal(), (3,), rngs=sx.Rngs(0))
    variable = sx.Param(recipe)
    copies = [copy.deepcopy(variable), sx.clone(variable)]
    assert all(copied.is_lazy for copied in copies)
    for copied in copies:
        assert_equal_values(copied.value, variable.value)


def test_variable_shows_type_dtype_shape_and_metadata() -> None:
    assert repr(sx.Param(_ones((2, 3)), axes=("a", None))) == (
        "Param(float32[2, 3], lazy, axes=('a', None))"
    )
    assert repr(sx.Variable(0, tag="n")) == "Variable(int32[], tag='n')"
    assert repr(sx.Variable({"a": jnp.ones(2)})) == "Variable({'a': 'float32[2]'})"
