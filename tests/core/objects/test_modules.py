# SPDX-License-Identifier: Apache-2.0
"""Modules: attributes are sorted as they are assigned; what cannot be kept is refused there."""

from __future__ import annotations

import copy
import dataclasses
import functools
import pickle
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardax as sx
from shardax.errors import ModuleAttributeError, StateMismatchError, StaticAttributeError
from tests.advice import run_advice
from tests.strategies import Node, assert_same_model
from tests.structure import structure_epoch


class Pair(NamedTuple):
    first: Any
    second: Any


@dataclasses.dataclass(frozen=True)
class Frozen:
    content: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Batch:
    x: Any
    y: Any


ONES = sx.Init(jax.nn.initializers.ones, (2,))


class Layer(sx.Module):
    def __init__(self, size: int = 2) -> None:
        self.kernel = sx.Param(jnp.ones(size), axes=("embed",))
        self.rate = 0.1

    def __call__(self, x: Any) -> Any:
        return self.kernel * x


def variables_of(module: Any) -> list[tuple[Any, str]]:
    return [(path, type(variable).__name__) for path, variable in sx.iter_variables(module)]


# --- attribute sorting ---


def test_variables_and_modules_are_kept_as_they_are() -> None:
    node, param, child = Node(), sx.Param(1.0), Layer()
    node.param, node.child = param, child
    assert node.param is param and node.child is child
    assert variables_of(node) == [(("param",), "Param"), (("child", "kernel"), "Param")]


@pytest.mark.parametrize(
    "value",
    [
        *(jnp.ones(2), np.ones(2, np.float32), np.float32(1.0), ONES),
        *(jax.random.key(0), Batch(jnp.ones(2), jnp.zeros(1))),
    ],
    ids=["jax", "numpy", "numpy scalar", "lazy", "key", "pytree of arrays"],
)
def test_arrays_become_data_and_read_as_jax_arrays(value: Any) -> None:
    node = Node()
    node.array = value
    assert variables_of(node) == [(("array",), "ArrayAttribute")]
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(node.array))
    assert isinstance(node.array, Batch if isinstance(value, Batch) else jax.Array)
    assert "array" in dir(node)


def test_nested_lists_and_dicts_become_tracked_tuples_stay() -> None:
    node = Node()
    node.mixed = [{"a": [sx.Param(1.0)]}, (jnp.ones(2), [1])]
    assert isinstance(node.mixed, sx.List) and isinstance(node.mixed[0]["a"], sx.List)
    assert type(node.mixed[1]) is tuple and isinstance(node.mixed[1][1], sx.List)
    assert variables_of(node) == [
        (("mixed", 0, "a", 0), "Param"),
        (("mixed", 1, 0), "ArrayAttribute"),
    ]


def test_named_tuples_stay_named_tuples_with_data_inside() -> None:
    node = Node()
    node.pair = Pair(sx.Param(1.0), np.ones(2))
    assert isinstance(node.pair, Pair) and isinstance(node.pair.second, jax.Array)
    assert variables_of(node) == [(("pair", 0), "Param"), (("pair", 1), "ArrayAttribute")]


def test_assigned_list_itself_is_not_tracked() -> None:
    node, original = Node(), [1]
    node.sizes = original
    original.append(2)
    assert node.sizes == [1]
    node.sizes.append(3)
    assert (node.sizes, original) == ([1, 3], [1, 2])


@pytest.mark.parametrize(
    "value",
    [
        *(1, True, 1.5, 1j, "relu", b"x", None, ..., (1, ("a",)), frozenset({1}), range(3)),
        *(jnp.float32, np.dtype("int8"), jax.nn.relu, functools.partial(max, 1), Frozen(1)),
        *(slice(1), jax.sharding.PartitionSpec("data"), lambda x: x, int, Layer),
    ],
    ids=lambda value: type(value).__name__,
)
def test_hashable_configuration_is_kept_as_it_is(value: Any) -> None:
    node = Node()
    node.setting = value
    assert node.setting is value
    assert variables_of(node) == []
    assert hash(sx.graphdef(node)) == hash(sx.graphdef(sx.clone(node)))


