# SPDX-License-Identifier: Apache-2.0
"""``vmap``: many lanes of one function over Modules."""

from __future__ import annotations

import collections
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardax as sx
from shardax.errors import ModuleError
from tests.advice import run_advice
from tests.core.transforms.examples import XS, Box, Scale, Sower, Tied, lanes, shapes, values
from tests.strategies import assert_equal_values

# --- what is mapped ---


def test_batch_elements_see_slices_and_writes_are_stacked() -> None:
    model = lanes()
    y = sx.vmap(lambda m, x: m(x))(model, XS)
    assert y.tolist() == [[0.0, 0.5], [2.0, 3.0], [6.0, 7.5]]
    assert values(model) == {("factor",): [[1, 1], [2, 2], [3, 3]], ("calls",): [1, 1, 1]}


def test_shared_model_is_written_where_batch_elements_agree() -> None:
    model = Scale()
    assert sx.vmap(lambda m, x: m(x), in_axes=(None, 0))(model, XS).tolist() == (XS / 2).tolist()
    assert values(model) == {("factor",): [1.0, 1.0], ("calls",): 1}


def test_axes_may_be_chosen_by_filter() -> None:
    model = lanes()
    model.calls.value = jnp.int32(0)
    axes = sx.StateAxes({sx.Param: 0, ...: None})
    sx.vmap(lambda m, x: m(x), in_axes=(axes, 0))(model, XS)
    assert values(model)[("calls",)] == 1


def test_axes_may_be_chosen_by_path() -> None:
    model = lanes()
    model.calls.value = jnp.int32(0)
    for axes in (sx.State({"factor": 0, "calls": None}), {"factor": 0, "calls": None}):
        sx.vmap(lambda m, x: m(x), in_axes=(axes, 0))(model, XS)
    exact = sx.StateAxes(sx.State({"factor": 0, "calls": None}))
    sx.vmap(lambda m, x: m(x), in_axes=(exact, 0))(model, XS)
    assert values(model)[("calls",)] == 3


def test_axes_may_be_negative_and_differ() -> None:
    weight = sx.Param(jnp.arange(24.0).reshape(2, 3, 4))

    def double(w: Any) -> Any:
        w[...] = 2 * w
        return w[...], sx.Param(w[...])

    plain, new = sx.vmap(double, in_axes=-1, out_axes=(-2, 0))(weight)
    whole = 2 * jnp.arange(24.0).reshape(2, 3, 4)
    assert_equal_values(weight.value, whole)
    assert_equal_values(plain, jnp.moveaxis(whole, -1, -2))
    assert_equal_values(new.value, jnp.moveaxis(whole, -1, 0))


def test_keyword_arguments_are_mapped_over_axis_0() -> None:
    model = lanes()
    y = sx.vmap(lambda m, *, x, other: m(x) + other["m"].calls, in_axes=0)(
        model, x=XS, other={"m": model}
    )
    assert y.tolist() == [[1.0, 1.5], [3.0, 4.0], [7.0, 8.5]]


def test_containers_take_an_entry_per_module() -> None:
    pair = collections.namedtuple("pair", "left right")
    shared, mapped = Scale(), lanes()

    def run(tree: Any, x: Any) -> Any:
        return {"y": tree.left(x), "z": (tree.right[0](x), tree.right[1])}

    axes = pair(None, [sx.StateAxes({sx.Param: 0, ...: 0}), None])
    out = sx.vmap(run, in_axes=(axes, 0), out_axes={"y": 1, "z": (0, None)})(
        pair(shared, [mapped, 7.0]), XS
    )
    assert out["y"].tolist() == (XS.T / 2).tolist()
    assert out["z"][0].tolist() == [[0.0, 0.5], [2.0, 3.0], [6.0, 7.5]]
    assert float(out["z"][1]) == 7.0


