# SPDX-License-Identifier: Apache-2.0
"""``cond`` and ``switch``: one branch runs, and all of them agree on what they leave."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

import shardax as sx
from shardax.errors import ForeignMutationError, TransformError
from tests.core.transforms.examples import Box, Many, Scale, Tied, step, values
from tests.strategies import Edit, apply_edit, assert_equal_values, assert_same_model, edits, models


class Noisy(sx.Module):
    """A Module that sows what it was called with and draws a number."""

    def __init__(self) -> None:
        self.rngs = sx.Rngs(noise=0)

    def __call__(self, x: Any) -> Any:
        self.sow("seen", x)
        return x + jax.random.normal(self.rngs.noise())


def _nothing(*operands: Any) -> None:
    return None


# --- which branch, and what it returns ---


@pytest.mark.parametrize(("pred", "expected"), [(True, 2.0), (False, -1.0), (3, 2.0), (0.0, -1.0)])
def test_predicate_chooses_as_in_python(pred: Any, expected: float) -> None:
    def run(pred: Any) -> Any:
        return sx.cond(pred, lambda x: x * 2, lambda x: -x, jnp.float32(1))

    assert float(run(pred)) == expected
    assert float(run(sx.Variable(jnp.asarray(pred)))) == expected
    assert float(sx.jit(run)(pred)) == expected


@pytest.mark.parametrize(("index", "expected"), [(0, 1), (2, 9), (-4, 1), (7, 9)])
def test_index_out_of_range_is_clamped(index: int, expected: int) -> None:
    branches = [lambda x: x, lambda x: x + x, lambda x: x * x]
    assert int(sx.switch(index, branches, 3)) == {1: 3, 9: 9}[expected]


def test_switch_may_have_one_branch() -> None:
    total = sx.Variable(jnp.float32(1))
    assert float(sx.switch(5, [lambda v: v.replace(v + 1).value], total)) == 2.0


def test_cond_traces_each_branch_once() -> None:
    traced = []

    def branch(name: str, model: Scale) -> Any:
        traced.append(name)
        return model(jnp.ones(2))

    both = [functools.partial(branch, name) for name in ("a", "b")]
    sx.jit(lambda p, m: sx.cond(p, *both, m))(True, Scale())
    assert traced == ["a", "b"]


def test_results_are_pytrees_of_arrays_and_objects() -> None:
    model = Scale()

    def branch(model: Scale, x: Any) -> Any:
        return {"same": (model, model.factor), "x": [x, None]}

    result = sx.cond(False, branch, branch, model, 2.0)
    assert result["same"][0] is model and result["same"][1] is model.factor
    assert float(result["x"][0]) == 2.0 and result["x"][1] is None


def test_new_modules_may_leave_equal_branches() -> None:
    made = sx.cond(True, lambda x: Tied(x + 1), lambda x: Tied(x), jnp.float32(1))
    assert isinstance(made, Tied) and made.head is made.embed and float(made.head) == 2.0


def test_weak_type_takes_dtype_of_other_branch() -> None:
    result = sx.cond(True, lambda: 1.0, lambda: jnp.float32(2))
    assert result.dtype == jnp.float32 and not result.weak_type


# --- what branches write ---


def test_variable_that_one_branch_writes_leaves_both() -> None:
    model = Scale()
    for pred in (True, False, True):
        sx.cond(pred, lambda m: m(jnp.ones(2)), lambda m: m.factor.value, model)
    assert values(model) == {("factor",): [1.0, 1.0], ("calls",): 2}


def test_branches_may_write_different_variables() -> None:
    many = Many(3)

    def write(position: int) -> Any:
        def branch(many: Many) -> None:
            many.cells[position][...] = jnp.full(2, float(position + 1))

        return branch

    sx.switch(1, [write(0), write(1), write(2)], many)
    assert [cell.value.tolist() for cell in many.cells] == [[0.0] * 2, [2.0] * 2, [0.0] * 2]


def test_shared_variable_is_one_in_every_branch() -> None:
    model = Tied(3.0)

    def double(model: Tied, head: Any) -> Any:
        model.embed[...] = model.embed * 2
        return head.value

    result = sx.cond(True, double, lambda model, head: head.value, model, model.head)
    assert float(result) == 6.0 and float(model.head) == 6.0


@pytest.mark.filterwarnings("ignore::shardax.errors.UncertainCaptureWarning")
def test_captured_variables_are_read_and_written() -> None:
    total, other = sx.Variable(jnp.float32(0)), sx.Variable(jnp.float32(10))

    def add() -> Any:
        total[...] = total + other
        return total.value

    def run(pred: Any) -> Any:
        return sx.cond(pred, add, lambda: other.value)

    assert [float(run(p)) for p in (True, False)] == [10.0, 10.0]
    assert [float(sx.jit(run)(p)) for p in (True, False)] == [20.0, 10.0]
    assert float(total) == 20.0 and float(other) == 10.0


def test_captured_variable_may_be_given_metadata() -> None:
    weight = sx.Param(jnp.ones(2))
    sx.cond(True, *[lambda: weight.set_metadata(axes=("embed",))] * 2)
    assert weight.axes == ("embed",)


def test_captured_and_passed_variable_is_one() -> None:
    total = sx.Variable(jnp.float32(1))

    def add(given: Any) -> Any:
        total[...] = given + 1
        return given.value

    assert float(sx.cond(True, add, lambda given: given.value, total)) == 2.0
    assert float(total) == 2.0


def test_choices_nest() -> None:
    total = sx.Variable(jnp.int32(0))

    def inner() -> None:
        total[...] = total + 1

    def outer(flag: Any) -> None:
        sx.cond(flag, inner, _nothing)
        total[...] = total * 10

    for flags in [(True, True), (True, False), (False, True)]:
        sx.cond(flags[0], outer, _nothing, flags[1])
    assert int(total) == 100


def test_cond_draws_random_numbers_in_the_taken_branch_only() -> None:
    rngs, same = sx.Rngs(noise=0), sx.Rngs(noise=0)

    def draw(rngs: sx.Rngs) -> Any:
        return jax.random.normal(rngs.noise())

    drawn = [sx.cond(p, draw, lambda rngs: jnp.float32(0), rngs) for p in (True, False, True)]
    assert [float(x) for x in drawn] == [float(draw(same)), 0.0, float(draw(same))]
    assert int(rngs.noise.count) == 2


def test_branches_that_are_methods_may_write_their_module() -> None:
    one, two = Scale(), Scale()
    sx.switch(1, [one.grow, two.grow], 2.0)
    assert one.factor.value.tolist() == [1.0, 1.0] and two.factor.value.tolist() == [3.0, 3.0]
    sx.cond(True, two, one, jnp.ones(2))
    assert (int(one.calls), int(two.calls)) == (0, 1)


def test_lazy_values_are_made_before_the_choice() -> None:
    layer = sx.nn.Linear(2, 3, rngs=sx.Rngs(0))
    expected = sx.nn.Linear(2, 3, rngs=sx.Rngs(0))
    x = jnp.ones(2)
    result = sx.cond(True, lambda layer, x: layer(x), lambda layer, x: jnp.zeros(3), layer, x)
    assert_equal_values(result, expected(x))


# --- structure ---


def test_change_that_all_branches_make_is_carried() -> None:
    model = Noisy()
    for pred in (True, False):
        sx.cond(pred, lambda m: m(1.0), lambda m: m(2.0), model)
    assert [float(x) for x in model.seen.value] == [1.0, 2.0]


def test_change_in_one_branch_names_module_and_attribute() -> None:
    model = Box()
    model.inner = Noisy()
    with pytest.raises(
        TransformError, match=r"\.m\.inner\.seen: true_fun Intermediate, false_fun absent"
    ):
        sx.cond(True, lambda m, x: m.inner(x), lambda m, x: x, model, 1.0)
    assert not hasattr(model.inner, "seen") and int(model.inner.rngs.noise.count) == 0


def test_different_configuration_in_branches_names_both_values() -> None:
    def branch(mode: str, m: Box) -> None:
        m.mode = mode

    model = Box()
    branches = [functools.partial(branch, mode) for mode in ("fast", "slow")]
    with pytest.raises(
        TransformError, match=r"\.m\.mode: true_fun 'fast' \(str\), false_fun 'slow'"
    ):
        sx.cond(True, *branches, model)
    sx.cond(True, branches[0], branches[0], model)
    assert model.mode == "fast"


def _attribute(**attributes: Any) -> Any:
    """Returns a branch that sets attributes; "w" stands for the Param at .w."""

    def branch(m: Any) -> None:
        for name, value in attributes.items():
            setattr(m, name, m.w if value == "w" else value)

    return branch


@pytest.mark.parametrize(
    ("first", "second", "told"),
    [
        ({"x": 1, "y": 2}, {"x": 1, "y": 3}, ".m.y: true_fun 2 (int), false_fun 3 (int)"),
        ({"n": [1]}, {"n": (1,)}, ".m.n: true_fun List, false_fun (1,) (tuple)"),
        ({"n": "w"}, {"n": 5}, ".m.n: true_fun same as .m.w, false_fun 5 (int)"),
        ({"x": 1, "y": 2}, {"y": 2, "x": 1},
         ".m: true_fun the order (w, x, y), false_fun the order (w, y, x)"),
    ],
)  # fmt: skip
def test_attribute_that_branches_set_differently_is_described(
    first: Any, second: Any, told: str
) -> None:
    model = Box()
    model.w = sx.Param(1.0)
    with pytest.raises(TransformError) as caught:
        sx.cond(True, _attribute(**first), _attribute(**second), model)
    assert str(caught.value).startswith(
        f"The branches of sx.cond leave different structures at {told}. One program comes out of "
        "both, so they must leave one structure. Make the same change in every branch"
    )
    assert set(vars(model)) == {"w"}


def test_metadata_change_in_one_branch_names_variable() -> None:
    with pytest.raises(
        TransformError, match=r"\.m\.factor: true_fun Param\(axes=\('a',\)\), false_fun Param\."
    ):
        sx.cond(True, lambda m: m.factor.set_metadata(axes=("a",)), _nothing, Scale())


def test_new_variables_of_different_shapes_raise() -> None:
    model = Noisy()
    with pytest.raises(TransformError, match=r"at \.m\.seen: .*float32\[2\].*float32\[3\]"):
        sx.cond(True, lambda m: m(jnp.ones(2))[0], lambda m: m(jnp.ones(3))[0], model)


def test_new_objects_of_different_types_raise() -> None:
    with pytest.raises(TransformError, match=r"\.result\.a: true_fun Param, false_fun Variable"):
        sx.cond(True, lambda: {"a": sx.Param(1.0)}, lambda: {"a": sx.Variable(1.0)})


def test_captured_objects_leave_only_through_all_branches() -> None:
    model, outside, other = Box(), Scale(), Scale()
    assert sx.cond(True, *[lambda: outside.factor] * 2) is outside.factor
    sx.cond(True, *[lambda m: setattr(m, "inner", outside)] * 2, model)
    assert model.inner is outside
    with pytest.raises(
        TransformError, match=r"\.result: true_fun a Scale from outside, false_fun another one"
    ):
        sx.cond(True, lambda: outside, lambda: other)


def test_structure_of_a_captured_module_cannot_change() -> None:
    model = Noisy()
    with pytest.raises(ForeignMutationError, match=r"sx\.cond"):
        sx.cond(True, lambda: model(1.0), lambda: model(2.0))


# --- forms ---


@pytest.mark.parametrize(
    ("new", "shown"),
    [
        (lambda: jnp.ones(3), r"float32\[3\]"),
        (lambda: jnp.ones(2, jnp.int32), r"int32\[2\]"),
        (lambda: (jnp.ones(2),), r"\(float32\[2\],\)"),
    ],
)
def test_variable_keeps_its_form_in_all_branches(new: Any, shown: str) -> None:
    model = Scale()

    def write(m: Scale) -> None:
        m.factor.value = new()

    told = rf"\.m\.factor: true_fun writes {shown}, false_fun leaves float32\[2\]"
    with pytest.raises(TransformError, match=told):
        sx.cond(True, write, _nothing, model)
    assert model.factor.value.tolist() == [1.0, 1.0]
    sx.cond(True, write, write, model)
    assert jax.tree.structure(model.factor.value) == jax.tree.structure(new())


@pytest.mark.parametrize(
    ("first", "second", "told"),
    [
        ({"a": {"b": 1.0}}, {"a": {"b": 1}}, r"\.result\.a\.b: true_fun float32\[\].*int32"),
        ({"a": 1}, {"b": 1}, r"a dict with keys 'a', false_fun a dict with keys 'b'"),
        ({"a": (1, 2)}, {"a": [1, 2]}, r"\.result\.a: true_fun a tuple of 2.*a list of 2"),
        ([1, None], [1, 2], r"\.result\[1\]: true_fun None, false_fun an array"),
        (1, (1,), r"true_fun an array, false_fun a tuple of 1"),
    ],
)
def test_different_result_forms_raise_with_path(first: Any, second: Any, told: str) -> None:
    with pytest.raises(TransformError, match=told):
        sx.cond(True, lambda: first, lambda: second)


def test_switch_errors_name_branches_by_position() -> None:
    with pytest.raises(TransformError, match=r"branches\[0\] float32\[\], branches\[2\] int32\[\]"):
        sx.switch(0, [lambda: 1.0, lambda: 1.0, lambda: 1])


def test_different_objects_cannot_be_chosen_among() -> None:
    a, b = Scale(), Scale()
    with pytest.raises(
        TransformError, match=r"\.result: true_fun same as \.a, false_fun same as \.b"
    ):
        sx.cond(True, lambda a, b: a, lambda a, b: b, a, b)
    with pytest.raises(TransformError, match=r"\.result: true_fun an object, false_fun an array"):
        sx.cond(True, lambda a: a.factor, lambda a: a.factor.value, a)


# --- bad input ---


@pytest.mark.parametrize("pred", [jnp.ones(2), "yes", None, jnp.complex64(1), [True]])
def test_predicate_is_one_boolean(pred: Any) -> None:
    with pytest.raises(TransformError, match=r"pred of sx\.cond must be one boolean"):
        sx.cond(pred, _nothing, _nothing)


@pytest.mark.parametrize("index", [1.0, True, jnp.arange(2), "0"])
def test_index_is_one_integer(index: Any) -> None:
    with pytest.raises(TransformError, match=r"index of sx\.switch must be one integer"):
        sx.switch(index, [_nothing, _nothing])


def test_branches_are_functions() -> None:
    with pytest.raises(TransformError, match=r"false_fun of sx\.cond is a int"):
        sx.cond(True, _nothing, 3)  # pyright: ignore[reportArgumentType]
    with pytest.raises(TransformError, match="no branches"):
        sx.switch(0, [])


def test_operands_and_results_are_arrays_and_objects() -> None:
    with pytest.raises(TransformError, match=r"\.options\.mode of sx\.cond is a str"):
        sx.cond(True, lambda options: 1, lambda options: 2, {"mode": "fast"})
    with pytest.raises(TransformError, match=r"sx\.cond returned 'a'"):
        sx.cond(True, lambda: "a", lambda: "b")


def test_exception_in_a_branch_changes_nothing() -> None:
    model = Scale()

    def fail(m: Scale) -> Any:
        m(jnp.ones(2))
        raise KeyError("no")

    with pytest.raises(KeyError):
        sx.cond(True, lambda m: m(jnp.ones(2)), fail, model)
    assert int(model.calls) == 0


# --- inside other transforms ---


def test_under_vmap_each_lane_takes_its_own_branch() -> None:
    model = Scale()
    lanes = sx.vmap(lambda x: Scale(), axis_size=3)(jnp.zeros(3))

    def run(m: Scale, pred: Any) -> Any:
        return sx.cond(pred, lambda m: m(jnp.ones(2)).sum(), lambda m: m.factor.sum() * 10, m)

    result = sx.vmap(run)(lanes, jnp.array([True, False, True]))
    assert result.tolist() == [1.0, 20.0, 1.0] and lanes.calls.value.tolist() == [1, 0, 1]
    assert int(model.calls) == 0


def test_gradient_is_that_of_the_branch_taken() -> None:
    model = Scale()

    def loss(m: Scale, pred: Any) -> Any:
        return sx.cond(pred, lambda m: m(jnp.ones(2)).sum(), lambda m: (m.factor**2).sum(), m)

    gradients = [sx.jit(sx.grad(loss))(model, p)["factor"].tolist() for p in (True, False)]
    assert gradients == [[0.5, 0.5], [2.0, 2.0]] and int(model.calls) == 1


def test_gradient_flows_to_parameter_captured_by_branch() -> None:
    model = Scale()
    loss = lambda m: sx.cond(True, lambda: m(jnp.ones(2)).sum(), lambda: m.factor.sum())  # noqa: E731
    assert sx.grad(loss)(model)["factor"].tolist() == [0.5, 0.5]
    assert int(model.calls) == 1


def test_unselected_lanes_do_not_spoil_the_gradient() -> None:
    weight = sx.Param(jnp.float32(1))

    def loss(w: sx.Param, xs: Any) -> Any:
        def one(x: Any) -> Any:
            return sx.cond(x > 0, lambda w: jnp.log(w * x), lambda w: w * x, w)

        return sx.vmap(one)(xs).sum()

    assert float(sx.grad(loss)(weight, jnp.array([2.0, 0.0]))) == 1.0


def test_cond_inside_scan_writes_the_carry() -> None:
    total = sx.Variable(jnp.float32(0))

    def body(total: Any, x: Any) -> Any:
        def add(total: Any) -> None:
            total[...] = total + x

        sx.cond(x > 0, add, _nothing, total)
        return total, total.value

    _, rows = sx.scan(body)(total, jnp.array([1.0, -5.0, 2.0]))
    assert rows.tolist() == [1.0, 1.0, 3.0] and float(total) == 3.0


def test_branch_may_write_different_values_per_shard(auto_mesh: Any) -> None:
    def shard(x: Any) -> Any:
        total = sx.Variable(jnp.zeros(1))

        def add(total: Any) -> Any:
            total[...] = total + x
            return 1.0

        result = sx.cond(x.sum() > 0, add, lambda total: x.sum(), total)
        return total.value + result

    mapped = jax.shard_map(shard, mesh=auto_mesh, in_specs=P("data"), out_specs=P("data"))
    assert jax.jit(mapped)(jnp.array([3.0, -3.0])).tolist() == [4.0, -3.0]


def test_under_disabled_jit_the_result_is_the_same() -> None:
    model = Scale()
    with jax.disable_jit():
        result = sx.cond(True, lambda m: m(jnp.ones(2)), lambda m: m.factor.value, model)
    assert result.tolist() == [0.5, 0.5] and int(model.calls) == 1


# --- laws ---


@given(models(), edits(), st.lists(st.integers(0, 7), max_size=3), st.booleans())
@settings(max_examples=12)
def test_cond_is_pythons_if(model: Any, common: list[Edit], written: list[int], p: bool) -> None:
    expected = sx.clone(model)

    def branch(which: list[int], m: Any) -> Any:
        for edit in [*common, *(Edit("write", target, 0, 0) for target in which)]:
            apply_edit(m, edit)
        return list(sx.state(m).flat().values())

    true, false = (functools.partial(branch, which) for which in (written, written[1:]))
    result = sx.cond(p, true, false, model)
    assert_equal_values(result, (true if p else false)(expected))
    assert_same_model(model, expected)


@given(st.lists(st.integers(0, 2), min_size=1, max_size=4))
@settings(max_examples=6)
def test_switch_is_pythons_indexing(targets: list[int]) -> None:
    def branch(target: int, many: Many) -> Any:
        cell = many.cells[target]
        cell[...] = cell + target + 1
        return cell.value * 2

    branches = [functools.partial(branch, target) for target in targets]
    run = sx.jit(lambda index, many: sx.switch(index, branches, many))
    for index in (-2, 0, 1, 2, 3, 5):
        many, expected = Many(3), np.zeros((3, 2))
        target = targets[min(max(index, 0), len(targets) - 1)]
        expected[target] += target + 1
        assert run(index, many).tolist() == (2 * expected[target]).tolist()
        assert [cell.value.tolist() for cell in many.cells] == expected.tolist()


@pytest.mark.parametrize("pred", [True, False])
def test_closed_over_is_passed_explicitly(pred: bool) -> None:
    closed, passed = Many(3), Many(3)
    sx.cond(pred, lambda: step(closed), _nothing)
    sx.cond(pred, step, _nothing, passed)
    assert values(closed) == values(passed)
