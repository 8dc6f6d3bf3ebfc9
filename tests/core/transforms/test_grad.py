# SPDX-License-Identifier: Apache-2.0
"""Gradients: what is differentiated, how it is arranged, and what the loss leaves behind."""

from __future__ import annotations

import collections
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import shardax as sx
from shardax.errors import ForeignMutationError, TransformError
from tests.core.transforms.examples import Box, Scale, Tied, values

Two = collections.namedtuple("Two", "model batch")


def _loss(model: Scale) -> Any:
    return (model.factor**2).sum()


def _lists(tree: Any) -> Any:
    return jax.tree.map(lambda x: x.tolist(), tree)


def _flat(state: sx.State) -> dict[Any, Any]:
    return _lists(state.flat())


# --- the gradient of a Module ---


def test_gradient_of_module_is_state_of_params() -> None:
    gradient = sx.grad(_loss)(Scale())
    assert isinstance(gradient, sx.State)
    assert _flat(gradient) == {("factor",): [2.0, 2.0]}
    assert gradient.origins()[("factor",)].variable_type is sx.Param


def test_value_comes_with_the_gradient() -> None:
    value, gradient = sx.value_and_grad(_loss)(Scale(3))
    assert float(value) == 3.0 and _flat(gradient) == {("factor",): [2.0] * 3}


def test_tied_parameter_has_one_summed_gradient() -> None:
    model = Tied(3.0)
    gradient = sx.grad(lambda m: 5 * m.embed + m.head**2)(model)
    assert _flat(gradient) == {("embed",): 5.0 + 6.0}


@pytest.mark.parametrize(
    ("argnums", "expected"),
    [
        (0, {("embed",): 6.0}),
        (1, {("embed",): 6.0}),
        ((0, 1), [{("embed",): 6.0}, {}]),
        ((1, 0), [{}, {("embed",): 6.0}]),
        ((-1, 0), [{}, {("embed",): 6.0}]),
        ((sx.DiffState(0, sx.BatchStat), 1), [{("stat",): 0.0}, {("embed",): 6.0}]),
    ],
)
def test_variable_of_two_arguments_has_one_gradient(argnums: Any, expected: Any) -> None:
    model = Tied(3.0)
    model.stat = sx.BatchStat(jnp.float32(1))
    for transform in (sx.grad, lambda f, **o: lambda *a: sx.value_and_grad(f, **o)(*a)[1]):
        found = transform(lambda a, b: a.embed * b.head, argnums=argnums)(model, model)
        assert ([*map(_flat, found)] if isinstance(found, tuple) else _flat(found)) == expected


def test_repeated_variable_argument_has_gradient_none() -> None:
    v, model = sx.Param(jnp.float32(3)), Tied(2.0)
    assert sx.grad(lambda a, b: a * b, argnums=(0, 1))(v, v) == (6.0, None)
    assert sx.grad(lambda tree: tree[0] * tree[1])([v, v]) == [6.0, None]

    def loss(tree: Any, w: Any) -> Any:
        return tree["m"].embed * tree["again"].head * w

    of_tree, of_w = sx.grad(loss, argnums=(0, 1))({"m": model, "again": model}, model.head)
    assert (_flat(of_tree["again"]), _flat(of_tree["m"]), of_w) == ({("embed",): 12.0}, {}, None)


@pytest.mark.parametrize(
    ("wrt", "expected"),
    [
        (sx.Param, {("p",)}),
        (sx.BatchStat, {("s",)}),
        ((sx.Param, sx.BatchStat), {("p",), ("s",)}),
        (sx.Not(sx.Param), {("s",), ("v",)}),
        (sx.PathContains("v"), {("v",)}),
        ("chosen", {("v",)}),
        (..., {("p",), ("s",), ("v",)}),
        (lambda path, variable: path == ("s",), {("s",)}),
    ],
)
def test_wrt_is_a_filter(wrt: Any, expected: Any) -> None:
    model = Box()
    model.p, model.s = sx.Param(2.0), sx.BatchStat(3.0)
    model.v = sx.Variable(4.0, tag="chosen")

    def loss(m: Box) -> Any:
        return m.p * m.s * m.v

    gradients = {("p",): 12.0, ("s",): 8.0, ("v",): 6.0}
    assert _flat(sx.grad(loss, wrt=wrt)(model)) == {path: gradients[path] for path in expected}
    chosen = sx.DiffState(0, wrt)
    assert _flat(sx.grad(loss, argnums=chosen)(model)) == {p: gradients[p] for p in expected}