def test_function_may_change_given_plain_containers() -> None:
    def extend(rows: list[Any], named: dict[str, Any]) -> Any:
        rows.append(rows[0] * named.pop("scale"))
        return sum(rows)

    rows, named = [XS], {"scale": 2.0}
    out = sx.vmap(extend, in_axes=([0], {"scale": None}))(rows, named)
    assert out.tolist() == (3 * XS).tolist()
    assert len(rows) == 1 and named == {"scale": 2.0}


def test_named_tuple_is_prefix_of_its_argument() -> None:
    pair = collections.namedtuple("pair", "left right")
    out = sx.vmap(lambda p: p.left + p.right, in_axes=pair(0, None))(pair(XS, jnp.ones(2)))
    assert out.tolist() == (XS + jnp.ones((1, 2))).tolist()


def test_pytrees_keys_and_array_attributes_are_mapped() -> None:
    model = Box()
    model.pair = sx.Variable({"m": jnp.arange(3), "v": (jnp.ones((3, 2)),)})
    model.key = sx.Variable(jax.random.split(jax.random.key(0), 3))
    model.array = jnp.arange(3.0)

    def step(m: Box) -> Any:
        m.pair.value = {"m": m.pair["m"] + 1, "v": (m.pair["v"][0] * 2,)}
        m.array = m.array + 1
        return jax.random.normal(m.key.value)

    keys = model.key.value
    drawn = sx.vmap(step)(model)
    assert_equal_values(drawn, jax.vmap(jax.random.normal)(keys))
    assert_equal_values(model.pair.value, {"m": jnp.arange(1, 4), "v": (jnp.full((3, 2), 2.0),)})
    assert model.array.tolist() == [1.0, 2.0, 3.0]


def test_lazy_models_materialize_and_new_ones_stack() -> None:
    layer = sx.nn.Linear(2, 2, rngs=sx.Rngs(0))
    expected = sx.clone(layer)(XS)
    assert_equal_values(sx.vmap(layer)(XS), expected)
    made = sx.vmap(lambda _: sx.nn.Linear(2, 2, rngs=sx.Rngs(0)))(XS)
    assert_equal_values(made.kernel.value, jnp.stack([layer.kernel.value] * 3))


def test_abstract_model_is_refused() -> None:
    model = sx.eval_shape(Scale)
    run = sx.vmap(lambda m, x: m.factor * x, in_axes=(None, 0))
    with pytest.raises(ModuleError, match=r"\.m\.factor") as caught:
        run(model, XS)
    names = {"sx": sx, "model": model, "state": sx.state(Scale())}
    run_advice(caught.value, "sx.update(model, state)", names)
    assert_equal_values(run(model, XS), run(Scale(), XS))


# --- how it is called ---


def test_usable_as_function_and_decorator() -> None:
    @sx.vmap
    def plain(x: Any) -> Any:
        """Doubles."""
        return 2 * x

    @sx.vmap(in_axes=1, out_axes=1)
    def columns(x: Any) -> Any:
        return x / x.sum()

    assert (plain.__name__, plain.__doc__) == ("plain", "Doubles.")
    assert plain(XS).tolist() == (2 * XS).tolist()
    assert columns(XS).sum(0).tolist() == [1.0, 1.0]


def test_methods_partials_and_callable_modules_are_functions_too() -> None:
    class Doubler(sx.Module):
        def __init__(self) -> None:
            self.factor = sx.Param(jnp.float32(2))
            self.calls = sx.Variable(jnp.int32(0))

        @sx.vmap
        def rows(self, x: Any) -> Any:
            return self.factor * x

        def once(self, x: Any) -> Any:
            self.calls += 1
            return self.factor * x

        __call__ = once

    model, many = Doubler(), Doubler()
    many.factor.value, many.calls.value = jnp.full(3, 2.0), jnp.zeros(3, jnp.int32)
    expected = (2 * XS).tolist()
    assert sx.vmap(model)(XS).tolist() == expected
    assert sx.vmap(model.once)(XS).tolist() == expected
    assert sx.vmap(functools.partial(lambda m, x: m.once(x), model))(XS).tolist() == expected
    assert int(model.calls) == 3
    assert many.rows(XS).tolist() == expected
    assert sx.vmap(Doubler.once)(many, XS).tolist() == expected
    assert many.calls.tolist() == [1, 1, 1]


