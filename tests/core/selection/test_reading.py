# SPDX-License-Identifier: Apache-2.0
"""Reading selections, and what they find in any tree: containers, values, views; their text."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import pytest

import shardax as sx
from shardax._core.object import epoch
from shardax.errors import SelectionError
from tests.advice import run_advice
from tests.core.selection.test_selecting import Block, Model, Pair, takes


@pytest.fixture
def model() -> Model:
    """A new Model."""
    return Model()


# --- reading ---


def test_reading_is_by_order_or_path(model: Model) -> None:
    found = sx.select(model).at(lambda m: (m.scale, m.heads["de"], m.norms))
    scale, de, norms = found.get_all()
    assert (scale is model.scale, de, norms) == (True, 0.5, model.norms)
    assert list(found.get_by_path()) == list(found.keypaths())


def test_get_requires_exactly_one_match(model: Model) -> None:
    with pytest.raises(SelectionError, match=r"1 place, .*2 places.*\n.*\.blocks\[0\]: Block"):
        sx.select(model).at_instances_of(Block).get()
    with pytest.raises(SelectionError, match="nothing"):
        sx.select(model).at_instances_of(bytes).get()


def test_counts_are_checked_with_what_was_found(model: Model) -> None:
    blocks = sx.select(model).at_instances_of(Block)
    assert blocks.count() == 2 and blocks.assert_count(2) is blocks
    with pytest.raises(SelectionError, match=r"3 places, .*\n.*\n.*\.blocks\[1\]: Block"):
        blocks.assert_count(3)
    params = sx.select([sx.Param(0.0) for _ in range(20)]).at_children()
    with pytest.raises(SelectionError, match=r"and 8 more"):
        params.assert_count(0)


def test_places_are_remembered_not_values(model: Model) -> None:
    embed = sx.select(model).at(lambda m: m.embed.value)
    kind = sx.select(model).at(lambda m: m.blocks[0].kind)
    model.embed.value = jnp.zeros((3, 2))
    model.blocks[0].kind = "other"
    assert not embed.get().any() and kind.get() == "other"


def test_place_that_is_gone_is_an_error(model: Model) -> None:
    last = sx.select(model).at(lambda m: (m.norms[1], m.heads["de"]))
    del model.heads["de"]
    with pytest.raises(SelectionError, match=r"\.heads\.de"):
        last.get_all()


def test_narrowing_leaves_the_selection_as_it_was(model: Model) -> None:
    blocks = sx.select(model).at_instances_of(Block)
    for narrowed in (blocks.pick_nth(0), blocks.at_children(), blocks.invert()):
        assert narrowed is not blocks
    assert blocks.keypaths() == (("blocks", 0), ("blocks", 1))


# --- any tree ---


def test_selection_walks_every_kind_of_container() -> None:
    holder = sx.Module()
    holder.method = sx.nn.Sequential(sx.nn.RMSNorm(2)).__call__
    holder.partial = functools.partial(takes, sx.Param(1.0), y=sx.Param(2.0))
    holder.compiled = sx.jit(sx.nn.RMSNorm(3).__call__)
    tree = (
        {"b": sx.Param(3.0), "a": [sx.Param(4.0)]},
        Pair(sx.Param(5.0), None),
        sx.Partitioned(sx.Param(6.0), names=()),
        holder,
        sx.List([sx.Param(7.0)]),
        sx.Dict(x=sx.Param(8.0)),
    )
    assert sx.select(tree).at_instances_of(sx.Param).keypaths() == (
        (0, "b"),
        (0, "a", 0),
        (1, 0),
        (2, "value"),
        (3, "method", "layers", 0, "scale"),
        (3, "partial", 0),
        (3, "partial", "y"),
        (3, "compiled", "scale"),
        (4, 0),
        (5, "x"),
    )


def test_owner_of_bound_method_is_found_by_path() -> None:
    holder = sx.Module()
    holder.call = sx.nn.Sequential(jax.nn.relu).__call__
    found = sx.select(holder).at_instances_of(sx.nn.Sequential)
    assert found.keypaths() == (("call",),)
    new = found.set_by_path({("call",): sx.nn.Sequential(jnp.negative)})
    assert new.call(2.0) == -2.0 and holder.call(2.0) == 2.0


def test_plain_pytrees_are_trees() -> None:
    tree = {"a": (1, [2.0, "x"]), "b": None}
    found = sx.select(tree).at_instances_of((int, float))
    assert found.get_by_path() == {("a", 0): 1, ("a", 1, 0): 2.0}
    assert sx.select(3).get() == 3 and sx.select(None).at_children().count() == 0


# --- values: lazy, abstract, of many arrays ---


def test_places_in_values_are_found_without_materializing() -> None:
    model = sx.nn.MLP(2, 4, rngs=sx.Rngs(0))
    before = epoch.current
    found = sx.select(model).at_instances_of(jax.Array)
    found.where(lambda value: value.shape == (4, 2)).assert_count(1)
    sx.select(model).at(lambda m: m.up.kernel.value).assert_count(1)
    sx.select(model).at_subtrees_where(lambda path, value: False)
    repr(found)
    assert all(variable.is_lazy for _, variable in sx.iter_variables(model))
    assert found.keypaths() == tuple((name, "kernel", "value") for name in ("gate", "up", "down"))
    assert isinstance(found.pick_nth(0).get(), jax.Array)
    assert model.up.kernel.is_lazy and epoch.current == before


def test_lazy_array_attribute_stays_lazy_until_read() -> None:
    model = sx.Module()
    model.w = sx.Init(jax.nn.initializers.ones, (2,), rngs=sx.Rngs(0))
    found = sx.select(model).at_instances_of(jax.Array)
    assert "lazy" in repr(model)
    assert found.get().tolist() == [1.0, 1.0] and "lazy" not in repr(model)


def test_numbers_in_variables_are_arrays() -> None:
    assert sx.select(sx.Param(2.0)).at_instances_of(jax.Array).keypaths() == (("value",),)


def test_matches_are_found_in_values_of_many_arrays() -> None:
    model = sx.Module()
    model.moments = sx.OptState({"m": jnp.ones(2), "v": (jnp.ones(3), jnp.zeros(1))})
    arrays = sx.select(model).at_instances_of(jax.Array)
    assert arrays.keypaths() == (
        ("moments", "value", "m"),
        ("moments", "value", "v", 0),
        ("moments", "value", "v", 1),
    )
    assert sx.select(model).at(lambda m: m.moments.value["v"][0]).get().shape == (3,)


def test_boxed_value_is_selected_by_its_type() -> None:
    model = sx.Module()
    model.w = sx.OptState(sx.Partitioned(jnp.ones(2), names=("x",)))
    found = sx.select(model).at_instances_of(sx.Partitioned)
    assert found.keypaths() == (("w", "value"),) and found.get().names == ("x",)


def test_abstract_models_are_selected_without_numbers() -> None:
    model = sx.eval_shape(lambda: sx.nn.Linear(2, 3, rngs=sx.Rngs(0)))
    found = sx.select(model).at_instances_of(jax.ShapeDtypeStruct)
    assert found.keypaths() == (("kernel", "value"), ("bias", "value"))
    assert [value.shape for value in found] == [(2, 3), (3,)]


def test_selecting_is_no_structural_change(model: Model) -> None:
    sx.graphdef(model)
    before = epoch.current
    sx.select(model).at_instances_of(Block).at(lambda b: b.attn).invert().get_all()
    assert epoch.current == before


# --- views of a stack ---


def test_in_a_stack_the_stacked_layer_is_found() -> None:
    stack = sx.nn.Stack(lambda: sx.nn.Linear(2, 2, rngs=sx.Rngs(0)), 3)
    assert sx.select(stack).at_instances_of(sx.nn.Linear).keypaths() == (("stacked",),)
    assert sx.select(stack[1]).at_instances_of(sx.Param).keypaths() == (("kernel",), ("bias",))


def test_layer_view_is_not_part_of_the_model() -> None:
    stack = sx.nn.Stack(lambda: sx.nn.Linear(2, 2, rngs=sx.Rngs(0)), 3)
    for accessor in (lambda s: s[1], lambda s: s[1].kernel):
        with pytest.raises(SelectionError, match="view of one layer") as caught:
            sx.select(stack).at(accessor)
    names = {"sx": sx, "stack": stack, "i": 1}
    assert run_advice(caught.value, "sx.select(stack[i])", names).at_instances_of(sx.Param)
    apart = run_advice(caught.value, "sx.nn.unstack_layers(stack)", names)
    assert sx.select(apart).at_instances_of(sx.nn.Linear).count() == 3


# --- text ---


def test_repr_marks_the_selection_and_folds_the_rest(model: Model) -> None:
    found = sx.select(model).at(lambda m: (m.blocks[1].mlp, m.embed, m.scale))
    assert repr(found).splitlines() == [
        "Selection of 3 places in a Model:",
        "  Model(",
        ">   embed=Param(float32[3, 2], axes=('vocab', 'embed'))",
        "    blocks=List(",
        "      Block(...)",
        "      Block(",
        "        attn=Linear(...)",
        ">       mlp=Linear(...)",
        "        kind='gated'",
        "      )",
        "    )",
        "    heads=Dict(...)",
        "    norms=tuple(...)",
        ">   unembed=<same Param as .embed>",
        ">   scale=float32[2]",
        "  )",
    ]


def test_text_shows_places_inside_values(model: Model) -> None:
    found = sx.select(model, every_path=True).at(lambda m: m.unembed.value)
    assert repr(found).splitlines()[:4] == [
        "Selection of 1 place in a Model:",
        "  Model(",
        "    embed=Param(float32[3, 2], axes=('vocab', 'embed'))",
        "    blocks=List(...)",
    ]
    assert repr(sx.select(model).at_instances_of(bytes)).splitlines() == [
        "Selection of 0 places in a Model:",
        "  Model(...)",
    ]


def test_repr_of_plain_trees_shows_no_numbers() -> None:
    model = sx.Module()
    model.w = sx.Param({"m": jnp.ones(2), "v": [jnp.ones(3)]})
    model.itself = model
    tree = {"model": model, "pair": Pair(jnp.ones(4), (1.0, print)), "state": sx.State({"x": {}})}
    found = sx.select(tree).at_keypaths("model.w.value.v[0]", "pair[1][0]")
    assert repr(found).splitlines() == [
        "Selection of 2 places in a dict:",
        "  dict(",
        "    'model': Module(",
        "      w=Param({'m': 'float32[2]', 'v': ['float32[3]']})",
        "        value=dict(",
        "          'm': float32[2]",
        "          'v': list(",
        ">           float32[3]",
        "          )",
        "        )",
        "      itself=<same Module as .model>",
        "    )",
        "    'pair': Pair(",
        "      first=float32[4]",
        "      second=tuple(",
        ">       1.0",
        "        <built-in function print>",
        "      )",
        "    )",
        "    'state': State()",
        "  )",
    ]


def test_text_of_a_large_selection_is_cut() -> None:
    text = repr(sx.select([sx.Param(0.0) for _ in range(300)]).at_children())
    assert len(text.splitlines()) == 102 and text.endswith("more lines")