def test_pytree_params_have_pytree_gradients() -> None:
    model = Box()
    model.pair = sx.Param({"a": jnp.ones(2), "b": (jnp.float32(3),)})
    gradient = sx.grad(lambda m: m.pair.value["a"].sum() * m.pair.value["b"][0])(model)
    assert _lists(gradient["pair"]) == {"a": [3.0, 3.0], "b": (2.0,)}


def test_lazy_params_are_materialized() -> None:
    model = Box()
    model.kernel = sx.Param(sx.Init(jax.nn.initializers.ones, (2,)))
    assert _flat(sx.grad(lambda m: (m.kernel**2).sum())(model)) == {("kernel",): [2.0, 2.0]}
    assert not model.kernel.is_lazy


# --- which argument ---


def _weighted(model: Scale, x: Any, other: Scale) -> Any:
    return (model.factor * x * other.factor).sum()


@pytest.mark.parametrize(
    ("argnums", "expected"),
    [
        (0, {("factor",): [6.0, 9.0]}),
        (1, [3.0, 3.0]),
        (-1, {("factor",): [2.0, 3.0]}),
        ((1, 0), ([3.0, 3.0], {("factor",): [6.0, 9.0]})),
        ([2], ({("factor",): [2.0, 3.0]},)),
        ((sx.DiffState(2, sx.Param), 1), ({("factor",): [2.0, 3.0]}, [3.0, 3.0])),
    ],
)
def test_argnums_chooses_and_arranges(argnums: Any, expected: Any) -> None:
    other = Scale()
    other.factor[...] = jnp.full(2, 3.0)
    found = sx.grad(_weighted, argnums=argnums)(Scale(), jnp.array([2.0, 3.0]), other)

    def shown(item: Any) -> Any:
        return _flat(item) if isinstance(item, sx.State) else _lists(item)

    assert (tuple(map(shown, found)) if isinstance(found, tuple) else shown(found)) == expected


def test_variable_argument_has_array_gradient() -> None:
    for kind in (sx.Param, sx.BatchStat, sx.Variable):
        gradient = sx.grad(lambda v: (v**3).sum())(kind(jnp.array([1.0, 2.0])))
        assert isinstance(gradient, jax.Array) and gradient.tolist() == [3.0, 12.0]


def test_gradient_of_pytree_has_its_structure() -> None:
    def loss(t: Two, scale: Any) -> Any:
        return scale * (t.model["m"].factor * t.batch[0] * t.batch[1]).sum()

    tree = Two({"m": Scale()}, [jnp.array([1.0, 2.0]), sx.Param(jnp.array([3.0, 4.0]))])
    gradient = sx.grad(loss)(tree, scale=2.0)
    assert type(gradient) is Two
    assert _flat(gradient.model["m"]) == {("factor",): [6.0, 16.0]}
    assert _lists(gradient.batch) == [[6.0, 8.0], [2.0, 4.0]]


def test_plain_functions_are_differentiated_as_by_jax() -> None:
    def loss(x: Any, y: Any) -> Any:
        return (x["a"] ** 2 * y).sum()

    x, y = {"a": jnp.array([1.0, 2.0])}, jnp.array([3.0, 4.0])
    mine = sx.value_and_grad(loss, argnums=(0, 1))(x, y)
    assert _lists(mine) == _lists(jax.value_and_grad(loss, argnums=(0, 1))(x, y))


@pytest.mark.parametrize("use", [sx.grad, sx.value_and_grad])
def test_decorates_functions_and_methods(use: Any) -> None:
    class Model(Scale):
        @use
        def slope(self, x: Any) -> Any:
            return self(x).sum()

        @use(argnums=1)
        def slope_of_input(self, x: Any) -> Any:
            return self(x).sum()

    def last(result: Any) -> Any:
        return result if use is sx.grad else result[1]

    model = Model()
    assert _flat(last(model.slope(2.0))) == {("factor",): [1.0, 1.0]}
    assert float(last(model.slope_of_input(2.0))) == 1.0
    assert int(model.calls) == 2


def test_callable_module_as_function_is_written() -> None:
    class Cube(sx.Module):
        def __init__(self) -> None:
            self.calls = sx.Variable(0)

        def __call__(self, x: Any) -> Any:
            self.calls += 1
            return x**3

    cube = Cube()
    assert float(sx.grad(cube)(2.0)) == 12.0 and int(cube.calls) == 1