def test_axis_size_serves_a_function_without_arguments() -> None:
    made = sx.vmap(lambda: sx.Param(jnp.ones(2), axes=("embed",)), axis_size=3)()
    assert (made.shape, made.axes) == ((3, 2), (None, "embed"))


def test_collectives_work_by_the_name_of_the_axis() -> None:
    model = Scale()

    def center(m: Scale, x: Any) -> Any:
        m.factor[...] = jax.lax.pmean(x, "lanes")
        return x - m.factor

    out = sx.vmap(center, in_axes=(None, 0), axis_name="lanes")(model, XS)
    assert out.tolist() == [[-2, -2], [0, 0], [2, 2]]
    assert model.factor.tolist() == [2.0, 3.0]


# --- what leaves ---


def test_given_modules_come_back_as_themselves() -> None:
    shared, mapped = Scale(), lanes()
    out = sx.vmap(
        lambda a, b, x: {"m": (b, a), "y": x},
        in_axes=(None, 0, 0),
        out_axes={"m": (0, None), "y": 0},
    )(shared, mapped, XS)
    assert out["m"][0] is mapped and out["m"][1] is shared


def test_new_modules_are_stacked_and_keep_sharing() -> None:
    def make(x: Any) -> Any:
        model = Tied()
        model.embed[...] = x.sum()
        return model, model.head

    model, head = sx.vmap(make)(XS)
    assert head is model.embed is model.head
    assert head.tolist() == [1.0, 5.0, 9.0]


def test_new_modules_may_have_axes_by_filter() -> None:
    made = sx.vmap(
        lambda x: sx.nn.Linear(2, 3, rngs=sx.Rngs(0)),
        out_axes=sx.StateAxes({sx.PathContains("kernel"): -1, ...: 0}),
    )(XS)
    assert shapes(made) == {("kernel",): (2, 3, 3), ("bias",): (3, 3)}
    assert made.kernel.axes == ("in", "out", None) and made.bias.axes == (None, "out")


def test_attributes_may_be_added_changed_and_removed() -> None:
    model = lanes()

    def edit(m: Scale, x: Any) -> None:
        m.new = sx.Param(x)
        m.parts = [sx.BatchStat(x.sum()), m.factor]
        m.rate = 2.0
        m.factor.set_metadata(tag="old")
        del m.calls

    sx.vmap(edit)(model, XS)
    assert shapes(model) == {("factor",): (3, 2), ("new",): (3, 2), ("parts", 0): (3,)}
    assert model.parts[1] is model.factor and model.rate == 2.0
    assert model.factor.metadata["tag"] == "old" and not hasattr(model, "calls")


def test_moved_variable_keeps_its_in_axis() -> None:
    model = lanes()
    model.calls.value = jnp.int32(0)

    def move(m: Scale, x: Any) -> None:
        m.weight = m.factor
        del m.factor
        m.weight[...] = x

    sx.vmap(move, in_axes=({"factor": 0, "calls": None}, 0))(model, XS)
    assert shapes(model) == {("calls",): (), ("weight",): (3, 2)}
    by_rank = sx.StateAxes({lambda path, v: v.ndim == 2: 1, ...: None})
    out = sx.vmap(lambda m: m, in_axes=by_rank, out_axes=sx.StateAxes({sx.Param: 1, ...: None}))
    assert out(model) is model


def test_attached_values_that_differ_are_stacked() -> None:
    model = Box()

    def attach(m: Box, x: Any) -> None:
        m.differs, m.same = sx.Param(x), sx.Param(jnp.ones(2))

    sx.vmap(attach, in_axes=(None, 0))(model, XS)
    assert shapes(model) == {("differs",): (3, 2), ("same",): (2,)}


