# SPDX-License-Identifier: Apache-2.0
"""An Optimizer does to a model what its transformation does to plain parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import shardax as sx
from shardax.errors import TrainError, TransformError
from shardax.train import Optimizer
from tests.advice import run_advice
from tests.training.train.towers import (
    PATHS,
    TRANSFORMATIONS,
    Tower,
    X,
    loss,
    params_of,
    train_step,
)
from tests.values import with_values

GRAPHDEF, _, REST = sx.split(Tower(), sx.Param, ...)


def tower(**options: Any) -> Tower:
    return with_values(Tower(**options))


@jax.jit
def plain_value_and_grad(plain: Any) -> Any:
    def plain_loss(plain: Any) -> Any:
        values = dict(zip(PATHS, plain, strict=True))
        return loss(sx.merge(GRAPHDEF, sx.State.from_flat(values), REST), X)

    return jax.value_and_grad(plain_loss)(plain)


gradient = sx.jit(sx.grad(loss))


def by_hand(tx: Any, steps: int) -> dict[Any, Any]:
    """Trains the same parameters in a plain list, with optax alone."""
    plain = list(sx.state(tower(), sx.Param).flat().values())
    tx = optax.with_extra_args_support(tx)
    state = tx.init(plain)
    # Operations one by one: those of one transformation are those of others.
    for _ in range(steps):
        value, grads = plain_value_and_grad(plain)
        updates, state = tx.update(grads, state, plain, value=value)
        plain = optax.apply_updates(plain, updates)
    return dict(zip(PATHS, map(np.asarray, plain), strict=True))


@pytest.mark.parametrize("name", TRANSFORMATIONS)
def test_updates_equal_those_of_the_plain_transformation(name: str) -> None:
    model = tower()
    optimizer = Optimizer(model, TRANSFORMATIONS[name]())
    for _ in range(4):
        train_step(model, optimizer, X)
    expected = by_hand(TRANSFORMATIONS[name](), 4)
    found = params_of(model)
    assert found.keys() == expected.keys()
    for path in PATHS:
        np.testing.assert_allclose(found[path], expected[path], rtol=2e-5, atol=1e-6)
    assert int(optimizer.step) == 4


# --- how it is passed -----------------------------------------------------------------------------


def test_model_and_optimizer_pass_each_variable_once() -> None:
    model = tower()
    optimizer = Optimizer(model, optax.sgd(0.1))
    paths = [path for path, _ in sx.iter_variables((model, optimizer))]
    assert paths == [(0, *path) for path, _ in sx.iter_variables(model)] + [(1, "step")]


def test_optimizer_alone_or_closed_over_trains_the_same() -> None:
    def make() -> Optimizer:
        return Optimizer(tower(), optax.adam(1e-2))

    passed, alone, closed = make(), make(), make()
    train_step(passed.model, passed, X)

    @sx.jit
    def step_alone(optimizer: Any, x: Any) -> None:
        optimizer.update(sx.grad(loss)(optimizer.model, x))

    step_alone(alone, X)

    @sx.jit
    def step_closed(x: Any) -> None:
        closed.update(sx.grad(loss)(closed.model, x))

    step_closed(X)
    eager = make()
    eager.update(gradient(eager.model, X))
    expected = params_of(passed.model)
    for other in (alone, closed, eager):
        assert int(other.step) == 1
        for path, value in params_of(other.model).items():
            np.testing.assert_allclose(value, expected[path], rtol=1e-6)


@pytest.mark.parametrize(
    "make", [lambda: optax.adam(1e-3), lambda: optax.adamw(optax.cosine_decay_schedule(1e-3, 9))]
)
def test_equal_transformation_made_anew_does_not_retrace(make: Callable[[], Any]) -> None:
    traces = []

    @sx.jit
    def step(model: Any, optimizer: Any, x: Any) -> None:
        traces.append(1)
        optimizer.update(sx.grad(loss)(model, x))

    model = tower()
    for _ in range(3):
        optimizer = Optimizer(model, make())
        for _ in range(2):
            step(model, optimizer, X)
    assert len(traces) == 1
    step(model, Optimizer(model, optax.adam(2e-3)), X)
    assert len(traces) == 2


@pytest.mark.parametrize("name", ["adamw", "copies of the parameters"])
def test_model_and_optimizer_can_both_be_donated(name: str) -> None:
    def step(model: Any, optimizer: Any, x: Any) -> None:
        optimizer.update(sx.grad(loss)(model, x))

    model, kept = tower(), tower()
    optimizer = Optimizer(model, TRANSFORMATIONS[name]())
    reference = Optimizer(kept, TRANSFORMATIONS[name]())
    keeping, donating = sx.jit(step), sx.jit(step, donate_argnames=("model", "optimizer"))
    for _ in range(2):
        donating(model, optimizer, X)
        keeping(kept, reference, X)
    for path, value in params_of(model).items():
        np.testing.assert_allclose(value, params_of(kept)[path], rtol=1e-6)


def test_optimizer_can_be_made_inside_a_compiled_function() -> None:
    @sx.jit
    def make(model: Any) -> Any:
        return Optimizer(model, optax.contrib.schedule_free_adamw(0.1))

    model = tower()
    optimizer = make(model)
    outside = Optimizer(tower(), optax.contrib.schedule_free_adamw(0.1))
    assert optimizer.model is model
    for a, b in zip(
        jax.tree.leaves(sx.state(optimizer)), jax.tree.leaves(sx.state(outside)), strict=True
    ):
        np.testing.assert_array_equal(a, b)


def test_clone_trains_its_own_model() -> None:
    optimizer = Optimizer(tower(), optax.adam(1e-2))
    copy = sx.clone(optimizer)
    before = params_of(optimizer.model)
    train_step(copy.model, copy, X)
    assert int(copy.step) == 1 and int(optimizer.step) == 0
    assert all((params_of(optimizer.model)[path] == before[path]).all() for path in PATHS)
    assert all((params_of(copy.model)[path] != before[path]).any() for path in PATHS)


def _last_key(path: Any) -> str:
    return path[-1].key


def _no_bias(tree: Any) -> Any:
    return jax.tree_util.tree_map_with_path(lambda path, _: _last_key(path) != "bias", tree)


def _labels(tree: Any) -> Any:
    return jax.tree_util.tree_map_with_path(lambda path, _: _last_key(path), tree)


BY_KEY_PATH = {
    "decay mask": lambda: optax.adamw(1e-2, weight_decay=0.5, mask=_no_bias),
    # The labels have the names of parameters, which no state of another label may be taken for.
    "labels": lambda: optax.multi_transform(
        {"kernel": optax.adam(1e-2), "bias": optax.sgd(1.0), "head": optax.set_to_zero()}, _labels
    ),
}


@pytest.mark.parametrize("make", BY_KEY_PATH.values(), ids=BY_KEY_PATH.keys())
def test_masks_and_labels_by_key_path_choose_as_in_nested_dicts(make: Callable[[], Any]) -> None:
    model, tx = tower(), make()
    plain = sx.state(model, sx.Param).to_pure_dict()
    gradients = gradient(model, X)
    updates, _ = tx.update(gradients.to_pure_dict(), tx.init(plain), plain)
    expected = sx.State(optax.apply_updates(plain, updates)).flat()

    optimizer = Optimizer(model, tx)
    optimizer.update(gradients)
    for path, value in params_of(model).items():
        np.testing.assert_allclose(value, expected[path], rtol=1e-6)
    axes_by_name = {"kernel": ("embed", "mlp"), "bias": ("mlp",), "head": ("mlp", "embed")}
    for path, variable in sx.iter_variables(optimizer.opt_state):
        assert variable.axes == axes_by_name.get(path[-1]), path


# --- what is trained ------------------------------------------------------------------------------


def test_optimizer_trains_only_what_the_filter_matches() -> None:
    model = tower()
    before = params_of(model)
    optimizer = Optimizer(model, optax.sgd(0.1), wrt=sx.PathContains("head"))
    optimizer.update(sx.grad(loss, wrt=optimizer.wrt)(model, X))
    after = params_of(model)
    assert [path for path in PATHS if (before[path] != after[path]).any()] == [("head",)]


def test_parameters_keep_their_dtype_whatever_the_updates_have() -> None:
    model = tower(dtype=jnp.bfloat16)
    optimizer = Optimizer(model, optax.adam(1e-2))
    grads = jax.tree.map(lambda g: np.asarray(g, np.float32), gradient(model, X))
    kinds = {path: v.dtype for path, v in sx.iter_variables(optimizer)}
    optimizer.update(grads)
    assert {path: v.dtype for path, v in sx.iter_variables(optimizer)} == kinds
    assert model.head.dtype == jnp.bfloat16


def test_shared_parameter_has_one_slot_and_summed_gradients() -> None:
    class Tied(sx.Module):
        def __init__(self) -> None:
            self.embed = sx.Param(jnp.ones(2))
            self.head = self.embed

    model = Tied()
    optimizer = Optimizer(model, optax.sgd(0.1, momentum=0.9))
    optimizer.update(sx.grad(lambda m: (m.embed * 1 + m.head * 2).sum())(model))
    assert [path for path, _ in sx.iter_variables(optimizer.opt_state)] == [(0, "trace", "embed")]
    np.testing.assert_allclose(model.embed.value, 1 - 0.3)


def test_bare_variables_and_pytree_variables_are_trained() -> None:
    weight = sx.Param(jnp.float32(2))
    optimizer = Optimizer(weight, optax.adam(0.1))
    optimizer.update(sx.grad(lambda w: w**2)(weight))
    np.testing.assert_allclose(weight.value, 1.9, rtol=1e-5)

    class Pair(sx.Module):
        def __init__(self) -> None:
            self.both = sx.Param({"a": jnp.ones(2), "b": jnp.ones(3)})

    model = Pair()
    optimizer = Optimizer(model, optax.sgd(0.1, momentum=0.9))
    optimizer.update(
        sx.grad(lambda m: m.both.value["a"].sum() + 2 * m.both.value["b"].sum())(model)
    )
    np.testing.assert_allclose(model.both.value["a"], 0.9)
    np.testing.assert_allclose(model.both.value["b"], 0.8)
    assert [path for path, _ in sx.iter_variables(optimizer.opt_state)] == [
        (0, "trace", "both", "a"),
        (0, "trace", "both", "b"),
    ]


def test_injected_hyperparameters_can_be_set_between_steps() -> None:
    model = tower()
    optimizer = Optimizer(model, optax.inject_hyperparams(optax.sgd)(learning_rate=0.1))
    before = params_of(model)
    optimizer.opt_state["hyperparams"]["learning_rate"][...] = 0.0
    train_step(model, optimizer, X)
    assert all((params_of(model)[path] == before[path]).all() for path in PATHS)


# --- errors ---------------------------------------------------------------------------------------


def test_mismatched_gradients_are_listed_and_change_nothing() -> None:
    model = tower()
    optimizer = Optimizer(model, optax.adam(0.1))
    before = params_of(model)
    grads = {"layers": {0: {"kernel": jnp.ones((4, 7))}}, "heat": jnp.ones((8, 4))}
    with pytest.raises(TrainError) as caught:
        optimizer.update(grads)
    assert str(caught.value).splitlines()[1:-1] == [
        "  .head: is trained but has no gradient",
        "  .heat: has a gradient but is not trained (did you mean .head?)",
        "  .layers[0].bias: is trained but has no gradient",
        "  .layers[0].kernel: has shape (4, 8), its gradient (4, 7)",
    ]
    assert int(optimizer.step) == 0
    assert all((params_of(model)[path] == before[path]).all() for path in PATHS)
    names = {"sx": sx, "optimizer": optimizer, "rest": X}
    names["loss"] = lambda model, x: (model(x) ** 2).mean()
    code = "sx.grad(loss, wrt=optimizer.wrt)(optimizer.model, ...)"
    optimizer.update(run_advice(caught.value, code, names))
    assert int(optimizer.step) == 1


def test_model_among_the_gradients_is_refused() -> None:
    model = tower()
    optimizer = Optimizer(model, optax.adam(0.1))
    grads = gradient(model, X)
    for given in ((model, grads), (grads, model), (model,), (grads, grads)):
        with pytest.raises(TransformError, match=r"optimizer\.update\(grads\)"):
            optimizer.update(*given)
    assert int(optimizer.step) == 0


@pytest.mark.parametrize("swapped", [True, False])
def test_optimizer_refuses_what_is_no_transformation(swapped: bool) -> None:
    given = (optax.adam(0.1), tower()) if swapped else (tower(), optax.adam)
    with pytest.raises(TransformError, match=r"tx is a .*Optimizer\(model, optax\.adam\(1e-3\)\)"):
        Optimizer(*given)


def test_nothing_to_train_is_an_error() -> None:
    with pytest.raises(TrainError, match="matches wrt=Cache"):
        Optimizer(tower(), optax.adam(0.1), wrt=sx.Cache)


def test_model_that_grew_needs_a_new_optimizer() -> None:
    model = tower()
    optimizer = Optimizer(model, optax.adam(0.1))
    model.extra = sx.Param(jnp.ones(2))
    grads = sx.grad(lambda m, x: loss(m, x) + m.extra.value.sum())(model, X)
    with pytest.raises(TrainError, match=r"\[0\]\.mu\.extra, \[0\]\.nu\.extra"):
        optimizer.update(grads)


def test_transformation_that_changes_its_state_form_is_refused() -> None:
    grows = optax.GradientTransformation(
        lambda params: {"n": jnp.zeros(1)},
        lambda updates, state, params: (updates, {"n": jnp.zeros(state["n"].size + 1)}),
    )
    other = optax.GradientTransformation(
        lambda params: {"n": jnp.zeros(1)},
        lambda updates, state, params: (updates, {"m": state["n"]}),
    )
    model = tower()
    grads = gradient(model, X)
    with pytest.raises(TrainError, match=r"\.n from \(1,\) to \(2,\)"):
        Optimizer(model, grows).update(grads)
    with pytest.raises(TrainError, match="another structure"):
        Optimizer(model, other).update(grads)