# --- what the loss does besides ---


def test_values_written_by_the_loss_are_carried_back() -> None:
    model = Scale()
    sx.grad(lambda m: m(1.0).sum())(model)
    sx.grad(lambda m: m(1.0).sum(), argnums=0)(model)
    assert values(model) == {("factor",): [1.0, 1.0], ("calls",): 2}


def test_structural_changes_by_the_loss_are_carried_back() -> None:
    model = Scale()

    def loss(m: Scale) -> Any:
        m.seen = sx.Intermediate(m.factor * 2)
        m.mode = "train"
        del m.calls
        return _loss(m)

    gradient = sx.grad(loss)(model)
    assert _flat(gradient) == {("factor",): [2.0, 2.0]}
    assert values(model) == {("factor",): [1.0, 1.0], ("seen",): [2.0, 2.0]}
    assert model.mode == "train"


def test_captured_variables_are_written_but_not_differentiated() -> None:
    model, counter, scale = Scale(), sx.Variable(0), Scale()

    def loss(m: Scale) -> Any:
        counter[...] += 1
        return (m.factor * scale.factor * 3).sum()

    assert _flat(sx.grad(loss)(model)) == {("factor",): [3.0, 3.0]}
    assert _flat(sx.grad(loss)(model)) == {("factor",): [3.0, 3.0]}
    assert int(counter) == 2


def test_captured_argument_is_differentiated_throughout() -> None:
    model = Scale()
    gradient = sx.grad(lambda m: (m.factor * model.factor).sum())(model)
    assert _flat(gradient) == {("factor",): [2.0, 2.0]}


def test_aux_may_hold_modules_variables_and_arrays() -> None:
    model = Scale()

    def loss(m: Scale) -> Any:
        m.calls += 1
        return _loss(m), {"same": m, "new": Scale(3), "v": m.factor, "x": [m.factor * 2]}

    gradient, aux = sx.grad(loss, has_aux=True)(model)
    assert aux["same"] is model and aux["v"] is model.factor
    assert values(aux["new"]) == {("factor",): [1.0] * 3, ("calls",): 0}
    assert _lists(aux["x"]) == [[2.0, 2.0]] and _flat(gradient) == {("factor",): [2.0, 2.0]}
    (value, aux), _ = sx.value_and_grad(loss, has_aux=True)(model)
    assert float(value) == 2.0 and aux["same"] is model and int(model.calls) == 2


def test_exception_in_the_loss_leaves_everything_untouched() -> None:
    model, counter = Scale(), sx.Variable(0)
    structure = sx.graphdef(model)

    def loss(m: Scale) -> Any:
        counter[...] += 1
        m.factor += 1
        m.extra = sx.Param(1.0)
        raise KeyError("stop")

    with pytest.raises(KeyError, match="stop"):
        sx.grad(loss)(model)
    assert sx.graphdef(model) == structure and int(counter) == 0
    assert values(model) == {("factor",): [1.0, 1.0], ("calls",): 0}


def test_structure_of_captured_model_cannot_change() -> None:
    model = Scale()

    def loss(x: Any) -> Any:
        model.extra = sx.Param(x)
        return x

    with pytest.raises(ForeignMutationError, match=r"'extra' of Scale inside sx\.grad"):
        sx.grad(loss)(1.0)


# --- together with other transforms ---


def test_grad_inside_jit_and_jit_inside_grad() -> None:
    def train(model: Scale) -> Any:
        gradient = sx.grad(lambda m: m(2.0).sum())(model)
        model.factor -= 0.5 * gradient["factor"]
        return gradient

    eager, compiled = Scale(), Scale()
    step = sx.jit(train)
    for _ in range(3):
        assert _flat(step(compiled)) == _flat(train(eager)) == {("factor",): [1.0, 1.0]}
    assert values(compiled) == values(eager) == {("factor",): [-0.5, -0.5], ("calls",): 3}
    forward = sx.jit(lambda m: m(2.0).sum())
    assert _flat(sx.grad(forward)(eager)) == {("factor",): [1.0, 1.0]}
    assert _flat(sx.grad(forward)(eager)) == {("factor",): [1.0, 1.0]}
    assert int(eager.calls) == 5