@pytest.mark.parametrize("calls", [1, 3])
def test_sown_values_are_stacked_however_often_batch_elements_sow(calls: int) -> None:
    bound, passed, mapped = (Sower(jnp.float32(2)) for _ in range(3))
    mapped.weight.value = jnp.full(3, 2.0)
    for _ in range(calls):
        sx.vmap(bound)(XS)
        sx.vmap(lambda m, x: m(x), in_axes=(None, 0))(passed, XS)
        sx.vmap(lambda m, x: m(x))(mapped, XS)
    for model in (bound, passed, mapped):
        assert [row.tolist() for row in model.seen.value] == [(2 * XS).tolist()] * calls


# --- inside and around other transforms ---


def test_vmap_inside_vmap() -> None:
    model = Box()
    model.w = sx.Param(jnp.arange(6.0).reshape(3, 2))
    model.n = sx.Variable(jnp.zeros(3))

    def inner(m: Box, w: Any, x: Any) -> Any:
        m.n += 1
        m.last = sx.Variable(w * x)
        return w * x

    def outer(m: Box, x: Any) -> Any:
        return sx.vmap(inner, in_axes=(None, 0, 0))(m, m.w.value, x)

    out = sx.vmap(outer)(model, XS)
    assert out.tolist() == model.last.tolist() == (XS * XS).tolist()
    assert model.n.tolist() == [1.0, 1.0, 1.0]


def test_vmap_is_the_same_eagerly_and_compiled() -> None:
    def step(m: Scale, x: Any) -> Any:
        return sx.vmap(lambda m, x: (m(x), m))(m, x)

    eager, compiled = lanes(), lanes()
    expected, same = step(eager, XS)
    for _ in range(2):
        result, returned = sx.jit(step)(compiled, XS)
        assert_equal_values(result, expected)
        assert returned is compiled
    assert same is eager and compiled.calls.tolist() == [2, 2, 2]


def test_gradients_pass_through_from_outside() -> None:
    model = lanes()

    def loss(m: Scale) -> Any:
        return sx.vmap(lambda m, x: m(x) ** 2)(m, XS).sum()

    expected = jax.grad(lambda w: ((0.5 * w * XS) ** 2).sum())(model.factor.value)
    assert_equal_values(sx.grad(loss)(model)["factor"], expected)
    assert model.calls.tolist() == [1, 1, 1]


def test_gradients_may_be_taken_in_each_batch_element() -> None:
    model = lanes()

    def lane(m: Scale, x: Any) -> Any:
        gradient = sx.grad(lambda m: (m(x) ** 2).sum())(m)
        m.factor -= gradient["factor"]
        return gradient

    weight = model.factor.value
    gradient = sx.vmap(lane)(model, XS)
    expected = jax.grad(lambda w: ((0.5 * w * XS) ** 2).sum())(weight)
    np.testing.assert_allclose(gradient["factor"], expected, rtol=1e-5, atol=1e-8)
    np.testing.assert_allclose(model.factor.value, weight - expected, rtol=1e-5, atol=1e-8)
    assert model.calls.tolist() == [1, 1, 1]


def test_gradient_of_shared_model_sums_over_batch_elements() -> None:
    def loss(m: Scale) -> Any:
        return sx.vmap(lambda x: (m.factor * x).sum())(XS).sum()

    assert sx.grad(loss)(Scale())["factor"].tolist() == XS.sum(0).tolist()


def test_tuple_that_all_batch_elements_replace_alike_is_shared() -> None:
    log = sx.Intermediate((jnp.float32(1),))

    def replace(log: Any, x: Any) -> Any:
        log.value = (jnp.float32(7),)
        return x

    assert sx.vmap(replace, in_axes=(None, 0))(log, jnp.arange(3.0)).tolist() == [0.0, 1.0, 2.0]
    assert jax.tree.map(float, log.value) == (7.0,)
