# SPDX-License-Identifier: Apache-2.0
"""Where the values of boxes go: specs, shardings, and the constraints of unboxing."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import shardax as sx
from shardax.errors import NoMeshError, PartitionCheckError, PartitionError
from shardax.partition import (
    LogicallyPartitioned,
    Partitioned,
    get_partition_spec,
    get_sharding,
    logical_to_mesh,
    logical_to_mesh_sharding,
    unbox,
    with_logical_constraint,
)
from tests.advice import run_advice
from tests.core.partition.own_boxes import Split

RULES = sx.Rules({"batch": "data", "embed": "model", "both": ("data", "model")})


def tree() -> dict[str, Any]:
    """One of everything that a spec is asked of."""
    struct = jax.ShapeDtypeStruct((8, 16), jnp.float32)
    return {
        "mesh": Partitioned(struct, ("data", "model")),
        "logical": LogicallyPartitioned(struct, ("batch", "embed")),
        "baked": LogicallyPartitioned(struct, ("batch", "embed"), rules={"batch": "model"}),
        "many": Partitioned({"m": struct, "v": struct}, (None, ("data", "model"))),
        "own": Split(struct, "model"),
        "variable": sx.Param(struct, axes=("embed", None)),
        "unnamed": sx.Param(struct),
        "array": jnp.ones(3),
        "struct": struct,
        "step": 3,
        "text": "text",
        "none": None,
    }


REST = {"array": P(), "struct": P(), "step": None, "text": None, "none": None, "unnamed": P()}


# --- specs ----------------------------------------------------------------------------------------


def test_specs_are_those_of_the_boxes() -> None:
    assert get_partition_spec(tree()) == {
        "mesh": P("data", "model"),
        "logical": P("batch", "embed"),
        "baked": P("batch", "embed"),
        "many": P(None, ("data", "model")),
        "own": P("model"),
        "variable": P("embed", None),
        **REST,
    }


def test_logical_names_become_mesh_axes_by_the_rules() -> None:
    expected = {
        "mesh": P("data", "model"),
        "logical": P("data", "model"),
        "baked": P("model", None),
        "many": P(None, ("data", "model")),
        "own": P("model"),
        "variable": P("model", None),
        **REST,
    }
    assert logical_to_mesh(tree(), RULES) == expected
    with sx.axis_rules(RULES):
        assert logical_to_mesh(tree()) == expected
    specs = {"a": P("batch", P.UNCONSTRAINED), "b": (P("embed"), None)}
    assert logical_to_mesh(specs, RULES) == {
        "a": P("data", P.UNCONSTRAINED),
        "b": (P("model"), None),
    }


def test_shardings_are_specs_over_the_mesh(mesh: Mesh) -> None:
    expected = jax.tree.map(
        lambda spec: NamedSharding(mesh, spec),
        logical_to_mesh(tree(), RULES),
        is_leaf=lambda x: isinstance(x, P),
    )
    assert get_sharding(tree(), mesh, RULES) == expected
    with jax.set_mesh(mesh), sx.axis_rules(RULES):
        assert get_sharding(tree()) == expected
    specs = get_partition_spec({"logical": tree()["logical"], "none": None})
    assert logical_to_mesh_sharding(specs, mesh, RULES) == {
        "logical": expected["logical"],
        "none": None,
    }


def test_module_gives_a_state_of_entries(mesh: Mesh) -> None:
    model = sx.nn.Linear(8, 16, rngs=sx.Rngs(0))
    model.kernel.set_metadata(axes=("embed", "mlp"))
    found = {"m": model, "b": Partitioned(jnp.ones(8), ("model",))}
    assert get_partition_spec(found)["m"].flat()["kernel",] == P("embed", "mlp")
    places = get_sharding(found, mesh, RULES)
    assert places["m"].flat()["kernel",] == NamedSharding(mesh, P("model", None))
    assert places["b"] == NamedSharding(mesh, P("model"))


def test_get_sharding_of_one_box_follows_its_own_names(mesh: Mesh) -> None:
    value = jnp.ones((8, 16))
    assert Partitioned(value, ("data", None)).get_sharding(mesh).spec == P("data", None)
    assert Partitioned(value, ("data", None), mesh).get_sharding().spec == P("data", None)
    assert Partitioned(value, None, mesh).get_sharding().spec == P()
    assert Split(value, "data").get_sharding(mesh) == NamedSharding(mesh, P("data"))
    baked = LogicallyPartitioned(value, ("batch", "embed"), rules=RULES)
    assert baked.get_sharding(mesh).spec == P("data", "model")
    with sx.axis_rules({"batch": "model"}):
        logical = LogicallyPartitioned(value, ("batch", "embed"))
        assert logical.get_sharding(mesh).spec == P("model", None)
        assert baked.get_sharding(mesh).spec == P("data", "model")
    with pytest.raises(PartitionError, match="batch") as caught:
        LogicallyPartitioned(value, ("batch", "embed")).get_sharding(mesh)
    with run_advice(caught.value, "sx.axis_rules(rules)", {"sx": sx, "rules": RULES}):
        box = LogicallyPartitioned(value, ("batch", "embed"))
        assert box.get_sharding(mesh) == baked.get_sharding(mesh)
    with pytest.raises(PartitionError, match="no mesh"):
        Partitioned(value, ("data", None)).get_sharding()


# --- what is wrong --------------------------------------------------------------------------------


def test_get_sharding_lists_all_errors_together_by_path(auto_mesh: Mesh) -> None:
    wrong = {
        "blocks": [{"kernel": Partitioned(jnp.ones((7, 16)), ("data", "model"))}],
        "axis": Partitioned(jnp.ones((8, 16)), ("modle", None)),
        "rank": LogicallyPartitioned(jnp.ones(8), ("batch", "embed")),
        "twice": Partitioned(jnp.ones((8, 16)), ("data", "data")),
        "many": LogicallyPartitioned({"m": jnp.ones(6), "v": jnp.ones(8)}, ("embed",)),
        "own": Split(jnp.ones((3, 2)), "data"),
        "variable": sx.Param(jnp.ones(6), axes=("embed",)),
        "right": Partitioned(jnp.ones((8, 16)), ("data", "model")),
    }
    with pytest.raises(PartitionCheckError) as caught:
        get_sharding(wrong, auto_mesh, RULES)
    found = {(finding.path, finding.code) for finding in caught.value.findings}
    assert found == {
        (("blocks", 0, "kernel"), "indivisible"),
        (("axis",), "unknown-mesh-axis"),
        (("rank",), "rank-mismatch"),
        (("twice",), "axis-names"),
        (("many", "m"), "indivisible"),
        (("own",), "indivisible"),
        (("variable",), "indivisible"),
    }
    assert "modle" in str(caught.value) and "model" in str(caught.value)


def test_unconstrained_dimensions_stay_open_to_the_compiler(
    auto_mesh: Mesh, explicit_mesh: Mesh
) -> None:
    box = {"w": LogicallyPartitioned(jnp.ones((8, 16)), ("batch", P.UNCONSTRAINED))}
    for_constraints = logical_to_mesh_sharding(box, auto_mesh, RULES)["w"]
    assert for_constraints.spec == P("data", P.UNCONSTRAINED)
    with pytest.raises(PartitionCheckError, match=r"\.w: .*UNCONSTRAINED.*Explicit"):
        logical_to_mesh_sharding(box, explicit_mesh, RULES)
    for mesh in (auto_mesh, explicit_mesh):  # where arrays are placed there is nothing to choose
        assert get_sharding(box, mesh, RULES)["w"].spec == P("data", None)
        assert [finding.code for finding in sx.check(box, mesh, {"batch": "data"})] == [
            "unconstrained"
        ]


def test_malformed_specs_are_found_by_path(auto_mesh: Mesh) -> None:
    twice = {"a": {"b": LogicallyPartitioned(1.0, ("x", "x"))}, "c": P("y", "y")}
    for function in (get_partition_spec, logical_to_mesh):
        with pytest.raises(PartitionCheckError) as caught:
            function(twice)
        assert {f.path for f in caught.value.findings} == {("a", "b"), ("c",)}
    strict = sx.Rules(RULES, on_unmapped="error")
    with pytest.raises(PartitionCheckError) as caught:
        logical_to_mesh({"w": P("batch", "other")}, strict)
    assert [f.path for f in caught.value.findings] == [("w",)]
    with pytest.raises(PartitionCheckError) as caught:
        logical_to_mesh_sharding({"w": P("batch", "other")}, auto_mesh, {"batch": "dta"})
    assert [f.path for f in caught.value.findings] == [("w",)]


def test_mesh_and_rules_are_needed(auto_mesh: Mesh) -> None:
    for function in (get_sharding, logical_to_mesh_sharding):
        with pytest.raises(NoMeshError, match=function.__name__):
            function(tree())
    for logical in (LogicallyPartitioned(1.0, ("batch",)), sx.Param(jnp.ones(2), axes=("batch",))):
        with pytest.raises(PartitionError, match=r"^\.w: "):
            get_sharding({"w": logical}, auto_mesh)
    unnamed = {"box": LogicallyPartitioned(jnp.ones(2), (None,)), "v": sx.Param(jnp.ones(2))}
    assert set(get_sharding(unnamed, auto_mesh).values()) == {
        NamedSharding(auto_mesh, P(None)),
        NamedSharding(auto_mesh, P()),
    }


# --- unboxing lays out ----------------------------------------------------------------------------


def in_scope(mesh: Mesh) -> contextlib.AbstractContextManager[Any]:
    """A mesh by ``jax.set_mesh``."""
    return jax.set_mesh(mesh)


@contextlib.contextmanager
def by_with(mesh: Mesh) -> Iterator[None]:
    """A mesh by the older ``with mesh:``."""
    with pytest.warns(DeprecationWarning, match="set_mesh"):
        mesh.__enter__()
    try:
        yield
    finally:
        mesh.__exit__(None, None, None)


def array_of(mesh: Mesh) -> jax.Array:
    """An array of shape (8, 16) on every device."""
    return jax.device_put(np.arange(128.0).reshape(8, 16), NamedSharding(mesh, P()))


def assert_laid_out(array: jax.Array, mesh: Mesh, spec: P) -> None:
    """Asserts where an array is, and that it holds what ``array_of`` made."""
    assert array.sharding.is_equivalent_to(NamedSharding(mesh, spec), 2)
    assert array.tolist() == np.arange(128.0).reshape(8, 16).tolist()


@pytest.mark.parametrize("scope", [in_scope, by_with])
@pytest.mark.parametrize("jit", [jax.jit, sx.jit, lambda f: f], ids=["jax.jit", "sx.jit", "eager"])
def test_unboxing_constrains_over_the_mesh_in_scope(
    scope: Callable[[Mesh], Any], jit: Any, auto_mesh: Mesh
) -> None:
    """Case 17 of the notes on Flax: there, ``with mesh:`` makes it a silent no-op."""
    x = array_of(auto_mesh)
    boxes = {"m": Partitioned(x, ("data", None)), "l": LogicallyPartitioned(x, ("batch", "embed"))}
    with scope(auto_mesh), sx.axis_rules(RULES):
        result = jit(unbox)(boxes)
        as_it_is = jit(lambda t: unbox(t, apply_constraint=False))(boxes)
    assert_laid_out(result["m"], auto_mesh, P("data"))
    assert_laid_out(result["l"], auto_mesh, P("data", "model"))
    assert_laid_out(as_it_is["m"], auto_mesh, P())


def test_over_explicit_axes_unboxing_reshards(explicit_mesh: Mesh) -> None:
    """Case 16 of the notes on Flax: there, an assertion fails."""
    specs = []

    @jax.jit
    def look(box: Any) -> Any:
        x = unbox(box)
        specs.append(jax.typeof(x).sharding.spec)
        return x

    with jax.set_mesh(explicit_mesh):
        result = look(Partitioned(array_of(explicit_mesh), ("data", None)))
    assert specs == [P("data", None)]
    assert_laid_out(result, explicit_mesh, P("data"))


def test_inside_shard_map_manual_axes_are_omitted(mesh: Mesh) -> None:
    @jax.shard_map(mesh=mesh, in_specs=P("data"), out_specs=P("data"), axis_names={"data"})
    def inside(box: Any) -> Any:
        return unbox(box)

    # Over Explicit axes JAX refuses what is not laid out by in_specs.
    given = jax.device_put(array_of(mesh), NamedSharding(mesh, P("data")))
    with jax.set_mesh(mesh):
        result = jax.jit(inside)(Partitioned(given, ("data", "model")))
    assert_laid_out(result, mesh, P("data", "model"))


def test_box_mesh_and_rules_take_precedence(mesh: Mesh) -> None:
    other = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    x = array_of(mesh)
    baked = LogicallyPartitioned(x, ("batch", "embed"), mesh, {"batch": "model"})
    with sx.axis_rules(RULES):
        assert_laid_out(unbox(baked), mesh, P("model"))
    assert_laid_out(unbox(Partitioned(x, (None, "data"), mesh)), mesh, P(None, "data"))
    with jax.set_mesh(other):
        assert_laid_out(unbox(Partitioned(np.asarray(x), ("data", None))), other, P("data"))


def test_variables_are_laid_out_by_their_axes(auto_mesh: Mesh) -> None:
    variable = sx.Param(array_of(auto_mesh), axes=("batch", None))
    with jax.set_mesh(auto_mesh), sx.axis_rules(RULES):
        assert_laid_out(unbox([variable])[0], auto_mesh, P("data"))
    assert variable.sharding.spec == P()


def test_abstract_values_are_given_the_sharding(mesh: Mesh) -> None:
    box = Partitioned(jax.ShapeDtypeStruct((8, 16), jnp.bfloat16), ("data", None))
    with jax.set_mesh(mesh):
        struct = unbox(box)
    assert struct == jax.ShapeDtypeStruct(
        (8, 16), jnp.bfloat16, sharding=NamedSharding(mesh, P("data", None))
    )
    with (
        jax.sharding.use_abstract_mesh(AbstractMesh((3,), ("data",))),
        pytest.raises(PartitionError, match=r"^\.w: .*\n.*not divisible by 3"),
    ):
        unbox({"w": box})


def test_unbox_without_mesh_returns_values_as_they_are() -> None:
    x = np.ones((3, 5))
    assert unbox(Partitioned(x, ("data", "model"))) is x
    assert unbox(LogicallyPartitioned(x, ("batch", "embed"))) is x


def test_unboxing_says_at_which_path_it_fails(auto_mesh: Mesh) -> None:
    x = jnp.ones((7, 16))
    with jax.set_mesh(auto_mesh):
        with pytest.raises(PartitionError, match=r"^\.w\[0\]: .*apply_constraint=False"):
            unbox({"w": [LogicallyPartitioned(x, ("batch", None))]})
        with pytest.raises(PartitionError, match=r"^\.w\[0\]: .*\n?.*not divisible by 2"):
            unbox({"w": [Partitioned(x, ("data", None))]})
        with pytest.raises(PartitionError, match=r"^\.w\[0\]: .*3 axis names for 2"):
            unbox({"w": [Partitioned(x, ("data", None, "model"))]})
        with pytest.raises(PartitionError, match=r"^\.w\[0\]: "):
            unbox({"w": [Partitioned(x, ("data", 5))]})
        assert unbox(LogicallyPartitioned(x, (None, None))).shape == (7, 16)


# --- constraints of pytrees -----------------------------------------------------------------------


def test_constraints_by_name_reach_every_pytree_array(mesh: Mesh) -> None:
    x = array_of(mesh)
    names = {"a": ("batch", None), "b": [P("batch", "embed"), None], "c": ("batch", None)}
    call = jax.jit(lambda x: with_logical_constraint(x, names, RULES, mesh))
    result = call({"a": x, "b": [x, x], "c": {"d": x, "e": (x,)}})
    assert_laid_out(result["a"], mesh, P("data"))
    assert_laid_out(result["b"][0], mesh, P("data", "model"))
    assert_laid_out(result["b"][1], mesh, P())
    assert_laid_out(result["c"]["e"][0], mesh, P("data"))
    assert_laid_out(with_logical_constraint(x, None), mesh, P())
    merged = jax.jit(lambda x: with_logical_constraint(x, (("batch", "embed"), None), RULES, mesh))
    assert_laid_out(merged(x), mesh, P(("data", "model")))


def test_constraints_of_pytrees_are_never_dropped_silently(auto_mesh: Mesh) -> None:
    x = jnp.ones((8, 16))
    with pytest.raises(NoMeshError):
        with_logical_constraint(x, ("batch", None), RULES)
    with jax.set_mesh(auto_mesh), pytest.raises(PartitionError):
        with_logical_constraint([x], [("batch", None)])
    assert with_logical_constraint(x, ("batch", None), on_no_mesh="ignore") is x
    with pytest.raises(PartitionError, match="do not fit"):
        with_logical_constraint({"a": x}, {"b": ("batch", None)}, RULES, auto_mesh)
    with pytest.raises(PartitionError, match="batch"):
        with_logical_constraint((x, x), "batch", RULES, auto_mesh)
