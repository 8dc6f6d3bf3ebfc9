# SPDX-License-Identifier: Apache-2.0
"""An Optimizer does what its transformation does; its state is lazy and follows the parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import shardax as sx
from shardax.core.errors import GradientMismatchError, OptimizerStateError
from shardax.partition.check import spec_for
from shardax.partition.placement import shard
from shardax.partition.rules import Rules
from shardax.train.optimizer import Optimizer

RULES = Rules({"embed": None, "mlp": "model"})


class Layer(sx.Module):
    def __init__(self, rngs: sx.Rngs, dtype: Any = np.float32) -> None:
        normal = jax.nn.initializers.normal(1.0)
        self.kernel = sx.Param(sx.Init(normal, (4, 8), dtype, rngs=rngs), axes=("embed", "mlp"))
        self.bias = sx.Param(sx.Init(normal, (8,), dtype, rngs=rngs), axes=("mlp",))

    def __call__(self, x: Any) -> Any:
        return x @ self.kernel + self.bias[None]


class Tower(sx.Module):
    def __init__(self, seed: int = 0, dtype: Any = np.float32) -> None:
        rngs = sx.Rngs(seed)
        self.layers = [Layer(rngs, dtype)]
        self.head = sx.Param(
            sx.Init(jax.nn.initializers.normal(1.0), (8, 4), dtype, rngs=rngs),
            axes=("mlp", "embed"),
        )
        self.steps_seen = sx.Variable(0)

    def __call__(self, x: Any) -> Any:
        hidden, axis_types = (
            jnp.tanh(self.layers[0](x)),
            jax.sharding.get_abstract_mesh().axis_types,
        )
        whole = PartitionSpec() if AxisType.Explicit in axis_types else None
        return jnp.matmul(hidden, self.head.value, out_sharding=whole)


X = np.linspace(-1, 1, 12, dtype=np.float32).reshape(3, 4)
PATHS = [("layers", 0, "kernel"), ("layers", 0, "bias"), ("head",)]


def loss(model: Any, x: Any) -> Any:
    return jnp.mean((model(x) - 1) ** 2)


@sx.jit
def train_step(model: Any, optimizer: Any, x: Any) -> Any:
    value, grads = sx.value_and_grad(loss)(model, x)
    optimizer.update(grads, value=value)
    return value


def params_of(model: Any) -> dict[Any, Any]:
    return {path: np.asarray(value) for path, value in sx.state(model, sx.Param).flat().items()}


GRAPHDEF, _, REST = sx.split(Tower(), sx.Param, ...)


@jax.jit
def plain_value_and_grad(plain: Any) -> Any:
    def plain_loss(plain: Any) -> Any:
        values = dict(zip(PATHS, plain, strict=True))
        return loss(sx.merge(GRAPHDEF, sx.State.from_flat(values), REST), X)

    return jax.value_and_grad(plain_loss)(plain)


def by_hand(tx: Any, steps: int) -> dict[Any, Any]:
    """Trains the same parameters in a plain list, with optax alone."""
    plain = list(sx.state(Tower(), sx.Param).flat().values())
    tx = optax.with_extra_args_support(tx)
    state = tx.init(plain)
    for _ in range(steps):
        value, grads = plain_value_and_grad(plain)
        updates, state = tx.update(grads, state, plain, value=value)
        plain = optax.apply_updates(plain, updates)
    return dict(zip(PATHS, map(np.asarray, plain), strict=True))


class TaggedState(NamedTuple):
    """A state with leaves that are no arrays."""

    name: str
    first: Any
    function: Callable[[Any], Any]
    total: Any


def tagged() -> optax.GradientTransformation:
    """Pulls the parameters towards where they started."""

    def init(params: Any) -> TaggedState:
        return TaggedState("pull", jax.tree.map(lambda p: 2 * p, params), jnp.sin, 0.5)

    def update(updates: Any, state: TaggedState, params: Any) -> Any:
        assert state.name == "pull" and state.function is jnp.sin
        pulled = jax.tree.map(
            lambda u, p, f: -0.1 * u + 0.01 * state.total * (f / 2 - p),
            updates,
            params,
            state.first,
        )
        return pulled, state._replace(total=state.total * 0.9)

    return optax.GradientTransformation(init, update)


def is_matrix(params: Any) -> Any:
    return jax.tree.map(lambda p: p.ndim == 2, params)


def kind(params: Any) -> Any:
    return jax.tree.map(lambda p: "matrix" if p.ndim == 2 else "vector", params)


TRANSFORMATIONS: dict[str, Callable[[], Any]] = {
    "sgd without state": lambda: optax.sgd(0.1),
    "adamw": lambda: optax.adamw(1e-2),
    "clip and nesterov": lambda: optax.chain(
        optax.clip_by_global_norm(0.1), optax.sgd(0.1, momentum=0.9, nesterov=True)
    ),
    "masked": lambda: optax.chain(
        optax.masked(optax.add_decayed_weights(0.1), is_matrix), optax.adam(1e-2)
    ),
    "multi_transform": lambda: optax.multi_transform(
        {"matrix": optax.adam(1e-2), "vector": optax.set_to_zero()}, kind
    ),
    "MultiSteps": lambda: optax.MultiSteps(optax.adam(1e-2), 2),
    "inject_hyperparams": lambda: optax.inject_hyperparams(optax.adam)(
        learning_rate=optax.cosine_decay_schedule(0.1, 5)
    ),
    "schedule": lambda: optax.adam(optax.exponential_decay(0.1, 2, 0.5)),
    "ema": lambda: optax.chain(optax.ema(0.9), optax.sgd(0.1)),
    "copies of the parameters": lambda: optax.contrib.schedule_free_adamw(0.1),
    "distance from the start": lambda: optax.contrib.dog(1.0),
    "factored": lambda: optax.adafactor(0.1, min_dim_size_to_factor=2),
    "history": lambda: optax.lbfgs(0.1, memory_size=3, linesearch=None),
    "random key": lambda: optax.chain(optax.add_noise(0.1, 0.5, 7), optax.sgd(0.1)),
    "apply_if_finite": lambda: optax.apply_if_finite(optax.adam(1e-2), 3),
    "extra argument": lambda: optax.chain(
        optax.sgd(0.5), optax.contrib.reduce_on_plateau(factor=0.5, patience=1, accumulation_size=1)
    ),
    "static leaves": tagged,
}


@pytest.mark.parametrize("name", TRANSFORMATIONS)
def test_updates_are_those_of_the_transformation_on_plain_parameters(name: str) -> None:
    model = Tower()
    optimizer = Optimizer(model, TRANSFORMATIONS[name]())
    for _ in range(4):
        train_step(model, optimizer, X)
    expected = by_hand(TRANSFORMATIONS[name](), 4)
    found = params_of(model)
    assert found.keys() == expected.keys()
    for path in PATHS:
        np.testing.assert_allclose(found[path], expected[path], rtol=2e-5, atol=1e-6)
    assert int(optimizer.step) == 4


# --- laziness -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["adamw", "MultiSteps", "copies of the parameters", "factored"])
def test_making_one_for_a_lazy_model_allocates_nothing(name: str) -> None:
    before = {id(array) for array in jax.live_arrays()}
    model = Tower()
    optimizer = Optimizer(model, TRANSFORMATIONS[name]())
    assert [array.shape for array in jax.live_arrays() if id(array) not in before] == []
    assert all(variable.is_lazy for _, variable in sx.iter_variables(optimizer, sx.OptState))
    assert all(variable.is_lazy for _, variable in sx.iter_variables(model, sx.Param))


@pytest.mark.parametrize("name", TRANSFORMATIONS)
def test_lazy_state_becomes_what_init_computes(name: str) -> None:
    model = Tower()
    tx = TRANSFORMATIONS[name]()
    optimizer = Optimizer(model, tx)
    found = jax.tree.leaves(sx.state(optimizer.opt_state))
    leaves = jax.tree.leaves(tx.init(sx.state(model, sx.Param)))
    expected = [leaf for leaf in leaves if not isinstance(leaf, str) and not callable(leaf)]
    assert len(found) == len(expected)
    for a, b in zip(found, expected, strict=True):
        if jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        assert a.dtype == jnp.asarray(b).dtype
        np.testing.assert_array_equal(a, b)


def test_state_made_from_parameters_uses_their_values_at_first_use() -> None:
    model = Tower()
    optimizer = Optimizer(model, optax.contrib.schedule_free_adamw(0.1))
    model.head.value = jnp.full((8, 4), 7.0)  # as when a checkpoint is restored into a lazy model
    copies = [
        v for p, v in sx.iter_variables(optimizer.opt_state) if p[-1:] == ("head",) and "z" in p
    ]
    assert [bool((copy == 7).all()) for copy in copies] == [True]


def test_state_has_the_names_axes_and_shapes_of_the_parameters() -> None:
    optimizer = Optimizer(Tower(), optax.adam(1e-2, mu_dtype=jnp.bfloat16))
    found = {
        path: (variable.axes, variable.shape, str(variable.dtype))
        for path, variable in sx.iter_variables(optimizer.opt_state)
    }
    assert found == {
        (0, "count"): (None, (), "int32"),
        (0, "mu", "layers", 0, "kernel"): (("embed", "mlp"), (4, 8), "bfloat16"),
        (0, "mu", "layers", 0, "bias"): (("mlp",), (8,), "bfloat16"),
        (0, "mu", "head"): (("mlp", "embed"), (8, 4), "bfloat16"),
        (0, "nu", "layers", 0, "kernel"): (("embed", "mlp"), (4, 8), "float32"),
        (0, "nu", "layers", 0, "bias"): (("mlp",), (8,), "float32"),
        (0, "nu", "head"): (("mlp", "embed"), (8, 4), "float32"),
    }


def test_state_with_a_dimension_less_or_more_keeps_the_axes_that_remain() -> None:
    factored = Optimizer(Tower(), optax.adafactor(0.1, min_dim_size_to_factor=2)).opt_state[0]
    assert factored["v_row"]["layers"][0]["kernel"].axes == ("embed",)
    assert factored["v_col"]["layers"][0]["kernel"].axes == ("mlp",)
    assert factored["v"]["layers"][0]["kernel"].axes is None  # a placeholder of shape (1,)
    history = Optimizer(Tower(), optax.lbfgs(0.1, memory_size=3, linesearch=None)).opt_state[0]
    assert history["diff_params_memory"]["head"].axes == (None, "mlp", "embed")


# --- shardings ------------------------------------------------------------------------------------


def shardings_of(tree: Any) -> dict[Any, PartitionSpec]:
    """Returns specs without trailing None, by path."""
    found = {}
    for path, variable in sx.iter_variables(tree):
        entries = list(variable.value.sharding.spec)
        while entries and entries[-1] is None:
            entries.pop()
        found[path] = PartitionSpec(*entries)
    return found


@pytest.mark.parametrize(
    "name", ["adamw", "copies of the parameters", "factored", "distance from the start"]
)
def test_state_goes_straight_into_shards_beside_its_parameters(name: str, mesh: Mesh) -> None:
    model, plain = Tower(), Tower()
    optimizer = Optimizer(model, TRANSFORMATIONS[name]())
    shard((model, optimizer), mesh, RULES)
    unsharded = Optimizer(plain, TRANSFORMATIONS[name]())
    for (path, a), (_, b) in zip(
        sx.iter_variables(optimizer, sx.OptState),
        sx.iter_variables(unsharded, sx.OptState),
        strict=True,
    ):
        spec, findings = spec_for(a.axes, a.shape, mesh, RULES, path)
        assert findings == [] and a.sharding.is_equivalent_to(NamedSharding(mesh, spec), a.ndim)
        np.testing.assert_array_equal(a.value, b.value)


@pytest.mark.parametrize("name", ["adamw", "copies of the parameters", "history", "random key"])
@pytest.mark.parametrize("order", ["model sharded first", "optimizer made first"])
def test_state_follows_the_shardings_of_the_parameters_by_itself(
    name: str, order: str, mesh: Mesh
) -> None:
    model = Tower()
    if order == "model sharded first":
        shard(model, mesh, RULES)
        optimizer = Optimizer(model, TRANSFORMATIONS[name]())
    else:
        optimizer = Optimizer(model, TRANSFORMATIONS[name]())
        shard(model, mesh, RULES)
    for path, variable in sx.iter_variables(optimizer, sx.OptState):
        spec, _ = spec_for(variable.axes, variable.shape, mesh, RULES, path)
        sharding = variable.value.sharding
        assert sharding.is_equivalent_to(NamedSharding(mesh, spec), variable.ndim), path


def test_a_sharded_train_step_is_that_of_one_device_and_keeps_shardings(mesh: Mesh) -> None:
    traces = []

    @sx.jit
    def step(model: Any, optimizer: Any, x: Any) -> Any:
        traces.append(1)
        value, grads = sx.value_and_grad(loss)(model, x)
        optimizer.update(grads)
        return value

    model, plain = Tower(), Tower()
    optimizer, unsharded = Optimizer(model, optax.adamw(1e-2)), Optimizer(plain, optax.adamw(1e-2))
    shard((model, optimizer), mesh, RULES)
    before = shardings_of((model, optimizer))
    x = jax.device_put(X, NamedSharding(mesh, PartitionSpec()))
    with jax.set_mesh(mesh):
        for _ in range(3):
            step(model, optimizer, x)
    assert shardings_of((model, optimizer)) == before
    assert len(traces) == 1
    for _ in range(3):
        train_step(plain, unsharded, X)
    for path, value in params_of(model).items():
        np.testing.assert_allclose(value, params_of(plain)[path], rtol=1e-4, atol=1e-6)


# --- how it is passed -----------------------------------------------------------------------------


def test_model_and_optimizer_pass_each_variable_once() -> None:
    model = Tower()
    optimizer = Optimizer(model, optax.sgd(0.1))
    paths = [path for path, _ in sx.iter_variables((model, optimizer))]
    assert paths == [(0, *path) for path, _ in sx.iter_variables(model)] + [(1, "step")]


def test_optimizer_alone_or_closed_over_trains_the_same() -> None:
    def make() -> Optimizer:
        return Optimizer(Tower(), optax.adam(1e-2))

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
    eager.update(sx.grad(loss)(eager.model, X))
    expected = params_of(passed.model)
    for other in (alone, closed, eager):
        assert int(other.step) == 1
        for path, value in params_of(other.model).items():
            np.testing.assert_allclose(value, expected[path], rtol=1e-6)


@pytest.mark.parametrize(
    "make", [lambda: optax.adam(1e-3), lambda: optax.adamw(optax.cosine_decay_schedule(1e-3, 9))]
)
def test_an_equal_transformation_made_anew_does_not_retrace(make: Callable[[], Any]) -> None:
    traces = []

    @sx.jit
    def step(model: Any, optimizer: Any, x: Any) -> None:
        traces.append(1)
        optimizer.update(sx.grad(loss)(model, x))

    model = Tower()
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

    model, kept = Tower(), Tower()
    optimizer = Optimizer(model, TRANSFORMATIONS[name]())
    reference = Optimizer(kept, TRANSFORMATIONS[name]())
    donating = sx.jit(step, donate_argnames=("model", "optimizer"))
    for _ in range(2):
        donating(model, optimizer, X)
        sx.jit(step)(kept, reference, X)
    for path, value in params_of(model).items():
        np.testing.assert_allclose(value, params_of(kept)[path], rtol=1e-6)


def test_one_can_be_made_inside_a_compiled_function() -> None:
    @sx.jit
    def make(model: Any) -> Any:
        return Optimizer(model, optax.contrib.schedule_free_adamw(0.1))

    model = Tower()
    optimizer = make(model)
    outside = Optimizer(Tower(), optax.contrib.schedule_free_adamw(0.1))
    assert optimizer.model is model
    for a, b in zip(
        jax.tree.leaves(sx.state(optimizer)), jax.tree.leaves(sx.state(outside)), strict=True
    ):
        np.testing.assert_array_equal(a, b)


def test_a_clone_trains_its_own_model() -> None:
    optimizer = Optimizer(Tower(), optax.adam(1e-2))
    copy = sx.clone(optimizer)
    before = params_of(optimizer.model)
    train_step(copy.model, copy, X)
    assert int(copy.step) == 1 and int(optimizer.step) == 0
    assert all((params_of(optimizer.model)[path] == before[path]).all() for path in PATHS)
    assert all((params_of(copy.model)[path] != before[path]).any() for path in PATHS)


# --- what is trained ------------------------------------------------------------------------------


def test_only_what_the_filter_matches_is_trained() -> None:
    model = Tower()
    before = params_of(model)
    optimizer = Optimizer(model, optax.sgd(0.1), wrt=sx.PathContains("head"))
    optimizer.update(sx.grad(loss, wrt=optimizer.wrt)(model, X))
    after = params_of(model)
    assert [path for path in PATHS if (before[path] != after[path]).any()] == [("head",)]


def test_parameters_keep_their_dtype_whatever_the_updates_have() -> None:
    model = Tower(dtype=jnp.bfloat16)
    optimizer = Optimizer(model, optax.adam(1e-2))
    grads = jax.tree.map(lambda g: g.astype(jnp.float32), sx.grad(loss)(model, X))
    kinds = {path: v.dtype for path, v in sx.iter_variables(optimizer)}
    optimizer.update(grads)
    assert {path: v.dtype for path, v in sx.iter_variables(optimizer)} == kinds
    assert model.head.dtype == jnp.bfloat16


def test_a_shared_parameter_has_one_slot_and_the_sum_of_its_gradients() -> None:
    class Tied(sx.Module):
        def __init__(self) -> None:
            self.embed = sx.Param(jnp.ones(2))
            self.head = self.embed

    model = Tied()
    optimizer = Optimizer(model, optax.sgd(0.1, momentum=0.9))
    optimizer.update(sx.grad(lambda m: (m.embed * 1 + m.head * 2).sum())(model))
    assert [path for path, _ in sx.iter_variables(optimizer.opt_state)] == [(0, "trace", "embed")]
    np.testing.assert_allclose(model.embed.value, 1 - 0.3)


def test_a_bare_variable_and_a_variable_holding_a_pytree_can_be_trained() -> None:
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
    model = Tower()
    optimizer = Optimizer(model, optax.inject_hyperparams(optax.sgd)(learning_rate=0.1))
    before = params_of(model)
    optimizer.opt_state["hyperparams"]["learning_rate"][...] = 0.0
    train_step(model, optimizer, X)
    assert all((params_of(model)[path] == before[path]).all() for path in PATHS)


# --- errors ---------------------------------------------------------------------------------------


def test_gradients_that_do_not_fit_are_listed_and_change_nothing() -> None:
    model = Tower()
    optimizer = Optimizer(model, optax.adam(0.1))
    before = params_of(model)
    grads = {"layers": {0: {"kernel": jnp.ones((4, 7))}}, "heat": jnp.ones((8, 4))}
    with pytest.raises(GradientMismatchError) as caught:
        optimizer.update(grads)
    assert str(caught.value).splitlines()[1:-1] == [
        "  .head: is trained but has no gradient",
        "  .heat: has a gradient but is not trained (did you mean .head?)",
        "  .layers[0].bias: is trained but has no gradient",
        "  .layers[0].kernel: has shape (4, 8), its gradient (4, 7)",
    ]
    assert int(optimizer.step) == 0
    assert all((params_of(model)[path] == before[path]).all() for path in PATHS)


def test_nothing_to_train_is_an_error() -> None:
    with pytest.raises(OptimizerStateError, match="matches wrt=Cache"):
        Optimizer(Tower(), optax.adam(0.1), wrt=sx.Cache)


def test_a_model_that_grew_needs_a_new_optimizer() -> None:
    model = Tower()
    optimizer = Optimizer(model, optax.adam(0.1))
    model.extra = sx.Param(jnp.ones(2))
    grads = sx.grad(lambda m, x: loss(m, x) + m.extra.value.sum())(model, X)
    with pytest.raises(OptimizerStateError, match=r"\[0\]\.mu\.extra, \[0\]\.nu\.extra"):
        optimizer.update(grads)


def test_a_transformation_that_changes_the_form_of_its_state_is_refused() -> None:
    grows = optax.GradientTransformation(
        lambda params: {"n": jnp.zeros(1)},
        lambda updates, state, params: (updates, {"n": jnp.zeros(state["n"].size + 1)}),
    )
    other = optax.GradientTransformation(
        lambda params: {"n": jnp.zeros(1)},
        lambda updates, state, params: (updates, {"m": state["n"]}),
    )
    model = Tower()
    grads = sx.grad(loss)(model, X)
    with pytest.raises(OptimizerStateError, match=r"\.n from \(1,\) to \(2,\)"):
        Optimizer(model, grows).update(grads)
    with pytest.raises(OptimizerStateError, match="another structure"):
        Optimizer(model, other).update(grads)