def test_second_derivatives() -> None:
    value = sx.Param(jnp.float32(3.0))
    assert float(sx.grad(lambda v: sx.grad(lambda w: w**3)(v))(value)) == 18.0
    model = Scale()

    def slope(m: Scale) -> Any:
        return sx.grad(lambda n: (n.factor**3).sum())(m)["factor"].sum()

    assert _flat(sx.grad(slope)(model)) == {("factor",): [6.0, 6.0]}
    assert _flat(sx.jit(sx.grad(sx.jit(slope)))(model)) == {("factor",): [6.0, 6.0]}


def test_sx_grad_nests_with_jax_grad() -> None:
    inner = sx.grad(lambda x: x**3)
    assert float(jax.grad(inner)(2.0)) == 12.0
    assert float(sx.grad(jax.grad(lambda x: x**3))(2.0)) == 12.0


def test_jax_grad_of_untied_model_agrees() -> None:
    model = Scale(3)
    del model.calls
    model.layers = [Scale(2)]
    del model.layers[0].calls

    def loss(m: Scale) -> Any:
        return (m.factor**2).sum() * (m.layers[0].factor ** 3).sum()

    plain = jax.grad(loss)(model)
    assert isinstance(plain, Scale)
    assert values(plain) == _flat(sx.grad(loss)(model))


def test_perturbations_give_gradients_of_activations() -> None:
    model = Scale()

    def forward(m: Scale) -> Any:
        return (m.perturb("inner", m.factor * 2) ** 2).sum()

    forward(model)
    assert _flat(sx.grad(forward, wrt=sx.Perturbation)(model)) == {("inner",): [4.0, 4.0]}


def test_holomorphic_gradients() -> None:
    value = sx.Param(jnp.complex64(1 + 2j))
    assert complex(sx.grad(lambda v: v**2, holomorphic=True)(value)) == 2 + 4j


def test_allow_int_differentiates_integers_as_jax() -> None:
    gradient = sx.grad(lambda m: m(1.0).sum(), wrt=..., allow_int=True)(Scale())
    assert gradient["calls"].dtype == jax.dtypes.float0
    assert gradient["factor"].tolist() == [0.5, 0.5]


# --- what is refused ---


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: sx.grad(_loss, wrt=sx.BatchStat)(Scale()), r"'model' \(Scale\) .* BatchStat"),
        (lambda: sx.grad(lambda box: 1.0)(Box()), r"'box' \(Box\) has no Variable"),
        (lambda: sx.grad(_loss, wrt=...)(Scale()), r"Variable at \.model\.calls has dtype int32"),
        (lambda: sx.grad(lambda v: v * 1.0)(sx.Param(3)), r"Param at \.v has dtype int32"),
        (lambda: sx.grad(lambda x: x * 1.0)(3), r"array at \.x has dtype int32"),
        (
            lambda: sx.grad(lambda t: t["m"].factor.sum())({"m": Scale(), "i": [3]}),
            r"array at \.t\.i\[0\] has dtype int32",
        ),
        (lambda: sx.grad(_loss, argnums=1)(Scale()), r"argnums=1 is out of range: .* 1 positional"),
        (
            lambda: sx.grad(lambda *, model: _loss(model))(model=Scale()),
            r"argnums=0 is out of range: .* 0 positional",
        ),
        (lambda: sx.grad(_weighted, argnums=(0, 0))(Scale(), 1.0, Scale()), r"twice: \[0, 0\]"),
        (lambda: sx.grad(_weighted, argnums=(0, -3))(Scale(), 1.0, Scale()), r"twice: \[0, -3\]"),
        (lambda: sx.grad(lambda m: m.factor * 1)(Scale()), r"it returned float32\[2\]"),
        (lambda: sx.grad(lambda m: m)(Scale()), r"it returned a Scale"),
        (lambda: sx.grad(lambda m: None)(Scale()), r"it returned a NoneType"),
        (lambda: sx.grad(lambda m: m.calls + 1)(Scale()), r"it returned int32\[\]"),
        (lambda: sx.grad(_loss, has_aux=True)(Scale()), r"must return \(result, aux\), but it"),
        (lambda: sx.grad(lambda v: v**2, holomorphic=True)(sx.Param(1.0)), r"has dtype float32"),
    ],
)
def test_grad_names_what_has_no_gradient(call: Any, message: str) -> None:
    with pytest.raises(TransformError, match=message):
        call()
