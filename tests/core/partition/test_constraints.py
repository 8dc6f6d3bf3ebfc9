# SPDX-License-Identifier: Apache-2.0
"""Constraints by axis names: over Auto, Explicit and Manual mesh axes, in programs and outside."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import shardax as sx
from shardax.errors import NoMeshError, PartitionError, TransformError
from tests.advice import run_advice

RULES = sx.Rules({"batch": "data", "embed": "model", "both": ("data", "model"), "seq": None})
UNCONSTRAINED = P.UNCONSTRAINED
WHOLE = P()


def rows(mesh: Mesh, spec: P = WHOLE) -> jax.Array:
    """An array of shape (8, 16), laid out over the mesh."""
    return jax.device_put(
        np.arange(128.0, dtype=np.float32).reshape(8, 16), NamedSharding(mesh, spec)
    )


def assert_laid_out(array: jax.Array, mesh: Mesh, spec: P) -> None:
    """Asserts where the array is, and that it still holds what ``rows`` made."""
    assert array.sharding.is_equivalent_to(NamedSharding(mesh, spec), array.ndim)
    assert array.tolist() == np.arange(128.0).reshape(8, 16).tolist()


CASES: dict[str, tuple[tuple[Any, ...], P]] = {
    "names": (("batch", "embed"), P("data", "model")),
    "unmapped": (("batch", "other"), P("data", None)),
    "unnamed": ((None, "embed"), P(None, "model")),
    "replicated": (("seq", None), P(None, None)),
    "several axes": (("both", None), P(("data", "model"), None)),
}


# --- in programs ----------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("jit", [jax.jit, sx.jit], ids=["jax.jit", "sx.jit"])
def test_mesh_and_rules_in_scope_constrain_inside_programs(case: str, jit: Any, mesh: Mesh) -> None:
    names, spec = CASES[case]
    with jax.set_mesh(mesh), sx.axis_rules(RULES):
        result = jit(lambda x: sx.constrain(x, names))(rows(mesh, P(None, "data")))
    assert_laid_out(result, mesh, spec)


@pytest.mark.parametrize("case", CASES)
def test_in_a_program_with_mesh_and_rules_given(case: str, mesh: Mesh) -> None:
    names, spec = CASES[case]
    result = jax.jit(lambda x: sx.constrain(x, names, mesh, RULES))(rows(mesh))
    assert_laid_out(result, mesh, spec)


def test_mesh_of_the_array_is_used(mesh: Mesh) -> None:
    result = jax.jit(lambda x: sx.constrain(x, ("batch", "embed"), rules=RULES))(rows(mesh))
    assert_laid_out(result, mesh, P("data", "model"))
    assert_laid_out(
        sx.constrain(rows(mesh), ("batch", "embed"), rules=RULES), mesh, P("data", "model")
    )


def test_explicit_axes_put_the_constraint_into_the_type(explicit_mesh: Mesh) -> None:
    types = []

    @jax.jit
    def look(x: jax.Array) -> jax.Array:
        y = sx.constrain(x, ("batch", "embed"), rules=RULES)
        types.extend([jax.typeof(x).sharding.spec, jax.typeof(y).sharding.spec])
        return y

    look(rows(explicit_mesh, P("model")))
    assert types == [P("model", None), P("data", "model")]


def test_unconstrained_dimension_stays_as_it_is(mesh: Mesh) -> None:
    call = jax.jit(lambda x: sx.constrain(x, ("batch", UNCONSTRAINED), mesh, RULES))
    assert_laid_out(call(rows(mesh, P(None, "model"))), mesh, P("data", "model"))


def test_unconstrained_dimension_yields_mesh_axis_to_another(explicit_mesh: Mesh) -> None:
    call = jax.jit(lambda x: sx.constrain(x, ("batch", UNCONSTRAINED), explicit_mesh, RULES))
    moved = call(rows(explicit_mesh, P(None, ("data", "model"))))
    assert_laid_out(moved, explicit_mesh, P("data", "model"))


def test_constrain_is_traced_again_under_other_rules_in_scope(mesh: Mesh) -> None:
    call = jax.jit(lambda x: sx.constrain(x, ("batch", "embed"), mesh))
    with sx.axis_rules({"batch": "data"}):
        assert_laid_out(call(rows(mesh)), mesh, P("data", None))
    with sx.axis_rules({"embed": "data"}):
        assert_laid_out(call(rows(mesh)), mesh, P(None, "data"))


def test_mesh_with_both_auto_and_explicit_axes() -> None:
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto, AxisType.Explicit))
    call = jax.jit(lambda x: sx.constrain(x, ("batch", "embed"), mesh, RULES))
    result = call(rows(mesh))
    assert_laid_out(result, mesh, P("data", "model"))
    assert jax.typeof(result).sharding.spec == P(None, "model")
    assert_laid_out(
        sx.constrain(rows(mesh), ("batch", "embed"), rules=RULES), mesh, P("data", "model")
    )


def test_gradients_and_batches_pass_through(mesh: Mesh) -> None:
    with jax.set_mesh(mesh):

        def total(x: jax.Array) -> jax.Array:
            return (sx.constrain(x, ("batch", "embed"), rules=RULES) ** 2).sum()

        gradient = jax.jit(jax.grad(total))(rows(mesh))
        assert gradient.tolist() == (2 * np.arange(128.0).reshape(8, 16)).tolist()
        each = jax.jit(jax.vmap(lambda row: sx.constrain(row, ("embed",), rules=RULES)))
        assert_laid_out(each(rows(mesh)), mesh, P(None, "model"))


def test_variable_gives_its_value(mesh: Mesh) -> None:
    variable = sx.Param(rows(mesh))
    assert_laid_out(sx.constrain(variable, ("batch", None), mesh, RULES), mesh, P("data", None))


# --- inside shard_map -----------------------------------------------------------------------------


@pytest.mark.parametrize("given", [True, False], ids=["mesh given", "mesh of the shard_map"])
def test_manual_axes_are_omitted_and_others_constrained(mesh: Mesh, given: bool) -> None:
    seen = []

    def body(part: jax.Array) -> jax.Array:
        result = sx.constrain(part, ("batch", "embed"), mesh if given else None, RULES)
        seen.append((part.shape, jax.typeof(result).sharding.spec))
        return result

    call = jax.shard_map(
        body, mesh=mesh, in_specs=P("data"), out_specs=P("data"), axis_names={"data"}
    )
    assert_laid_out(jax.jit(call)(rows(mesh, P("data"))), mesh, P("data", "model"))
    explicit = mesh.axis_types[1] is AxisType.Explicit
    assert seen == [((4, 16), P(None, "model" if explicit else None))]


def test_under_all_manual_axes_constraint_is_identity(mesh: Mesh) -> None:
    def body(part: jax.Array) -> jax.Array:
        assert part.shape == (4, 4)
        constrained = sx.constrain(part, ("batch", "embed"), mesh, RULES)
        assert constrained is part
        return constrained

    spec = P("data", "model")
    call = jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=spec)
    assert_laid_out(jax.jit(call)(rows(mesh, spec)), mesh, spec)


def test_partial_shard_is_checked_by_its_own_size(mesh: Mesh) -> None:
    def body(part: jax.Array) -> jax.Array:
        return sx.constrain(part[:3], ("batch", "embed"), rules=RULES)  # 3 rows a device are fine

    call = jax.shard_map(
        body, mesh=mesh, in_specs=P("data"), out_specs=P("data"), axis_names={"data"}
    )
    assert jax.jit(call)(rows(mesh, P("data"))).shape == (6, 16)


def test_mesh_other_than_shard_map_is_refused(mesh: Mesh) -> None:
    other = jax.make_mesh((8,), ("rows",))

    def body(part: jax.Array) -> jax.Array:
        return sx.constrain(part, ("batch", None), other, RULES)

    call = jax.shard_map(body, mesh=mesh, in_specs=P("data"), out_specs=P("data"))
    with pytest.raises(TransformError, match="shard_map"):
        jax.jit(call)(rows(mesh, P("data")))


# --- outside of programs --------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES)
def test_outside_of_programs_the_array_is_moved(case: str, mesh: Mesh) -> None:
    names, spec = CASES[case]
    anywhere = jnp.arange(128.0).reshape(8, 16)
    assert_laid_out(sx.constrain(anywhere, names, mesh, RULES), mesh, spec)
    with jax.set_mesh(mesh), sx.axis_rules(RULES):
        assert_laid_out(sx.constrain(np.asarray(anywhere), names), mesh, spec)


def test_outside_programs_unconstrained_dimension_keeps_its_layout(mesh: Mesh) -> None:
    names = ("batch", UNCONSTRAINED)
    here = rows(mesh, P(None, "model"))
    assert_laid_out(sx.constrain(here, names, mesh, RULES), mesh, P("data", "model"))
    abstract = mesh.abstract_mesh
    assert_laid_out(sx.constrain(here, names, abstract, RULES), mesh, P("data", "model"))
    anywhere = jnp.arange(128.0).reshape(8, 16)
    assert_laid_out(sx.constrain(anywhere, names, mesh, RULES), mesh, P("data", None))


def test_outside_of_programs_a_mesh_must_have_devices(mesh: Mesh) -> None:
    with pytest.raises(TransformError, match="no devices"):
        sx.constrain(jnp.ones((8, 16)), ("batch", None), mesh.abstract_mesh, RULES)


# --- what is refused ------------------------------------------------------------------------------


def test_missing_mesh_is_refused_unless_ignorable() -> None:
    x = jnp.ones((8, 16))
    with pytest.raises(NoMeshError, match=r"float32\[8, 16\] by \('batch', 'embed'\)"):
        jax.jit(lambda x: sx.constrain(x, ("batch", "embed"), rules=RULES))(x)
    with pytest.raises(NoMeshError, match=r"on_no_mesh='ignore'"):
        sx.constrain(x, ("batch", "embed"), rules=RULES)
    assert sx.constrain(x, ("batch", "embed"), rules=RULES, on_no_mesh="ignore") is x


def test_missing_rules_are_refused_unless_ignorable(mesh: Mesh) -> None:
    x = rows(mesh, P("data"))
    with pytest.raises(PartitionError, match=r"no rules were given") as caught:
        sx.constrain(x, ("batch", None), mesh)
    with run_advice(caught.value, "sx.axis_rules(rules)", {"sx": sx, "rules": RULES}):
        assert_laid_out(sx.constrain(x, ("batch", None), mesh), mesh, P("data"))
    assert sx.constrain(x, ("batch", None), mesh, on_no_mesh="ignore") is x
    assert_laid_out(sx.constrain(x, (None, None), mesh), mesh, P())
    assert_laid_out(sx.constrain(x, ("batch", None), mesh, sx.Rules()), mesh, P())


@pytest.mark.parametrize(
    ("names", "rules", "message"),
    [
        (("batch",), RULES, "1 axis names for 2 dimensions"),
        (("batch", "embed"), {"batch": "rows"}, "mesh axis 'rows'"),
        (("odd", None), {"odd": ("data", "model", "data2")}, "mesh axis 'data2'"),
        (("batch", "embed"), sx.Rules({"embed": None}, on_unmapped="error"), "'batch'"),
        (
            ("batch", "embed"),
            sx.Rules({"batch": "data", "embed": "data"}, on_conflict="error"),
            "mesh axis 'data' is wanted by 'embed'",
        ),
    ],
)
def test_constrain_refuses_impossible_layouts_in_words(
    names: Any, rules: Any, message: str, mesh: Mesh
) -> None:
    with pytest.raises(PartitionError, match="Cannot constrain an array") as caught:
        jax.jit(lambda x: sx.constrain(x, names, mesh, rules))(rows(mesh))
    assert message in str(caught.value)
    assert "(root)" not in str(caught.value)


def test_tree_is_no_array(mesh: Mesh) -> None:
    tree = {"x": sx.Param(jax.ShapeDtypeStruct((8, 16), jnp.float32), axes=("batch", "embed"))}
    with pytest.raises(PartitionError, match="of type dict") as caught:
        sx.constrain(tree, ("batch", "embed"), mesh, RULES)
    names = {"sx": sx, "tree": tree, "mesh": mesh, "rules": RULES}
    abstract = run_advice(caught.value, "sx.abstract(tree, mesh, rules)", names)
    assert abstract["x"].sharding == sx.shardings(tree, mesh, RULES)["x"]


def test_dimension_that_cannot_be_divided_is_refused(mesh: Mesh) -> None:
    with pytest.raises(PartitionError, match=r"dimension 0 \('batch'\) has size 7"):
        jax.jit(lambda x: sx.constrain(x[:7], ("batch", None), mesh, RULES))(rows(mesh))


def test_invalid_arguments_are_refused_even_when_ignorable() -> None:
    x = jnp.ones((8, 16))
    with pytest.raises(PartitionError, match="3 axis names"):
        sx.constrain(x, ("batch", None, None), rules=RULES, on_no_mesh="ignore")
    with pytest.raises(PartitionError, match="one string"):
        sx.constrain(x, "batch", rules=RULES, on_no_mesh="ignore")
    with pytest.raises(PartitionError, match="on_no_mesh='skip'"):
        sx.constrain(x, ("batch", None), on_no_mesh="skip")  # pyright: ignore[reportArgumentType] (on purpose)


# --- meshes that look different from inside -------------------------------------------------------


@pytest.mark.parametrize("where", ["NumPy", "on one device", "on the mesh"])
def test_captured_outside_array_is_constrained(where: str, mesh: Mesh) -> None:
    outside = {
        "NumPy": np.asarray(rows(mesh)),
        "on one device": jnp.asarray(np.asarray(rows(mesh))),
    }
    x = outside.get(where, rows(mesh))
    with jax.set_mesh(mesh):
        result = jax.jit(lambda: sx.constrain(x, ("batch", "embed"), rules=RULES))()
    assert_laid_out(result, mesh, P("data", "model"))


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_mesh_axis_types_adapt_to_the_current_context(kind: AxisType, mesh: Mesh) -> None:
    twin = jax.make_mesh((2, 4), ("data", "model"), axis_types=(kind, kind))
    call = jax.jit(lambda x: sx.constrain(x, ("batch", "embed"), twin, RULES))
    assert_laid_out(call(rows(mesh)), mesh, P("data", "model"))
    with jax.set_mesh(mesh):
        assert_laid_out(call(rows(mesh)), mesh, P("data", "model"))
        abstract = jax.jit(lambda x: sx.constrain(x, ("batch", None), twin.abstract_mesh, RULES))
        assert_laid_out(abstract(rows(mesh)), mesh, P("data"))


def test_auto_mesh_inside_explicit_scope_becomes_explicit(auto_mesh: Mesh) -> None:
    types = []

    def inside(x: jax.Array) -> jax.Array:
        y = sx.constrain(x, ("batch", "embed"), auto_mesh, RULES)
        types.append(jax.typeof(y).sharding.spec)
        return y

    outside = jax.sharding.explicit_axes(inside, in_sharding=P(None, None))
    with jax.set_mesh(auto_mesh):
        assert_laid_out(jax.jit(outside)(rows(auto_mesh)), auto_mesh, P("data", "model"))
    assert types == [P("data", "model")]


def test_abstract_mesh_suffices_when_devices_are_known(mesh: Mesh) -> None:
    call = jax.jit(lambda x: sx.constrain(x, ("batch", "embed"), mesh.abstract_mesh, RULES))
    assert_laid_out(call(rows(mesh)), mesh, P("data", "model"))
    with jax.set_mesh(mesh):
        assert_laid_out(call(np.asarray(rows(mesh))), mesh, P("data", "model"))
    with pytest.raises(TransformError, match=r"jax\.set_mesh\(mesh\)"):
        call(np.asarray(rows(mesh)))


@pytest.mark.parametrize("how", ["in scope", "given"])
def test_abstract_mesh_without_known_devices_is_refused(how: str, auto_mesh: Mesh) -> None:
    abstract = auto_mesh.abstract_mesh
    given_mesh = abstract if how == "given" else None

    def body(x: jax.Array, on_no_mesh: Any = None) -> jax.Array:
        names = ("batch", "embed")
        return sx.constrain(2 * x, names, given_mesh, RULES, on_no_mesh=on_no_mesh)

    x = np.ones((8, 16), np.float32)
    with jax.sharding.use_abstract_mesh(abstract):
        with pytest.raises(TransformError, match=r"float32\[8, 16\] .*under jax\.set_mesh\(mesh\)"):
            jax.jit(body)(x)
        assert "sharding_constraint" not in str(jax.make_jaxpr(lambda x: body(x, "ignore"))(x))
        named = jax.jit(lambda x: sx.constrain(2 * x, ("batch", "embed"), auto_mesh, RULES))
        assert named(x).sharding.is_equivalent_to(NamedSharding(auto_mesh, P("data", "model")), 2)
    with jax.set_mesh(auto_mesh), jax.sharding.use_abstract_mesh(abstract):
        found = jax.jit(body)(x)
    assert found.sharding.is_equivalent_to(NamedSharding(auto_mesh, P("data", "model")), 2)


def test_program_lowers_for_shapes_on_abstract_mesh(auto_mesh: Mesh) -> None:
    call = jax.jit(lambda x: sx.constrain(2 * x, ("batch", "embed"), rules=RULES))
    place = NamedSharding(auto_mesh.abstract_mesh, P())
    traced = call.trace(jax.ShapeDtypeStruct((8, 16), np.float32, sharding=place))
    assert "sharding_constraint" in str(traced.jaxpr)


def test_mesh_with_manual_axes_requires_shard_map(auto_mesh: Mesh) -> None:
    manual = Mesh(auto_mesh.devices, ("data", "model"), axis_types=(AxisType.Manual,) * 2)
    for call in (lambda x: x, jax.jit):
        constrained = call(lambda x: sx.constrain(x, ("batch", "embed"), manual, RULES))
        with pytest.raises(TransformError, match=r"inside of jax\.shard_map"):
            constrained(jnp.ones((8, 16)))


def test_over_explicit_axes_without_devices_jax_itself_refuses(explicit_mesh: Mesh) -> None:
    def body(x: jax.Array) -> jax.Array:
        return sx.constrain(2 * x, ("batch", "embed"), rules=RULES)

    with (
        jax.sharding.use_abstract_mesh(explicit_mesh.abstract_mesh),
        pytest.raises(ValueError, match="AbstractMesh"),
    ):
        jax.jit(body)(np.ones((8, 16), np.float32))


def test_missing_mesh_policy_can_be_set_for_scope() -> None:
    x, names = jnp.ones((8, 16)), ("batch", "embed")
    with sx.axis_rules(RULES, on_no_mesh="ignore"):
        assert sx.constrain(x, names) is x
        assert sx.partition.with_logical_constraint({"x": x}, names)["x"] is x
        with sx.axis_rules({}):  # other rules, the same policy
            assert sx.constrain(x, names) is x
        with pytest.raises(NoMeshError):
            sx.constrain(x, names, on_no_mesh="error")
        with sx.axis_rules(RULES, on_no_mesh="error"), pytest.raises(NoMeshError):
            sx.constrain(x, names)
        with pytest.raises(PartitionError, match="3 axis names"):  # what is wrong stays wrong
            sx.constrain(x, (*names, None))
    with pytest.raises(NoMeshError):
        sx.constrain(x, names, rules=RULES)
    with pytest.raises(PartitionError, match="on_no_mesh='skip'"):
        sx.axis_rules(RULES, on_no_mesh="skip")  # pyright: ignore[reportArgumentType] (on purpose)


def test_changed_policy_retraces_compiled_function(auto_mesh: Mesh) -> None:
    call = sx.jit(lambda x: sx.constrain(x, ("batch", "embed")))
    x = jnp.ones((8, 16))
    with sx.partition.logical_axis_rules(RULES, on_no_mesh="ignore"):
        assert call(x).sharding.device_set == x.sharding.device_set
    with sx.axis_rules(RULES), pytest.raises(NoMeshError):
        call(x)
    with sx.axis_rules(RULES, on_no_mesh="ignore"), jax.set_mesh(auto_mesh):  # there is one
        assert call(x).sharding.shard_shape((8, 16)) == (4, 4)


def test_mixed_axis_dimension_puts_explicit_axes_outermost() -> None:
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto, AxisType.Explicit))
    call = jax.jit(lambda x: sx.constrain(x, ("both", None), mesh, RULES))
    assert_laid_out(call(rows(mesh)), mesh, P(("model", "data")))


def test_mesh_axis_taken_by_vmap_is_refused(explicit_mesh: Mesh, auto_mesh: Mesh) -> None:
    def lane(row: jax.Array) -> jax.Array:
        return sx.constrain(row, ("batch",), rules=RULES)

    refused = pytest.raises(PartitionError, match=r"(?s)JAX refuses .*Under vmap")
    with refused, jax.set_mesh(explicit_mesh):
        jax.jit(jax.vmap(lane))(rows(explicit_mesh, P("data")))
    with pytest.raises(PartitionError, match="spmd_axis_name"), jax.set_mesh(auto_mesh):
        jax.jit(jax.vmap(lane, spmd_axis_name="data"))(rows(auto_mesh))


@pytest.mark.parametrize(
    "value", [{"a": np.ones(2)}, jax.ShapeDtypeStruct((8, 16), np.float32)], ids=["tree", "shape"]
)
def test_constrain_refuses_what_is_no_array(value: Any, mesh: Mesh) -> None:
    with pytest.raises(PartitionError, match=f"of type {type(value).__name__}"):
        sx.constrain(value, ("batch", None), mesh, RULES)
