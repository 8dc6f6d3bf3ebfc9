# SPDX-License-Identifier: Apache-2.0
"""Automatic batching: finding the axes of a nested problem, and refusing to guess in doubt."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import shardax as sx
from shardax.errors import FilterError, PrefixError, TransformError
from tests.advice import run_advice


class Affine(sx.Module):
    """A model whose weight is 4 by 4, with a counter and a cache."""

    def __init__(self) -> None:
        self.weight = sx.Param(jnp.eye(4), axes=("in", "out"))
        self.bias = sx.Param(jnp.ones(3))
        self.seen = sx.Cache(jnp.zeros((2, 4)), axes=("length", "batch"))

    def __call__(self, x: Any) -> Any:
        self.seen[...] = self.seen + 1
        return self.weight @ x


class Problem(NamedTuple):
    """A problem as people nest it."""

    x: Any
    options: dict[str, Any]


def axes_of(tree: Any, size: int, **options: Any) -> Any:
    return sx.batch_axes(tree, size, **options).axes


# --- what is found ---


def test_array_is_batched_along_its_leading_dimension() -> None:
    problem = Problem(np.ones((5, 2)), {"shared": jnp.ones(3), "deep": [jnp.ones(5)], "scale": 2.0})
    options = {"deep": [0], "scale": None, "shared": None}
    assert axes_of(problem, 5) == Problem(0, options)


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("make", [jnp.ones, np.ones, lambda s: jax.ShapeDtypeStruct(s, jnp.int8)])
def test_match_along_other_dimension_needs_declaration(make: Any, strict: bool) -> None:
    """The trap: x (4, 7) @ W (7, 4) in a batch of 4, where W has the size by chance."""
    problem = Problem(make((4, 7)), {"W": make((7, 4))})
    with pytest.raises(TransformError, match=r"\.W: .*axis 1, which is not its lead"):
        sx.batch_axes(problem, 4, strict=strict)
    for entry, axis in ((None, None), (1, 1), (-1, -1), (..., 1)):
        where = {sx.PathContains("W"): entry}
        assert axes_of(problem, 4, where=where, strict=strict) == Problem(0, {"W": axis})


def test_vmap_names_argument_matching_along_other_dimension() -> None:
    x, w = jnp.arange(28.0).reshape(4, 7), jnp.arange(28.0).reshape(7, 4)

    def f(x: Any, W: Any) -> Any:  # noqa: N803 (a matrix)
        return (x @ W).sum()

    for call in (lambda f: f(x, w), lambda f: f(x, W=w)):
        with pytest.raises(TransformError, match=r"\.W: float32\[7, 4\]"):
            call(sx.vmap(f, in_axes="auto", batch=4))
        batch = sx.Batch(4, where={sx.PathContains("W"): None})
        assert call(sx.vmap(f, in_axes="auto", batch=batch)).tolist() == [1582, 4228, 6874, 9520]


def test_nonarrays_are_shared_and_none_stays_none() -> None:
    problem = {"x": jnp.ones(5), "kind": "l2", "act": jnp.tanh, "absent": None, "flag": True}
    assert axes_of(problem, 5) == {
        "x": 0, "kind": None, "act": None, "absent": None, "flag": None,
    }  # fmt: skip


def test_shapes_are_enough() -> None:
    abstract = jax.ShapeDtypeStruct((5, 2), jnp.float32)
    lazy = sx.nn.Linear(2, 3, rngs=sx.Rngs(0))
    assert axes_of((abstract, lazy), 5) == (0, None)
    assert lazy.kernel.is_lazy


def test_report_gives_axis_and_reason_per_leaf() -> None:
    model = Affine()
    found = sx.batch_axes(
        {"model": model, "x": jnp.ones((4, 2)), "kind": "l2"},
        4,
        where={sx.Param: None, sx.Cache: "batch"},
    )
    assert repr(found).splitlines() == [
        "batch of 4:",
        "  .kind          str                  shared  not an array",
        "  .model.weight  Param float32[4, 4]  shared  declared by Param",
        "  .model.bias    Param float32[3]     shared  declared by Param",
        "  .model.seen    Cache float32[2, 4]  axis 1  its dimension 'batch'",
        "  .x             float32[4, 2]        axis 0  its leading dimension of size 4",
    ]
    assert found.rows[3] == (
        ("model", "seen"), "Cache float32[2, 4]", 1, "its dimension 'batch'",
    )  # fmt: skip
    assert found.size == 4


# --- doubt ---


def test_square_array_is_refused() -> None:
    """The trap: with x and W both 4 by 4 a guess gives results of shape (4,), all wrong."""
    problem = {"x": jnp.ones((4, 4)), "W": jnp.eye(4)}
    with pytest.raises(TransformError) as caught:
        sx.batch_axes(problem, 4)
    assert "  .W: float32[4, 4]" in str(caught.value) and "  .x: float" in str(caught.value)
    assert "sx.PathContains('W'): None" in str(caught.value)
    declared = {sx.PathContains("W"): None, sx.PathContains("x"): 1}
    assert axes_of(problem, 4, where=declared) == {"x": 1, "W": None}


@pytest.mark.parametrize("kind", [sx.Param, sx.BatchStat, sx.Variable, sx.OptState])
def test_model_state_of_matching_size_is_refused(kind: Any) -> None:
    state = kind(jnp.ones((4, 3)))
    with pytest.raises(TransformError, match=r"\.state: ") as caught:
        sx.batch_axes({"x": jnp.ones(4), "state": state}, 4)
    assert f"sx.{kind.__name__}: None" in str(caught.value)
    assert axes_of({"x": jnp.ones(4), "state": state}, 4, where={kind: 0}) == {"x": 0, "state": 0}


def test_array_attributes_and_boxes_count_as_state() -> None:
    module = sx.Module()
    module.table = jnp.ones((4, 3))
    box = sx.Partitioned(jnp.ones((4, 3)), ("model", None))
    with pytest.raises(TransformError, match=r"\.table(.|\n)*PathContains\('table'\)"):
        sx.batch_axes((jnp.ones(4), module), 4)
    with pytest.raises(TransformError, match=r"\.box"):
        sx.batch_axes({"x": jnp.ones(4), "box": box}, 4)


def test_state_entries_keep_their_variable_types() -> None:
    state = sx.state(Affine())
    problem = {"params": state, "x": jnp.ones(4)}
    with pytest.raises(TransformError, match=r"\.params\.weight: Param(.|\n)*sx\.Param: None"):
        sx.batch_axes(problem, 4)
    batch = sx.Batch(4, where={sx.Param: None, sx.PathContains("params"): "batch"})
    found = batch.find(problem).axes
    assert found["params"].flat() == {("weight",): None, ("bias",): None, ("seen",): 1}
    for vmap in (
        lambda f: sx.vmap(f, in_axes="auto", batch=batch),
        lambda f: jax.vmap(f, in_axes=(found,)),
    ):
        y = vmap(lambda p: p["params"].seen.shape[0] * p["x"] + p["params"].weight.sum())(problem)
        assert y.tolist() == [6.0, 6.0, 6.0, 6.0]


def test_batch_axes_lists_all_ambiguous_arrays() -> None:
    with pytest.raises(TransformError) as caught:
        sx.batch_axes([jnp.ones((2, 2)) for _ in range(15)], 2)
    assert str(caught.value).count("float32[2, 2]") == 12 and "and 3 more" in str(caught.value)


def test_batch_of_one_is_never_guessed() -> None:
    problem = {"x": jnp.ones((1, 3)), "W": jnp.ones(3)}
    with pytest.raises(TransformError, match=r"\.x"):
        sx.batch_axes(problem, 1)
    with pytest.raises(TransformError, match=r"\.x"):
        sx.batch_axes(problem, 1, strict=False)
    assert axes_of(problem, 1, where={sx.PathContains("x"): 0}) == {"x": 0, "W": None}


def test_nonstrict_takes_leading_dimension_and_shares_state() -> None:
    found = sx.batch_axes((jnp.ones((4, 4)), Affine()), 4, strict=False)
    assert found.axes == (0, None)
    assert "the first of its 2 dimensions" in repr(found) and "state of a model" in repr(found)


def test_arguments_without_batched_arrays_are_refused() -> None:
    with pytest.raises(TransformError, match=r"size 7.*\.x float32\[5\]"):
        sx.batch_axes({"x": jnp.ones(5)}, 7)
    assert axes_of({"x": jnp.ones(5)}, 7, strict=False) == {"x": None}


# --- declarations ---


def test_filter_selects_what_is_batched() -> None:
    problem = {"x": jnp.ones((4, 3)), "W": jnp.ones((3, 4)), "model": Affine()}
    assert axes_of(problem, 4, where=sx.PathContains("x")) == {"x": 0, "W": None, "model": None}
    either = [sx.PathContains("x"), sx.PathContains("W")]
    assert axes_of(problem, 4, where=either) == {"x": 0, "W": 1, "model": None}
    everything = axes_of({"x": jnp.ones(4), "w": sx.Param(jnp.ones((3, 4)))}, 4, where=...)
    assert everything == {"x": 0, "w": 1}


def test_axes_are_declared_by_name() -> None:
    box = sx.Partitioned(jnp.ones((3, 4)), (None, "batch"))
    bare = sx.Param(jnp.ones(3))
    problem = {"model": Affine(), "box": box, "bare": bare, "x": jnp.ones(3)}
    found = axes_of(problem, 4, where={...: "batch"})
    assert (found["box"], found["bare"], found["x"]) == (1, None, None)
    assert found["model"].lookup(("seen",), None) == 1
    assert found["model"].lookup(("weight",), None) is None
    with pytest.raises(TransformError, match=r"\.x.*no axis names"):
        sx.batch_axes({"x": jnp.ones(4)}, 4, where={...: "batch"})


def test_named_array_is_batched_along_positional_dimensions() -> None:
    named = sx.named.wrap(jnp.ones((4, 2)), "batch", "feature")
    assert axes_of((named, jnp.ones(4)), 4) == (None, 0)
    assert axes_of(named.untag("batch"), 4) == 0
    with pytest.raises(TransformError, match="untag"):
        sx.batch_axes(named, 4, where={...: "batch"})
    doubled = sx.vmap(lambda x: 2 * x, in_axes="auto", batch=4)(named.untag("batch"))
    assert doubled.tag("batch").order_as("batch", "feature").data.tolist() == [[2.0, 2.0]] * 4


@pytest.mark.parametrize("axis", [0, 2, -3])
def test_unfitting_declared_axis_raises_with_path(axis: int) -> None:
    with pytest.raises(TransformError, match=rf"\.x.*axis {axis}"):
        sx.batch_axes({"x": jnp.ones((3, 4))}, 4, where={sx.PathContains("x"): axis})


def test_axis_of_nonarray_raises() -> None:
    with pytest.raises(TransformError, match=r"str at \.kind"):
        sx.batch_axes({"kind": "l2", "x": jnp.ones(4)}, 4, where={...: 0})


def test_unknown_path_raises() -> None:
    with pytest.raises(FilterError, match=r"'wieght'.*\.weight"):
        sx.batch_axes(
            {"weight": jnp.ones((4, 3)), "x": jnp.ones(4)},
            4,
            where={sx.PathContains("wieght"): None},
        )


def test_entries_and_sizes_of_wrong_type_are_refused() -> None:
    for entry in (True, 1.0, sx.Carry):
        with pytest.raises(PrefixError, match="Param"):
            sx.Batch(4, where={sx.Param: entry})
    with pytest.raises(FilterError):
        sx.Batch(4, where={3.5: 0})
    for size in (2.0, True, -1):
        with pytest.raises(TransformError) as caught:
            sx.Batch(size)  # pyright: ignore[reportArgumentType] (what is tested)
        names = {"sx": sx, "problem": {"x": jnp.ones((8, 3))}}
        assert run_advice(caught.value, "sx.batch_axes(problem, 8)", names).axes == {"x": 0}
    with pytest.raises(PrefixError, match="by the size of the batch") as caught:
        sx.vmap(jnp.sum, in_axes="auto")(jnp.ones((8, 3)))
    names = {"sx": sx, "f": jnp.sum, "filter": ...}
    by_size = run_advice(caught.value, "sx.vmap(f, in_axes='auto', batch=8)", names)
    batch = run_advice(caught.value, "sx.Batch(8, where={filter: 0})", names)
    for run in (by_size, sx.vmap(jnp.sum, in_axes="auto", batch=batch)):
        assert run(jnp.ones((8, 3))).tolist() == [3] * 8


def test_shared_variable_is_declared_by_any_path() -> None:
    tied = sx.Param(jnp.ones((4, 3)))
    problem = {"a": {"one": tied}, "b": {"two": tied}, "x": jnp.ones(4)}
    for name in ("one", "two"):
        found = axes_of(problem, 4, where={sx.PathContains(name): None})
        assert (found["a"]["one"], found["b"]["two"]) == (None, None)
    where = {sx.PathContains("one"): None, sx.PathContains("two"): 0}
    with pytest.raises(TransformError, match=r"\.a\.one(.|\n)*\.b\.two"):
        sx.batch_axes(problem, 4, where=where)


def test_variable_of_several_arrays_has_one_axis() -> None:
    pair = sx.Variable({"m": jnp.ones((4, 2)), "v": jnp.ones((4, 4))})
    assert axes_of(pair, 4, where={...: ...}) == 0
    assert axes_of(pair, 4, where={...: 0}) == 0
    with pytest.raises(TransformError):
        sx.batch_axes(pair, 4, where={...: 1})


# --- streams ---


def test_streams_are_shared_only_on_request() -> None:
    rngs = sx.Rngs(0)
    x = jnp.ones((5, 2))
    draw = sx.vmap(lambda r, x: jax.random.normal(r.params()), in_axes="auto", batch=5)
    assert len(set(draw(rngs, x).tolist())) == 5
    assert len(set(draw(sx.Rngs(0).fork(split=5), x).tolist())) == 5
    same = sx.vmap(
        lambda r, x: jax.random.normal(r.params()),
        in_axes="auto",
        batch=sx.Batch(5, where={sx.RngState: None}),
    )
    assert len(set(same(sx.Rngs(0), x).tolist())) == 1


def test_function_of_a_stream_makes_an_ensemble() -> None:
    make = sx.vmap(lambda rngs: sx.nn.Linear(2, 3, rngs=rngs), in_axes="auto", batch=4)
    assert make(sx.Rngs(0)).kernel.shape == (4, 2, 3)


# --- vmap ---


def test_vmap_finds_axes_at_every_call() -> None:
    @sx.vmap(in_axes="auto", batch=5)
    def f(problem: Any, *, weights: Any, power: Any = 1) -> Any:
        return problem["scale"] * (problem["x"] * weights).sum() ** power

    x, w = jnp.arange(10.0).reshape(5, 2), jnp.array([1.0, 2.0])
    expected = 3 * (x @ w)
    assert f({"x": x, "scale": 3.0}, weights=w).tolist() == expected.tolist()
    each = f({"x": x, "scale": jnp.full(5, 3.0)}, weights=jnp.tile(w, (5, 1)), power=1)
    assert each.tolist() == expected.tolist()


def test_vmap_writes_along_the_declared_axis() -> None:
    model = Affine()
    batch = sx.Batch(4, where={sx.Param: None, sx.Cache: "batch", sx.PathContains("x"): 0})
    y = sx.vmap(lambda model, x: model(x), in_axes="auto", batch=batch)(model, jnp.eye(4))
    assert y.tolist() == jnp.eye(4).tolist()
    assert model.seen.value.tolist() == jnp.ones((2, 4)).tolist()
    assert model.seen.axes == ("length", "batch")


def test_vmap_of_a_bound_method_and_under_jit() -> None:
    model = Affine()
    forward = sx.vmap(model.weight.__matmul__, in_axes="auto", batch=3)
    assert forward(jnp.ones((3, 4))).shape == (3, 4)
    compiled = sx.jit(sx.vmap(lambda x, s: (x * s).sum(), in_axes="auto", batch=3))
    assert compiled(jnp.ones((3, 2)), 2.0).tolist() == [4.0, 4.0, 4.0]


def test_vmap_errors_begin_with_the_argument_name() -> None:
    f = sx.vmap(lambda data, weight: data, in_axes="auto", batch=4)
    with pytest.raises(TransformError, match=r"\.weight: float32\[4, 4\]"):
        f(jnp.ones((4, 2)), jnp.eye(4))


def test_vmap_options_give_one_batch_size() -> None:
    f = sx.vmap(lambda x: x + 1, in_axes="auto", axis_size=3)
    assert f(jnp.zeros(3)).tolist() == [1, 1, 1]
    wrong: list[dict[str, Any]] = [
        {"in_axes": "auto"},
        {"in_axes": "automatic", "batch": 3},
        {"in_axes": "auto", "batch": 3, "axis_size": 4},
        {"in_axes": 0, "batch": 3},
        {"batch": 3},
    ]
    for options in wrong:
        with pytest.raises(PrefixError):
            sx.vmap(lambda x: x, **options)


def test_axes_work_in_jax_vmap_without_modules() -> None:
    """The trap: jax.vmap takes one entry per argument, so a problem needs a tuple around it."""
    problem = {"x": jnp.arange(8.0).reshape(4, 2), "scale": 2.0, "absent": None}
    found = sx.batch_axes((problem,), 4)
    y = jax.vmap(lambda p: (p["x"] * p["scale"]).sum(), in_axes=found.axes)(problem)
    assert y.tolist() == [2.0, 10.0, 18.0, 26.0]


# --- the law: what a loop over the lanes gives, stacked ---

SIZES = st.sampled_from([2, 5])
OTHER = st.sampled_from([(), (4,), (1,), (4, 6)])
"""Shapes without the batch: few, as each is compiled for."""


@st.composite
def leaves(draw: st.DrawFn, size: int) -> tuple[Any, int | None]:
    """A leaf of a problem and its axis."""
    kind = draw(st.sampled_from(["batched", "batched", "shared", "number", "word", "none"]))
    if kind in ("number", "word", "none"):
        return {"number": 1.5, "word": "l2", "none": None}[kind], None
    shape = list(draw(OTHER))
    axis = None
    if kind == "batched":
        axis = draw(st.integers(0, len(shape)))
        shape.insert(axis, size)
    # Sines of less than pi are positive, so that their sum does not cancel.
    numbers = np.arange(np.prod(shape, dtype=int), dtype=np.float32).reshape(shape) / 50
    guessed = [jnp.asarray, np.asarray] if not axis else []  # None, or the leading axis
    form = draw(st.sampled_from([*guessed, lambda array: sx.Param(array)]))
    return form(numbers), axis


@st.composite
def problems(draw: st.DrawFn) -> tuple[int, Any, Any]:
    """A size, and a nested problem as a tree of (leaf, axis), with one batched leaf at least."""
    size = draw(SIZES)
    tree = draw(
        st.recursive(
            leaves(size).map(Leaf),
            lambda inner: st.one_of(
                st.lists(inner, max_size=2),
                st.tuples(inner, inner),
                st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
            ),
            max_leaves=5,
        )
    )
    return size, [Leaf((np.ones((size, 1), np.float32), 0)), tree], None


class Leaf:
    """A leaf with what is known of it."""

    def __init__(self, pair: tuple[Any, int | None]) -> None:
        self.value, self.axis = pair


def total(tree: Any, xp: Any = jnp) -> Any:
    """A function of everything in a problem."""
    words = len([leaf for leaf in jax.tree.leaves(tree) if isinstance(leaf, str)])
    arrays = [
        xp.asarray(leaf[...] if isinstance(leaf, sx.Variable) else leaf)
        for leaf in jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, sx.Variable))
        if not isinstance(leaf, str)
    ]
    return words + sum((i + 1) * xp.sin(array).sum() for i, array in enumerate(arrays))


@settings(max_examples=40, deadline=None)
@given(problems())
def test_law_vmap_equals_stacked_loop_over_batch_elements(drawn: Any) -> None:
    size, marked, _ = drawn

    def taken(i: int) -> Any:
        def part(leaf: Leaf) -> Any:
            if leaf.axis is None:
                return leaf.value
            value = leaf.value[...] if isinstance(leaf.value, sx.Variable) else leaf.value
            return np.take(np.asarray(value), i, axis=leaf.axis)

        return jax.tree.map(part, marked)

    whole = jax.tree.map(lambda leaf: leaf.value, marked)
    declared = [leaf for leaf in jax.tree.leaves(marked) if isinstance(leaf.value, sx.Variable)]
    axis_by_id = {id(leaf.value): leaf.axis for leaf in declared}
    where = {
        (lambda path, item, axis=axis: axis_by_id.get(id(item), "") == axis): axis
        for axis in {leaf.axis for leaf in declared}
    }
    batch = sx.Batch(size, where=where)
    assert jax.tree.map(lambda leaf: leaf.axis, marked) == batch.find(whole).axes
    found = sx.vmap(total, in_axes="auto", batch=batch)(whole)
    expected = [total(taken(i), np) for i in range(size)]
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_advice_for_ambiguous_sizes_works() -> None:
    arrays = {"x": jnp.arange(28.0).reshape(4, 7), "W": jnp.arange(28.0).reshape(7, 4)}

    def total(arrays: Any) -> Any:
        return (arrays["x"] @ arrays["W"]).sum()

    with pytest.raises(sx.errors.TransformError) as caught:
        sx.vmap(total, in_axes="auto", batch=4)(arrays)
    code = "sx.Batch(4, where={sx.PathContains('W'): None})"
    batch = run_advice(caught.value, code, {"sx": sx})
    result = sx.vmap(total, in_axes="auto", batch=batch)(arrays)
    expected = np.asarray(arrays["x"]) @ np.asarray(arrays["W"])
    np.testing.assert_allclose(result, expected.sum(1))
