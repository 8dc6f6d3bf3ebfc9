# SPDX-License-Identifier: Apache-2.0
"""Selections: which places are found, and what is read there."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardax as sx
from shardax.errors import SelectionError
from tests.advice import run_advice
from tests.strategies import Pair


class Block(sx.Module):
    """Two layers and some configuration."""

    def __init__(self, seed: int, kind: str = "plain") -> None:
        self.attn = sx.nn.Linear(2, 2, rngs=sx.Rngs(seed))
        self.mlp = sx.nn.Linear(2, 2, use_bias=False, rngs=sx.Rngs(seed + 1))
        self.kind = kind


class Model(sx.Module):
    """Blocks in a list, a tied Variable, an array, a tuple and a dict."""

    def __init__(self) -> None:
        self.embed = sx.Param(jnp.ones((3, 2)), axes=("vocab", "embed"))
        self.blocks = [Block(0), Block(2, "gated")]
        self.scale = jnp.ones(2)
        self.heads = {"en": sx.nn.Linear(2, 3, rngs=sx.Rngs(5)), "de": 0.5}
        self.norms = (sx.nn.RMSNorm(2), "last")
        self.unembed = self.embed

    @property
    def last(self) -> Any:
        """The last block."""
        return self.blocks[-1]

    def nth(self, n: int) -> Any:
        """One block."""
        return self.blocks[n]


def takes(*args: Any, **kwargs: Any) -> None:
    """Takes anything."""


@pytest.fixture
def model() -> Model:
    """A new Model."""
    return Model()


# --- narrowing by class, test and value ---


def test_selection_starts_as_the_whole_tree(model: Model) -> None:
    selection = sx.select(model)
    assert selection.get() is model and selection.tree is model
    assert selection.keypaths() == ((),) and len(selection) == 1


def test_instances_are_the_outermost_in_order(model: Model) -> None:
    found = sx.select(model).at_instances_of(Block)
    assert found.get_all() == (model.blocks[0], model.blocks[1])
    assert found.keypaths() == (("blocks", 0), ("blocks", 1))
    assert list(found) == list(found.get_all())


def test_innermost_instances_are_those_that_hold_no_other() -> None:
    inner = sx.nn.Sequential(jax.nn.relu)
    model = sx.nn.Sequential(inner, sx.nn.Sequential(sx.nn.Sequential()), jax.nn.relu)
    selection = sx.select(model)
    assert selection.at_instances_of(sx.nn.Sequential).keypaths() == ((),)
    found = selection.at_instances_of(sx.nn.Sequential, innermost=True)
    assert found.keypaths() == (("layers", 0), ("layers", 1, "layers", 0))


def test_innermost_looks_into_what_was_met_before() -> None:
    leaf = sx.nn.Sequential()
    model = {"leaf": leaf, "around": sx.nn.Sequential(leaf)}
    found = sx.select(model).at_instances_of(sx.nn.Sequential, innermost=True)
    assert found.keypaths() == (("leaf",),)


@pytest.mark.parametrize("classes", [sx.nn.RMSNorm | Block, (sx.nn.RMSNorm, Block)])
def test_classes_may_be_a_union_or_a_tuple(model: Model, classes: Any) -> None:
    found = sx.select(model).at_instances_of(classes)
    assert found.keypaths() == (("blocks", 0), ("blocks", 1), ("norms", 0))


def test_at_instances_of_refuses_what_is_no_class(model: Model) -> None:
    with pytest.raises(SelectionError, match="at_subtrees_where"):
        sx.select(model).at_instances_of(lambda x: True)


def test_shared_object_is_one_place_unless_asked(model: Model) -> None:
    def tied(param: Any) -> bool:
        return isinstance(param, sx.Param) and param.shape == (3, 2)

    assert sx.select(model).at_subtrees_where(tied).keypaths() == (("embed",),)
    every = sx.select(model, every_path=True).at_subtrees_where(tied)
    assert every.keypaths() == (("embed",), ("unembed",))
    assert every.get_all() == (model.embed, model.embed)


def test_cycle_is_walked_once() -> None:
    first, second = sx.Module(), sx.Module()
    first.other, second.other = second, first
    second.w = sx.Param(1.0)
    for every_path in (False, True):
        selection = sx.select(first, every_path=every_path)
        assert selection.at_instances_of(sx.Param).keypaths() == (("other", "w"),)


def test_predicates_take_value_or_path_and_value(model: Model) -> None:
    by_value = sx.select(model).at_subtrees_where(lambda x: isinstance(x, str) and x == "gated")
    by_path = sx.select(model).at_subtrees_where(lambda path, x: path[-1:] == ("kind",))
    assert by_value.keypaths() == (("blocks", 1, "kind"),)
    assert by_path.keypaths() == (("blocks", 0, "kind"), ("blocks", 1, "kind"))


def test_predicate_without_signature_is_given_the_value(model: Model) -> None:
    texts = sx.select(model).at_instances_of(str)
    assert texts.keypaths() == (("blocks", 0, "kind"), ("blocks", 1, "kind"), ("norms", 1))
    assert texts.where({"gated", "last"}.__contains__).keypaths() == (
        ("blocks", 1, "kind"),
        ("norms", 1),
    )


def test_filters_are_tests(model: Model) -> None:
    model.embed.set_metadata(tag="slow")
    selection = sx.select(model)
    params = selection.at_instances_of(sx.Param)
    assert selection.at_subtrees_where("slow").keypaths() == (("embed",),)
    assert selection.at_subtrees_where(sx.PathContains("heads")).keypaths() == (("heads",),)
    assert params.where(sx.All(sx.PathContains("blocks"), sx.PathContains("bias"))).keypaths() == (
        ("blocks", 0, "attn", "bias"),
        ("blocks", 1, "attn", "bias"),
    )
    assert params.where(sx.Not(sx.PathContains("kernel"))).count() == 5
    assert params.where(...).keypaths() == params.keypaths() and params.where(None).count() == 0
    assert selection.at_subtrees_where(sx.nn.RMSNorm).keypaths() == (("norms", 0),)


def test_test_may_return_a_numpy_bool(model: Model) -> None:
    big = sx.select(model).at_instances_of(sx.Param).where(lambda p: np.prod(p.shape) > 4)
    assert big.keypaths() == (("embed",), ("heads", "en", "kernel"))


def test_exception_of_a_predicate_propagates_with_path(model: Model) -> None:
    with pytest.raises(ZeroDivisionError) as caught:
        sx.select(model).at_instances_of(Block).pick_nth(1).where(lambda block: 1 / 0)
    assert ".blocks[1]" in caught.value.__notes__[0]


def test_function_of_other_arguments_is_refused(model: Model) -> None:
    with pytest.raises(SelectionError, match=r"\(path, value\)"):
        sx.select(model).where(lambda a, b, c: True)


def test_builtin_functions_are_tests() -> None:
    tree = {"a": jax.nn.relu, "b": 1}
    assert sx.select(tree).at_children().where(callable).keypaths() == (("a",),)


def test_equality_is_exact_in_type() -> None:
    tree = {"int": 1, "bool": True, "float": 1.0, "deep": (1, [True]), "text": "1"}
    find = sx.select(tree).at_equal_to
    assert find(1).keypaths() == (("int",), ("deep", 0))
    assert find(True).keypaths() == (("bool",), ("deep", 1, 0))
    assert find(1.0).keypaths() == (("float",),)
    assert find((1, "x")).count() == 0


def test_arrays_are_equal_by_dtype_shape_and_numbers() -> None:
    tree = [jnp.ones(2), np.ones(2, np.float32), jnp.ones(2, jnp.int32), jnp.ones((1, 2)), 1.0]
    assert sx.select(tree).at_equal_to(jnp.ones(2)).keypaths() == ((0,), (1,))


def test_object_equals_only_itself(model: Model) -> None:
    assert sx.select(model).at_equal_to(model.last.attn).keypaths() == (("blocks", 1, "attn"),)
    with pytest.raises(SelectionError, match="at_subtrees_where"):
        sx.select(model).at_equal_to({"a": []})


# --- narrowing by path and accessor ---


@pytest.mark.parametrize(
    ("path", "found"),
    [
        (("blocks", 1, "attn"), ("blocks", 1, "attn")),
        (".blocks[1].attn", ("blocks", 1, "attn")),
        ("blocks[1].attn", ("blocks", 1, "attn")),
        ("heads['de']", ("heads", "de")),
        (".heads.de", ("heads", "de")),
        (".embed.value", ("embed", "value")),
        (".scale", ("scale",)),
        (("norms", 1), ("norms", 1)),
        ((), ()),
        ("(root)", ()),
    ],
)
def test_paths_are_tuples_or_text(model: Model, path: Any, found: Any) -> None:
    assert sx.select(model).at_keypaths(path).keypaths() == (found,)


def test_second_path_selects_the_shared_object(model: Model) -> None:
    assert sx.select(model).at_keypaths("unembed").get() is model.embed
    assert sx.select(model).at_keypaths("unembed", "embed").keypaths() == (("unembed",),)


def test_unknown_path_raises_with_the_nearest_known(model: Model) -> None:
    with pytest.raises(SelectionError, match=r"\.unebmed.*Did you mean \.unembed"):
        sx.select(model).at_keypaths(".unebmed")
    with pytest.raises(SelectionError, match=r"\.heads\[1\]"):
        sx.select(model).at_keypaths(("heads", 1))


def test_paths_keep_one_and_true_apart() -> None:
    with pytest.raises(SelectionError):
        sx.select({1: "a"}).at_keypaths((True,))


def test_path_must_be_within_what_is_selected(model: Model) -> None:
    blocks = sx.select(model).at_instances_of(Block)
    assert blocks.at_keypaths(".blocks[0].kind").get() == "plain"
    with pytest.raises(SelectionError, match=r"\.blocks\[0\]: Block"):
        blocks.at_keypaths(".embed")


def test_places_within_each_other_cannot_be_selected(model: Model) -> None:
    with pytest.raises(SelectionError, match=r"\.blocks\[0\] and \.blocks\[0\]\.attn"):
        sx.select(model).at_keypaths(".blocks[0]", ".blocks[0].attn")
    with pytest.raises(SelectionError, match=r"\.heads and \.heads\.en"):
        sx.select(model).at(lambda m: (m.heads["en"], m.heads))


ACCESSORS: list[tuple[Any, Any]] = [
    (lambda m: m.blocks[0].attn, [("blocks", 0, "attn")]),
    (lambda m: m.blocks[-1], [("blocks", 1)]),
    (lambda m: m.blocks[:1], [("blocks", 0)]),
    (lambda m: [block.mlp for block in m.blocks], [("blocks", 0, "mlp"), ("blocks", 1, "mlp")]),
    (lambda m: (m.scale, m.embed), [("scale",), ("embed",)]),
    (lambda m: [b for b in m.blocks if b.kind == "gated"], [("blocks", 1)]),
    (lambda m: (b for b in m.blocks if isinstance(b, Block)), [("blocks", 0), ("blocks", 1)]),
    (lambda m: m.heads["de"], [("heads", "de")]),
    (lambda m: list(m.heads.values()), [("heads", "en"), ("heads", "de")]),
    (lambda m: m.norms[0], [("norms", 0)]),
    (lambda m: m.embed.value, [("embed", "value")]),
    (lambda m: m.last.attn, [("blocks", 1, "attn")]),
    (lambda m: m.nth(0), [("blocks", 0)]),
    (lambda m: m.blocks[len(m.blocks) - 1].kind, [("blocks", 1, "kind")]),
    (lambda m: [m.blocks, {}.values()], [("blocks",)]),
    (lambda m: (), []),
]


@pytest.mark.parametrize(("accessor", "found"), ACCESSORS)
def test_accessors_point_at_one_part_or_several(model: Model, accessor: Any, found: Any) -> None:
    assert list(sx.select(model).at(accessor).keypaths()) == found


@pytest.mark.parametrize(
    ("accessor", "found"),
    [
        (lambda m: m.rows[m.first], [("rows", 1)]),
        (lambda m: [m.rows[i] for i in range(m.first)], [("rows", 0)]),
        (lambda m: {"b": m.rows}[m.name], [("rows",)]),
        (lambda m: [m.heads[letter] for letter in m.word], [("heads", "b"), ("heads", "a")]),
        (lambda m: m.rows[0] if "b" in m.word else m.rows[1], [("rows", 0)]),
        (lambda m: m.rows[0] if m.name in m.word else m.rows[1], [("rows", 0)]),
        (lambda m: m.rows[0] if m.off else m.rows[1], [("rows", 1)]),
        (lambda m: m.heads.get("a"), [("heads", "a")]),
        (lambda m: m.choose(m), [("rows", 1)]),
    ],
)
def test_configuration_can_be_used_inside_an_accessor(accessor: Any, found: Any) -> None:
    model = sx.Module()
    model.rows, model.first, model.off = [sx.Param(1.0), sx.Param(2.0)], 1, False
    model.name, model.word, model.choose = "b", "ba", lambda m: m.rows[1]
    model.heads = {"a": sx.Param(3.0), "b": sx.Param(4.0)}
    assert list(sx.select(model).at(accessor).keypaths()) == found


def test_accessor_that_returns_text_is_refused_with_place(model: Model) -> None:
    with pytest.raises(
        SelectionError, match=r"returned '<what stands at \.blocks\[0\]>' of type str"
    ):
        sx.select(model).at(lambda m: repr(m.blocks[0]))


def test_accessor_is_asked_about_every_selected_place(model: Model) -> None:
    found = sx.select(model).at_instances_of(Block).at(lambda block: (block.mlp, block.kind))
    assert found.keypaths() == (
        ("blocks", 0, "mlp"),
        ("blocks", 0, "kind"),
        ("blocks", 1, "mlp"),
        ("blocks", 1, "kind"),
    )


def test_accessors_know_named_tuples_and_other_pytrees() -> None:
    tree = {"pair": Pair(1, Pair(2, 3)), "state": sx.State({"a": {0: {"b": 4}}})}
    at = sx.select(tree).at
    assert at(lambda t: t["pair"].second.first).keypaths() == (("pair", 1, 0),)
    assert at(lambda t: t["state"]["a"][0]["b"]).keypaths() == (("state", "a", 0, "b"),)
    assert at(lambda t: t["state"].a[0]).keypaths() == (("state", "a", 0),)


def test_accessor_of_value_outside_the_tree_is_refused(model: Model) -> None:
    with pytest.raises(SelectionError, match="not a part") as caught:
        sx.select(model).at_instances_of(Block).at(lambda block: 3)
    assert ".blocks[0]" in caught.value.__notes__[0]
    with pytest.raises(SelectionError, match="not in the Model"):
        sx.select(model).at(lambda m: Block(0))
    with pytest.raises(AttributeError, match="blcks"):
        sx.select(model).at(lambda m: m.blcks)
    with pytest.raises(IndexError):
        sx.select(model).at(lambda m: m.blocks[7])


def test_accessor_cannot_write(model: Model) -> None:
    with pytest.raises(SelectionError) as caught:
        sx.select(model).at(lambda m: setattr(m, "scale", 3.0))
    code = "sx.select(model).at(lambda m: m.scale).set(value)"
    edited = run_advice(caught.value, code, {"sx": sx, "model": model, "value": jnp.zeros(2)})
    assert (edited.scale.tolist(), model.scale.tolist()) == ([0.0, 0.0], [1.0, 1.0])


@pytest.mark.parametrize(
    ("change", "place"),
    [
        (lambda m: m.heads.pop("a"), "pop of .heads"),
        (lambda m: m.heads.update({}), "update of .heads"),
        (lambda m: m.rows.pop(), "pop of .rows"),
        (lambda m: m.rows.append(m.rows[0]), "append of .rows"),
        (lambda m: m.rows.reverse(), "reverse of .rows"),
        (lambda m: m.rows.__iadd__([sx.Param(4.0)]), "__iadd__ of .rows"),
    ],
)
def test_accessor_cannot_change_containers(change: Any, place: str) -> None:
    model = sx.Module()
    model.rows, model.heads = [sx.Param(1.0), sx.Param(2.0)], {"a": sx.Param(3.0)}
    before = sx.graphdef(model)
    with pytest.raises(SelectionError) as caught:
        sx.select(model).at(change)
    assert f"The accessor called {place}" in str(caught.value)
    assert sx.graphdef(model) == before
    names: Any = {"sx": sx, "model": model}
    run_advice(caught.value, "model = sx.clone(model)", names)
    change(names["model"])
    assert sx.graphdef(model) == before


# --- other narrowing ---


def test_children_are_what_is_directly_inside(model: Model) -> None:
    names = [path[-1] for path in sx.select(model).at_children().keypaths()]
    assert names == ["embed", "blocks", "heads", "norms", "scale"]
    inside = sx.select(model).at(lambda m: (m.norms, m.embed)).at_children()
    assert inside.keypaths() == (("norms", 0), ("norms", 1), ("embed", "value"))


def test_pick_nth_picks_one_place_by_number(model: Model) -> None:
    blocks = sx.select(model).at_instances_of(Block)
    assert blocks.pick_nth(1).get() is blocks.pick_nth(-1).get() is model.blocks[1]
    for n in (2, -3):
        with pytest.raises(SelectionError, match=r"\.blocks\[0\]: Block"):
            blocks.pick_nth(n)


def test_refine_selects_within_each_selected_part(model: Model) -> None:
    def first_kernel(part: Any) -> sx.Selection:
        return sx.select(part).at_instances_of(sx.Param).pick_nth(0)

    found = sx.select(model).at_instances_of(Block).refine(first_kernel)
    assert found.keypaths() == (("blocks", 0, "attn", "kernel"), ("blocks", 1, "attn", "kernel"))
    assert found.get_all() == tuple(block.attn.kernel for block in model.blocks)


def test_refine_reaches_into_tuples_values_and_arrays() -> None:
    model = sx.Module()
    model.pair = (jnp.zeros(1), ("a", "b"))
    model.w = sx.Param({"m": jnp.ones(1), "v": [jnp.ones(2)]})

    def last(part: Any) -> sx.Selection:
        return sx.select(part).at_children().pick_nth(-1)

    selection = sx.select(model).at(lambda m: (m.pair, m.w.value))
    assert selection.refine(sx.select).keypaths() == selection.keypaths()
    found = selection.refine(last)
    assert found.keypaths() == (("pair", 1), ("w", "value", "v"))
    assert sx.select(model).at(lambda m: m.pair).refine(last).set("c").pair[1] == "c"
    new = found.pick_nth(1).refine(last).set(jnp.full(2, 7.0))
    assert new.w.value["v"][0].tolist() == [7.0, 7.0]


def test_refine_needs_a_selection_of_the_part(model: Model) -> None:
    blocks = sx.select(model).at_instances_of(Block)
    with pytest.raises(SelectionError, match=r"\.blocks\[0\]"):
        blocks.refine(lambda block: sx.select(model))
    with pytest.raises(SelectionError) as caught:
        blocks.refine(lambda block: block.attn)

    def inside(part: Any) -> Any:
        part = run_advice(caught.value, "sx.select(part)", {"sx": sx, "part": part})
        return part.at(lambda block: block.attn)

    assert blocks.refine(inside).count() == blocks.count()


def test_invert_selects_the_largest_parts_without_anything_selected(model: Model) -> None:
    rest = sx.select(model).at(lambda m: (m.blocks[0].attn, m.embed, m.norms[1])).invert()
    assert rest.keypaths() == (
        ("blocks", 0, "mlp"),
        ("blocks", 0, "kind"),
        ("blocks", 1),
        ("heads",),
        ("norms", 0),
        ("scale",),
    )
    assert sx.select(model).invert().count() == 0
    assert sx.select(model).at_instances_of(bytes).invert().keypaths() == ((),)


def test_inverting_twice_gives_the_largest_parts_back(model: Model) -> None:
    blocks = sx.select(model).at(lambda m: m.blocks).at_children()
    assert blocks.invert().invert().keypaths() == (("blocks",),)


# --- leaves, indices, selections of the new tree ---


def test_leaves_are_those_of_jax() -> None:
    model = sx.nn.Sequential(sx.nn.MLP(2, 4, rngs=sx.Rngs(0)), jax.nn.relu)
    mlp: Any = model.layers[0]
    model.table, model.tied = (jnp.ones(2), "text"), mlp.up
    model.caches = sx.Cache({"a": jnp.zeros(3), "b": (jnp.ones(()),)})
    for tree in (model, {"m": model, "rate": 0.5, "none": None, "list": [1, "two", ()]}):
        values = jax.tree.leaves(tree)
        found = sx.select(tree).at_pytree_leaves().get_all()
        assert sorted(map(str, found)) == sorted(map(str, values))
    doubled = sx.select(model).at_pytree_leaves().apply(lambda x: 2 * x)
    assert doubled.caches.value["b"][0] == 2 and doubled.table[1] == "text"
    assert doubled.tied is doubled.layers[0].up


def test_childless_places_have_no_parts() -> None:
    tree = {"a": [1, ()], "w": sx.Param(jnp.ones(2)), "f": jax.nn.relu, "d": {}}
    assert sx.select(tree).at_childless().keypaths() == (
        *(("a", 0), ("a", 1), ("w", "value"), ("f",), ("d",)),
    )


def test_apply_may_count_places_and_keep_them_selected() -> None:
    mlp = sx.nn.MLP(2, 4, rngs=sx.Rngs(0))
    linears = sx.select(mlp).at_instances_of(sx.nn.Linear)
    numbered = linears.apply(lambda i, linear: (i, linear), with_index=True)
    assert [numbered.gate[0], numbered.up[0], numbered.down[0]] == [0, 1, 2]
    wrapped = linears.apply(lambda linear: sx.nn.Sequential(linear), keep_selected=True)
    assert wrapped.keypaths() == linears.keypaths() and wrapped.tree is not mlp
    assert [type(each) for each in wrapped] == [sx.nn.Sequential] * 3
    again = wrapped.apply(lambda i, s: s.layers[0], with_index=True)
    assert again.up is mlp.up
    with sx.select(mlp).edit() as editing:
        kept = editing.at(lambda m: m.activation).apply(str.upper, keep_selected=True)
        assert kept.tree is mlp and kept.set("gelu") is mlp
    assert mlp.activation == "gelu"


def test_values_may_be_a_function_of_the_path() -> None:
    tree = {"a": 1, "b": [2, 3]}
    texts = sx.select(tree).at_instances_of(int).set_by_path(lambda path: len(path))
    assert texts == {"a": 1, "b": [2, 2]}
