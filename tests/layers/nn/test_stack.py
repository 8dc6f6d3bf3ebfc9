# SPDX-License-Identifier: Apache-2.0
"""``Stack``: what a list of the same layers computes, as one layer in a loop."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import shardax as sx
from shardax.errors import LayerConfigError, ModuleError, PartitionCheckError, TransformError
from shardax.nn import Stack, stack_layers, unstack_layers
from tests.strategies import assert_equal_values, assert_same_model
from tests.values import with_values


class Block(sx.Module):
    """Parameters, a random stream, running statistics, a counter, something sown."""

    def __init__(self, rngs: sx.Rngs, rate: float = 0.5, sows: bool = False) -> None:
        self.linear = sx.nn.Linear(4, 4, rngs=rngs)
        self.dropout = sx.nn.Dropout(rate, rngs=rngs)
        self.mean = sx.BatchStat(jnp.zeros(4), axes=("embed",))
        self.calls = sx.Variable(0)
        self.sows = sows

    def __call__(self, x: Any, scale: Any = 1.0, *, negate: bool = False) -> Any:
        self.calls += 1
        self.mean[...] = 0.9 * self.mean + 0.1 * x.mean(0)
        if self.sows:
            self.sow("size", x.sum())
        y = x + scale * self.dropout(jax.nn.tanh(self.linear(x)))
        return -y if negate else y


X = np.linspace(-1, 1, 8, dtype=np.float32).reshape(2, 4)
SHARED = pytest.mark.parametrize("own_streams", [False, True], ids=["shared stream", "own streams"])


def both(length: int = 4, own_streams: bool = False, **options: Any) -> tuple[Stack, list[Block]]:
    """A stack and a list of the same layers."""

    def maker(rngs: sx.Rngs) -> Callable[[], Block]:
        return lambda: Block(rngs.fork() if own_streams else rngs, **options)

    first, second = (maker(sx.Rngs(params=0, dropout=1)) for _ in range(2))
    return Stack(first, length), [second() for _ in range(length)]


def in_turn(layers: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
    for layer in layers:
        x = layer(x, *args, **kwargs)
    return x


call = sx.jit(lambda layer, x: layer(x))
call_in_turn = sx.jit(in_turn)


half_negated_in_turn = sx.jit(lambda layers, x: in_turn(layers, x, 0.5, negate=True))


def half_negated(layer: Any, x: Any) -> Any:
    return layer(x, 0.5, negate=True)


def stacked(*parts: Any) -> Any:
    """Stacks arrays, by NumPy where they are no keys."""
    keys = jnp.issubdtype(parts[0].dtype, jax.dtypes.prng_key)
    return jnp.stack(parts) if keys else np.stack(parts)


def stacked_values(layers: list[Block]) -> dict[Any, Any]:
    """The values of the layers, stacked, by path; of what they share, once."""
    states = [sx.state(layer).flat() for layer in layers]
    shared = layers[0].dropout.stream is layers[-1].dropout.stream
    return {
        path: value
        if shared and "stream" in path
        else jax.tree.map(stacked, *(state[path] for state in states))
        for path, value in states[0].items()
    }


def assert_same_values(stack: Stack, layers: list[Block]) -> None:
    mine, theirs = sx.state(stack.stacked).flat(), stacked_values(layers)
    assert list(mine) == list(theirs)
    for path, value in mine.items():
        for one, other in zip(jax.tree.leaves(value), jax.tree.leaves(theirs[path]), strict=True):
            if jnp.issubdtype(one.dtype, jax.dtypes.prng_key):
                assert_equal_values(one, other)
            else:
                np.testing.assert_allclose(one, other, rtol=1e-6, err_msg=str(path))


# --- building -------------------------------------------------------------------------------------


@SHARED
def test_parameters_equal_those_of_single_layers(own_streams: bool) -> None:
    stack, layers = both(own_streams=own_streams)
    assert stack.stacked.linear.kernel.is_lazy
    assert_equal_values(
        sx.state(stack, sx.Param).to_pure_dict()["stacked"]["linear"]["kernel"],
        np.stack([layer.linear.kernel.value for layer in layers]),
    )
    assert_same_values(stack, layers)


def test_stacked_values_have_a_leading_layers_axis() -> None:
    stack, _ = both()
    kernel, mean = stack.stacked.linear.kernel, stack.stacked.mean
    assert (kernel.shape, kernel.axes) == ((4, 4, 4), ("layers", "in", "out"))
    assert (mean.axes, stack.stacked.calls.axes) == (("layers", "embed"), None)
    assert stack.shared[0] == ("dropout", "stream")
    assert (len(stack), stack.length, stack.axis_name) == (4, 4, "layers")


def test_parameters_and_views_are_lazy_when_built() -> None:
    rngs = sx.Rngs(params=0, dropout=1)
    stack = Stack(
        lambda: sx.nn.Sequential(sx.nn.MLP(8, 16, rngs=rngs), sx.nn.Dropout(0.5, rngs=rngs.fork())),
        3,
    )
    first, last = stack.stacked.layers
    assert [repr(each) for each in (first.up.kernel, stack[1].layers[0].up.kernel)] == [
        "Param(float32[3, 8, 16], lazy, axes=('layers', 'embed', 'mlp'))",
        "Param(float32[8, 16], lazy, axes=('embed', 'mlp'))",
    ]
    assert repr(last.stream.count) == "RngState(uint32[3], tag='dropout')"


def test_stack_of_one_layer_shares_given_rngs() -> None:
    rngs = sx.Rngs(params=0, dropout=1)
    stack = Stack(lambda: Block(rngs), 1)
    assert stack.stacked.dropout.stream is rngs.dropout
    assert stack.stacked.linear.kernel.shape == (1, 4, 4)
    twin = sx.Rngs(params=0, dropout=1)
    np.testing.assert_allclose(call(stack, X), call(Block(twin), X), rtol=1e-6)
    assert int(rngs.dropout.count) == int(twin.dropout.count) == 1


def test_layers_that_differ_are_refused_by_path() -> None:
    widths = iter([4, 4, 8])
    with pytest.raises(
        ModuleError, match=r"layers 0 and 2 differ at \.linear\.\w+: 4 \(int\) against 8 \(int\)"
    ):
        Stack(lambda: _Wide(next(widths)), 3)


class _Wide(sx.Module):
    def __init__(self, width: int) -> None:
        self.linear = sx.nn.Linear(width, 4, rngs=sx.Rngs(0))

    def __call__(self, x: Any) -> Any:
        return self.linear(x)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Stack(lambda: Block(sx.Rngs(0, dropout=1)), 0), "length"),
        (lambda: Stack(lambda: 3, 2), "Modules that can be called"),  # pyright: ignore[reportArgumentType]
        (lambda: Stack(lambda: sx.Module(), 2), "Modules that can be called"),
        (lambda: stack_layers([sx.nn.Sequential()] * 2), "one and the same"),
        (lambda: Stack(lambda: Block(sx.Rngs(0)), 2, remat="dots"), "dots_saveable"),
        (lambda: Stack(lambda: Block(sx.Rngs(0)), 2, unroll=0), "unroll"),
        (lambda: stack_layers([]), "at least one"),
    ],
)
def test_invalid_stacks_are_refused(make: Any, message: str) -> None:
    with pytest.raises(LayerConfigError, match=message):
        make()


# --- calling --------------------------------------------------------------------------------------


@SHARED
@pytest.mark.parametrize("wrap", [lambda f: f, sx.jit], ids=["eager", "jit"])
def test_call_equals_layers_in_turn_and_their_writes(own_streams: bool, wrap: Any) -> None:
    stack, layers = both(own_streams=own_streams)
    run = wrap(half_negated)
    for _ in range(2):
        np.testing.assert_allclose(run(stack, X), half_negated_in_turn(layers, X), rtol=1e-5)
        assert_same_values(stack, layers)
    assert stack.stacked.calls.value.tolist() == [2, 2, 2, 2]


@functools.cache
def trained_in_turn() -> tuple[list[Block], Any]:
    """Layers after a step, and the gradients of the step."""
    _, layers = both(own_streams=True)
    step = sx.jit(sx.grad(lambda layers: (in_turn(layers, X) ** 2).sum()))
    return layers, step(layers)


# JAX's loop unrolls what rematerializes its layers or not.
@pytest.mark.parametrize(
    ("remat", "unroll"), [(None, 1), (None, 2), ("full", 2), ("dots_saveable", 1)]
)
def test_gradients_equal_those_of_layers_in_turn(remat: Any, unroll: int) -> None:
    stack, _ = both(own_streams=True)
    layers, theirs = trained_in_turn()
    stack.remat, stack.unroll = remat, unroll
    mine = sx.jit(sx.grad(lambda stack: (stack(X) ** 2).sum()))(stack)
    for path, gradient in mine["stacked"].flat().items():
        parts = [theirs[i].flat()[path] for i in range(4)]
        np.testing.assert_allclose(gradient, np.stack(parts), rtol=1e-5, atol=1e-6)
    assert_same_values(stack, layers)


def count_of(primitive: str, jaxpr: Any) -> int:
    found = 0
    for equation in jaxpr.eqns:
        found += equation.primitive.name == primitive
        for parameter in jax.tree.leaves(list(equation.params.values())):
            inner = getattr(parameter, "jaxpr", parameter)
            found += count_of(primitive, inner) if hasattr(inner, "eqns") else 0
    return found


def test_remat_recomputes_and_programs_keep_their_size() -> None:
    def tanhs(length: int, remat: Any) -> int:
        stack, _ = both(length, rate=0.0)
        stack.remat = remat
        graphdef, state = sx.split(stack)
        loss = lambda state: (sx.merge(graphdef, state)(X) ** 2).sum()  # noqa: E731
        params = jax.tree.map(lambda leaf: leaf, state)
        jaxpr = jax.make_jaxpr(jax.grad(loss, allow_int=True))(params)
        return count_of("tanh", jaxpr.jaxpr)

    assert [tanhs(2, None), tanhs(2, "full"), tanhs(7, None), tanhs(7, "full")] == [1, 2, 1, 2]


@pytest.mark.parametrize("remat", [None, "full"])
def test_sown_values_are_stacked_call_by_call(remat: Any) -> None:
    stack, layers = both(sows=True)
    stack.remat = remat
    for _ in range(2):
        call(stack, X)
        call_in_turn(layers, X)
    assert_same_values(stack, layers)
    popped = sx.pop(stack, sx.Intermediate)["stacked"]["size"]
    assert [row.shape for row in popped] == [(4,), (4,)]


def test_modes_reach_all_layers() -> None:
    stack, layers = both()
    stack.eval()
    for layer in layers:
        layer.eval()
    assert stack[3].dropout.deterministic
    np.testing.assert_allclose(call(stack, X), call_in_turn(layers, X), rtol=1e-5)
    assert int(stack.stacked.dropout.stream.count) == 0


class Conditioned(sx.Module):
    """A layer that takes a Module, a tuple of arrays, a function, and None besides its input."""

    def __init__(self, rngs: sx.Rngs) -> None:
        self.linear = sx.nn.Linear(4, 4, rngs=rngs)

    def __call__(self, x: Any, other: Any, pair: Any, *, act: Any, mask: Any = None) -> Any:
        assert mask is None
        other.calls += 1
        return act(self.linear(x)) + other.linear(pair[0]) * pair[1]


def test_further_arguments_and_modules_are_given_whole() -> None:
    rngs, twin_rngs = sx.Rngs(0), sx.Rngs(0)
    stack = Stack(lambda: Conditioned(rngs), 3)
    layers = [Conditioned(twin_rngs) for _ in range(3)]
    other, twin = (Block(sx.Rngs(1)) for _ in range(2))
    rest = {"act": jax.nn.relu, "mask": None}
    mine = stack(X, other, (X, 2), **rest)
    np.testing.assert_allclose(mine, in_turn(layers, X, twin, (X, 2), **rest), rtol=1e-5)
    assert int(other.calls) == int(twin.calls) == 3
    with pytest.raises(ModuleError, match="neither an array nor hashable"):
        stack(X, other, (X, object.__new__(_Unhashable)), **rest)


class _Unhashable:
    __hash__ = None  # pyright: ignore[reportAssignmentType]


def test_layers_that_change_input_shapes_are_refused() -> None:
    stack = Stack(lambda: sx.nn.Linear(4, 5, rngs=sx.Rngs(0)), 2)
    with pytest.raises(TransformError, match=r"float32\[2,4\] to float32\[2,5\]"):
        stack(X)


def test_eager_calls_read_settings_and_compile_once(compilations: Any) -> None:
    settings = types.ModuleType("settings")

    class Scaled(sx.nn.Linear):
        def __call__(self, x: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
            return super().__call__(x) * settings.scale

    rngs = sx.Rngs(0)
    stack = Stack(lambda: Scaled(4, 4, rngs=rngs), 3)
    results = []
    for settings.scale in (1.0, 2.0):
        results.append(stack(X))
    np.testing.assert_allclose(results[1], 8 * results[0], rtol=1e-6)
    compilations()
    stack(X + 1)
    assert compilations() == 0


def test_stack_of_stacks_equals_layers_in_turn() -> None:
    rngs, twin_rngs = sx.Rngs(0), sx.Rngs(0)

    def inner(rngs: sx.Rngs) -> Stack:
        return Stack(lambda: Block(rngs, rate=0.0), 2, "inner")

    stack = Stack(lambda: inner(rngs), 3, "outer")
    layers = [Block(twin_rngs, rate=0.0) for _ in range(6)]
    kernel = stack.stacked.stacked.linear.kernel
    assert kernel.shape == (3, 2, 4, 4) and kernel.axes is not None
    assert kernel.axes[:2] == ("outer", "inner")
    np.testing.assert_allclose(call(stack, X), call_in_turn(layers, X), rtol=1e-5)
    np.testing.assert_array_equal(stack[2][1].linear.kernel.value, layers[5].linear.kernel.value)
    assert stack.stacked.stacked.calls.value.tolist() == [[1, 1]] * 3


def test_stacks_are_made_by_vmap_and_jit() -> None:
    def make(rngs: sx.Rngs) -> Stack:
        return Stack(lambda: sx.nn.Linear(4, 4, rngs=rngs), 3)

    inside, outside = sx.jit(make)(sx.Rngs(0)), make(sx.Rngs(0))
    np.testing.assert_array_equal(inside.stacked.kernel.value, outside.stacked.kernel.value)
    many = sx.vmap(make, axis_size=5)(sx.Rngs(0))
    assert many.stacked.kernel.shape == (5, 3, 4, 4)
    out = sx.jit(sx.vmap(lambda stack, x: stack(x), in_axes=(0, None)))(many, X)
    kernels, expected = np.asarray(many.stacked.kernel.value), np.stack([X] * 5)
    for layer in range(3):  # biases are zero
        expected = expected @ kernels[:, layer]
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-6)


# --- views ----------------------------------------------------------------------------------------


def test_layers_are_views_of_stacked_values() -> None:
    stack, layers = both(rate=0.0)
    np.testing.assert_allclose(in_turn(stack, X), call_in_turn(layers, X), rtol=1e-5)
    assert stack.stacked.calls.value.tolist() == [1, 1, 1, 1]
    stack[-1].linear.kernel[...] = np.zeros((4, 4), np.float32)
    assert stack[3] is stack[-1] and isinstance(stack[3], Block)
    assert not np.asarray(stack.stacked.linear.kernel.value)[3].any()
    assert [type(layer) for layer in stack[1:3]] == [Block, Block]
    assert stack[0].dropout.stream is stack.stacked.dropout.stream
    for outside in (4, -5):
        with pytest.raises(IndexError, match="4 layers"):
            stack[outside]


def test_new_shared_stream_is_shared() -> None:
    stack, _ = both()
    first = stack[0]
    stack.stacked.dropout.stream = sx.Rngs(dropout=7).dropout
    assert first.dropout.stream is stack.stacked.dropout.stream
    call(stack, X)
    assert int(stack.stacked.dropout.stream.count) == 4


# --- conversion -----------------------------------------------------------------------------------


@SHARED
def test_unstack_layers_is_the_inverse_of_stack_layers(own_streams: bool) -> None:
    stack, layers = both(own_streams=own_streams)
    apart = unstack_layers(stack)
    assert apart[0].linear.kernel.is_lazy
    for one, other in zip(apart, layers, strict=True):
        assert_same_model(one, other)
    again = stack_layers(apart, "layers")
    assert_same_model(again, stack)
    apart[0].linear.kernel[...] = np.zeros((4, 4), np.float32)
    assert np.asarray(stack[0].linear.kernel.value).any()


# --- the rest of the library ----------------------------------------------------------------------


def test_rules_create_lazy_stacked_values_in_shards(mesh: Mesh) -> None:
    rngs, rules = sx.Rngs(0), {"mlp": "model", "layers": "data", "embed": None}
    stack = Stack(lambda: sx.nn.MLP(8, 16, rngs=rngs), 2)
    specs = sx.partition_specs(stack, rules)
    assert specs["stacked"]["up"]["kernel"] == P("data", None, "model")
    sx.shard(stack, mesh, rules)
    kernel = stack.stacked.up.kernel
    assert kernel.sharding.spec == P("data", None, "model")
    rngs = sx.Rngs(0)
    plain = Stack(lambda: sx.nn.MLP(8, 16, rngs=rngs), 2)
    assert_equal_values(np.asarray(kernel.value), np.asarray(plain.stacked.up.kernel.value))


def test_layers_cannot_be_sharded_apart_from_others(mesh: Mesh) -> None:
    rngs, rules = sx.Rngs(0), {"mlp": "model"}
    stack = Stack(lambda: sx.nn.MLP(8, 16, rngs=rngs), 2)
    other = sx.Param(jnp.ones((8, 16)), axes=("embed", "mlp"))
    moves = [lambda tree: sx.shard(tree, mesh, rules), lambda tree: sx.unshard(tree)]
    for move in moves:
        for tree, place in ((stack[0], ()), ({"other": other, "first": stack[0]}, ("first",))):
            with pytest.raises(PartitionCheckError, match=r"shard\(stack, mesh, rules\)") as caught:
                move(tree)
            paths = [(*place, kernel, "kernel") for kernel in ("up", "down")]
            found = {finding.path for finding in caught.value.findings}
            assert found.issuperset(paths)
            assert {finding.code for finding in caught.value.findings} == {"layer-view"}
    assert stack.stacked.up.kernel.is_lazy
    assert len(other.sharding.device_set) == 1


def test_values_of_a_layer_can_be_constrained(mesh: Mesh) -> None:
    rngs, rules = sx.Rngs(0), {"mlp": "model"}
    stack = sx.shard(Stack(lambda: sx.nn.MLP(8, 16, rngs=rngs), 2), mesh, rules)
    assert sx.partition_specs(stack[1], rules)["up"]["kernel"] == P(None, "model")
    kernel = stack[1].up.kernel
    laid_out = sx.constrain(kernel, ("embed", "mlp"), mesh, {"embed": "data"})
    assert laid_out.sharding.is_equivalent_to(NamedSharding(mesh, P("data", None)), 2)
    assert_equal_values(np.asarray(laid_out), np.asarray(stack.stacked.up.kernel.value)[1])
    copy = sx.shard(sx.clone(stack[1]), mesh, {"embed": "data"})
    assert copy.up.kernel.sharding.spec == P("data", None)


def test_stages_run_over_auto_axes_only(auto_mesh: Mesh, explicit_mesh: Mesh) -> None:
    def make() -> Stack:
        return with_values(Stack(lambda: sx.nn.MLP(8, 16, rngs=sx.Rngs(0)), 4))

    def staged(mesh: Mesh) -> Stack:
        return sx.shard(make(), mesh, {"layers": "data", "mlp": "model"})

    x = np.linspace(-1, 1, 16, dtype=np.float32).reshape(2, 8)
    expected = call_in_turn(unstack_layers(make()), x)
    with jax.set_mesh(auto_mesh):
        np.testing.assert_allclose(call(staged(auto_mesh), x), expected, rtol=1e-4, atol=1e-6)
    with jax.set_mesh(explicit_mesh), pytest.raises(TransformError, match=r"\.kernel.*'data'"):
        call(staged(explicit_mesh), x)


def test_optimizer_trains_a_stack_like_its_layers() -> None:
    stack, layers = both(rate=0.0)

    def train(model: Any, call: Any) -> list[float]:
        optimizer = sx.train.Optimizer(model, optax.adam(0.1))

        @sx.jit
        def step(model: Any, optimizer: Any) -> Any:
            loss, gradients = sx.value_and_grad(lambda m: ((call(m, X) - 1) ** 2).mean())(model)
            optimizer.update(gradients)
            return loss

        return [float(step(model, optimizer)) for _ in range(3)]

    mine = train(stack, lambda stack, x: stack(x))
    theirs = train(sx.List(layers), in_turn)
    np.testing.assert_allclose(mine, theirs, rtol=1e-4)
    assert mine[-1] < mine[0]


# --- layers that hold named arrays ---


class NamedScale(sx.Module):
    """A layer whose parameters know their axes by themselves."""

    def __init__(self, form: str = "param") -> None:
        value = sx.named.ones({"foo": 4})
        forms = {"param": sx.Param, "tree": lambda x: sx.Param({"a": x}), "attribute": lambda x: x}
        self.w = forms[form](value)

    def __call__(self, x: Any) -> Any:
        return x * 2


@pytest.mark.parametrize("form", ["param", "tree", "attribute"])
@pytest.mark.parametrize("make", ["Stack", "stack_layers", "vmap"])
def test_stack_axis_names_leading_dimensions_of_named_arrays(
    form: str, make: str, mesh: Mesh
) -> None:
    name = {sx.partition.PARTITION_NAME: "stack"}
    model = {
        "Stack": lambda: Stack(lambda: NamedScale(form), 4, "stack"),
        "stack_layers": lambda: stack_layers([NamedScale(form) for _ in range(4)], "stack"),
        "vmap": lambda: sx.vmap(lambda _: NamedScale(form), metadata=name)(jnp.arange(4)),
    }[make]()
    rules = {"stack": "data", "foo": "model"}
    (spec,) = jax.tree.leaves(sx.partition_specs(model, rules=rules))
    assert spec == jax.sharding.PartitionSpec("data", "model")
    sx.shard(model, mesh, rules)
    assert [x.sharding.spec for x in jax.tree.leaves(sx.state(model))] == [spec]
    codes = {diagnostic.code for diagnostic in sx.check(model, mesh, rules=rules)}
    assert codes <= {"gathered-stack"}  # a stack that runs without microbatches


def test_unstack_layers_restores_layers_of_named_arrays() -> None:
    nested = Stack(lambda: Stack(NamedScale, 2, "inner"), 3, "outer")
    (spec,) = jax.tree.leaves(sx.partition_specs(nested, {"outer": "a", "inner": "b", "foo": "c"}))
    assert spec == jax.sharding.PartitionSpec("a", "b", "c")
    assert nested(np.ones((), np.float32)) == 64
    for inner in unstack_layers(nested):
        for layer in unstack_layers(inner):
            assert sx.split(layer)[0] == sx.split(NamedScale())[0]


@pytest.mark.parametrize("form", ["param", "tree"])
def test_optimizer_state_follows_named_arrays(form: str) -> None:
    rules = {"layers": "data", "foo": "model"}
    for model in (NamedScale(form), Stack(lambda: NamedScale(form), 4)):
        specs = sx.partition_specs(sx.train.Optimizer(model, optax.adam(1e-3)), rules=rules)
        (own,) = jax.tree.leaves(sx.partition_specs(model, rules=rules))
        moments = {path[1:3]: s for path, s in specs.flat().items() if path[0] == "opt_state"}
        assert moments == {(0, "count"): P(), (0, "mu"): own, (0, "nu"): own}


def test_named_constraint_lays_out_leading_dimensions(auto_mesh: Mesh) -> None:
    stack = Stack(NamedScale, 4)
    sx.named.constrain(stack, {"layers": "data", "foo": "model"}, auto_mesh)
    (array,) = jax.tree.leaves(sx.state(stack))
    assert array.sharding.spec == P("data", "model")