@pytest.mark.parametrize(
    "value",
    [
        *({1}, bytearray(b"x"), (1, {2}), Frozen([1]), Frozen(sx.Param(1.0)), Frozen(jnp.ones(1))),
        *(functools.partial(max, jnp.ones(2)), np.array(["a"]), Batch(jnp.ones(1), "text")),
        *([1, {"a": {2}}], {"a": Frozen([])}, (np.array([object()]),)),
    ],
    ids=lambda value: type(value).__name__,
)
def test_unsupported_attribute_type_is_refused_with_alternatives(value: Any) -> None:
    node = Node()
    with pytest.raises(StaticAttributeError) as refused:
        node.setting = value
    assert issubclass(StaticAttributeError, TypeError)
    assert not hasattr(node, "setting")
    message = str(refused.value)
    if isinstance(value, functools.partial):
        array = run_advice(refused.value, "sx.Variable(...)", {"sx": sx, "rest": jnp.ones(2)})
        node.setting = functools.partial(max, array)
        assert sx.state(node).flat().keys() == {("setting", 0)}
    inner = isinstance(value, (list, dict))
    assert (
        ("of a list" in message or "of a dict" in message)
        if inner
        else ("attribute 'setting' of Node" in message)
    )
    assert "Ways out:" in message or "Encode it as numbers" in message


def test_refused_type_is_named() -> None:
    with pytest.raises(StaticAttributeError, match=r"of type set as attribute 'names' of Node"):
        Node().names = {"a"}


# --- assigning over what is there ---


def test_array_over_array_writes_one_hidden_variable() -> None:
    node = Node()
    node.array = jnp.ones(2)
    ((_, hidden),) = sx.iter_variables(node)
    before = structure_epoch()
    node.array = np.zeros(3)
    node.array += 1
    assert structure_epoch() == before
    assert [v for _, v in sx.iter_variables(node)] == [hidden]
    assert hidden.value.tolist() == [1.0, 1.0, 1.0]


@pytest.mark.parametrize(
    "array", [jnp.ones(2), np.ones(2), np.float32(1)], ids=["jax", "np", "0-d"]
)
def test_array_over_variable_is_refused(array: Any) -> None:
    layer = Layer()
    kernel = layer.kernel
    with pytest.raises(StaticAttributeError, match=r"attribute 'kernel' of Layer.*sx\.Param\(arr"):
        layer.kernel = array
    assert layer.kernel is kernel


def test_kinds_may_be_replaced_by_other_kinds() -> None:
    node = Node()
    for value in (1, jnp.ones(2), "text", sx.Param(1.0), [1], (jnp.ones(1),), Layer(), None):
        node.slot = value
        assert [name for name in vars(node) | node._array_attributes if name == "slot"] == ["slot"]
        assert type(node.slot) is not list
    del node.slot
    assert not hasattr(node, "slot") and variables_of(node) == []


def test_deletion_works_for_every_kind_of_attribute() -> None:
    node = Node()
    node.array, node.param, node.setting = jnp.ones(1), sx.Param(1.0), 1
    del node.array, node.param, node.setting
    assert sx.graphdef(node) == sx.graphdef(Node())
    with pytest.raises(AttributeError):
        del node.array


def test_unknown_attribute_is_an_ordinary_attribute_error() -> None:
    with pytest.raises(AttributeError, match="'Node' object has no attribute 'kernel'"):
        _ = Node().kernel
    assert getattr(Node(), "kernel", 5) == 5


RESERVED = ["_owner", "_array_attributes", "_marked", "_lock", "_flat", "_flatten", "_unflatten"]


@pytest.mark.parametrize("name", RESERVED)
def test_reserved_names_are_refused(name: str) -> None:
    with pytest.raises(ModuleAttributeError, match=f"'{name}' is reserved"):
        setattr(Node(), name, 5)


@pytest.mark.parametrize("name", [*RESERVED, "_allocate"])
@pytest.mark.parametrize("value", [lambda self: None, 3, property(lambda self: 3)])
def test_class_defining_reserved_name_is_refused(name: str, value: object) -> None:
    with pytest.raises(
        ModuleAttributeError, match=f"^Taken has the attribute {name}, .* such as {name[1:]}"
    ):
        type("Taken", (sx.Module,), {name: value})
    with pytest.raises(ModuleAttributeError, match=f"^Mine has the attribute {name}, "):
        type("Mine", (sx.nn.Linear,), {name: value})


def test_mixin_cannot_bring_a_reserved_name_either() -> None:
    class Flattened:
        def _flatten(self, encode: object) -> object:
            return encode

    with pytest.raises(ModuleAttributeError, match="Model has the attribute _flatten of Flattened"):
        type("Model", (Flattened, sx.Module), {})


def test_slots_are_refused_because_data_lives_in_attributes() -> None:
    with pytest.raises(ModuleAttributeError, match="Slotted defines __slots__"):
        type("Slotted", (sx.Module,), {"__slots__": ("x",)})


def test_attribute_missing_inside_property_is_the_one_named() -> None:
    class Scaled(sx.Module):
        @property
        def scale(self) -> Any:
            return self.missing

    with pytest.raises(AttributeError, match="'Scaled' object has no attribute 'missing'"):
        _ = Scaled().scale
    assert not hasattr(Scaled(), "scale")


def test_property_setters_are_called_and_required() -> None:
    class Celsius(sx.Module):
        def __init__(self) -> None:
            self.kelvin = 0.0

        @property
        def celsius(self) -> float:
            return self.kelvin - 273.0

        @celsius.setter
        def celsius(self, value: float) -> None:
            self.kelvin = value + 273.0

        @property
        def fixed(self) -> int:
            return 1

    module = Celsius()
    module.celsius = 1.0
    assert (module.kelvin, module.celsius, list(vars(module))) == (274.0, 1.0, ["kelvin"])
    with pytest.raises(AttributeError):
        module.fixed = 2  # pyright: ignore[reportAttributeAccessIssue] (that is the point)


def test_array_bypassing_assignment_is_found_and_named() -> None:
    class Cached(sx.Module):
        @functools.cached_property
        def table(self) -> jax.Array:
            return jnp.ones(2)

    module = Node()
    module.inner = Cached()
    _ = module.inner.table
    with pytest.raises(StaticAttributeError, match=r"\.inner\.table .*cached_property"):
        sx.graphdef(module)


def test_module_may_be_a_dataclass() -> None:
    @dataclasses.dataclass
    class Point(sx.Module):
        x: sx.Param[Any]
        name: str = "a"

    point = Point(sx.Param(1.0))
    assert point.x is not sx.clone(point).x
    assert_same_model(sx.clone(point), point)
    assert jax.tree.map(lambda v: v + 1, point).x.value == 2.0


def test_class_attributes_are_defaults_outside_the_structure() -> None:
    class WithDefault(sx.Module):
        rate = 0.1

    module = WithDefault()
    assert (module.rate, variables_of(module), list(vars(module))) == (0.1, [], [])
    module.rate = 0.2
    assert (module.rate, WithDefault.rate) == (0.2, 0.1)


# --- copies ---


def test_shallow_copy_shares_objects_but_not_places() -> None:
    layer = Layer()
    layer.table, layer.pair = jnp.zeros(2), (layer.kernel, jnp.zeros(1))
    copied = copy.copy(layer)
    assert copied.kernel is layer.kernel and copied.pair[0] is layer.kernel
    copied.table, copied.rate, copied.extra = jnp.ones(2), 0.5, jnp.ones(1)
    assert (layer.table.tolist(), layer.rate, hasattr(layer, "extra")) == ([0.0, 0.0], 0.1, False)


def test_cycles_and_bound_methods_survive_pickle_and_deepcopy() -> None:
    module = Node()
    module.layers = [Layer()]
    module.layers[0].parent = module
    module.apply = module.layers[0].__call__
    module.pair = (module, [module])
    for copied in (pickle.loads(pickle.dumps(module)), copy.deepcopy(module), sx.clone(module)):
        assert copied.layers[0].parent is copied and copied.pair[1][0] is copied
        assert copied.apply.__self__ is copied.layers[0]
        assert_same_model(copied, module)


# --- sow, perturb, modes ---


def test_sow_collects_values_in_given_variable_type() -> None:
    node = Node()
    for x in (1.0, 2.0):
        node.sow("seen", jnp.float32(x))
        node.sow("totals", jnp.float32(x), type=sx.MetricState)
    assert [float(x) for x in node.seen.value] == [1.0, 2.0]
    assert variables_of(node) == [(("seen",), "Intermediate"), (("totals",), "MetricState")]


def test_sowing_over_something_else_is_refused() -> None:
    layer = Layer()
    for name in ("kernel", "rate"):
        with pytest.raises(StateMismatchError, match=rf"sow\('{name}'\) on Layer needs an? Interm"):
            layer.sow(name, jnp.ones(1))


def test_perturb_adds_zeros_then_the_variables_value() -> None:
    node, x = Node(), jnp.asarray([1.0, 2.0], jnp.bfloat16)
    assert node.perturb("inner", x).tolist() == [1.0, 2.0]
    assert variables_of(node) == [(("inner",), "Perturbation")]
    assert (node.inner.shape, node.inner.dtype) == ((2,), jnp.bfloat16)
    node.inner.value = jnp.ones(2, jnp.bfloat16)
    assert node.perturb("inner", x).tolist() == [2.0, 3.0]


def _tower() -> Node:
    tower = Node()
    tower.layers = [Layer(), Layer()]
    tower.rate = 1.0
    return tower


def test_set_attributes_changes_every_module_that_has_them() -> None:
    tower = _tower()
    tower.set_attributes(rate=0.5)
    assert (tower.rate, [layer.rate for layer in tower.layers]) == (0.5, [0.5, 0.5])
    tower.set_attributes(Layer, rate=0.7)
    assert (tower.rate, [layer.rate for layer in tower.layers]) == (0.5, [0.7, 0.7])
    tower.set_attributes(lambda path, module: path == ("layers", 1), rate=0.9)
    assert [layer.rate for layer in tower.layers] == [0.7, 0.9]


def test_unknown_set_attributes_are_refused_without_effect() -> None:
    tower = _tower()
    with pytest.raises(ModuleAttributeError, match=r"\['ratio'\]; nothing was changed"):
        tower.set_attributes(rate=0.5, ratio=1)
    assert tower.rate == 1.0
    tower.set_attributes(rate=0.5, ratio=1, raise_if_not_found=False)
    assert tower.rate == 0.5


def test_train_and_eval_switch_layers_with_modes() -> None:
    tower = _tower()
    dropout, norm = tower.layers
    dropout.deterministic, norm.use_running_average = True, True
    tower.train()
    assert (dropout.deterministic, norm.use_running_average) == (False, False)
    tower.eval(rate=0.3)
    assert (dropout.deterministic, norm.use_running_average, tower.rate) == (True, True, 0.3)


def test_sow_may_reduce_what_it_is_given() -> None:
    model = Node()
    for value in (1.0, 5.0, 2.0):
        model.sow("total", value, reduce_fn=lambda a, b: a + b, init_fn=lambda: 0.0)
        model.sow("last", value, sx.Cache, reduce_fn=lambda a, b: b)
        model.sow("all", value)
    assert (float(model.total), float(model.last), len(model.all.value)) == (8.0, 2.0, 3)
    assert type(model.last) is sx.Cache
    sx.jit(lambda m: m.sow("total", 4.0, reduce_fn=lambda a, b: a + b))(model)
    assert float(model.total) == 12.0
