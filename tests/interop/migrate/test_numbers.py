# SPDX-License-Identifier: Apache-2.0
"""Translated programs compute what the originals compute, with equal parameters."""

from __future__ import annotations

import textwrap
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import shardax as sx
from tests.interop.migrate.translation import translate

X = np.random.default_rng(0).normal(size=(2, 4, 4, 4)).astype(np.float32)


def programs(text: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Runs a program and its translation; returns the names that they define."""
    text = textwrap.dedent(text)
    result = translate(text)
    assert result.left == 0
    spaces: tuple[dict[str, Any], dict[str, Any]] = ({"__name__": "a"}, {"__name__": "b"})
    for code, space in zip((text, result.text), spaces, strict=True):
        exec(compile(code, "program", "exec"), space)
    return spaces


def copy_parameters(theirs: Any, ours: Any) -> None:
    sx.update(ours, nnx.to_pure_dict(nnx.state(theirs, nnx.Param)))


def assert_equal(theirs: Any, ours: Any) -> None:
    assert theirs.shape == ours.shape and theirs.dtype == ours.dtype
    np.testing.assert_allclose(theirs, ours, rtol=1e-5, atol=1e-5)


def compiled(layer: Any, *args: Any, **options: Any) -> Any:
    """The result of a call as one program, instead of one for each of its operations."""
    if not isinstance(layer, nnx.Module | sx.Module):
        return jax.jit(lambda *args: layer(*args, **options))(*args)
    lib = sx if isinstance(layer, sx.Module) else nnx
    return lib.jit(lambda layer, *args: layer(*args, **options))(layer, *args)


LAYERS = [
    "nnx.Linear(4, 3, rngs=rngs)",
    "nnx.Linear(4, 3, use_bias=False, param_dtype=jnp.bfloat16, rngs=rngs)",
    "nnx.LinearGeneral(4, (2, 3), rngs=rngs)",
    "nnx.LinearGeneral((4, 4), 3, axis=(-2, -1), rngs=rngs)",
    "nnx.Einsum('...c,cd->...d', (4, 3), (3,), rngs=rngs)",
    "nnx.LayerNorm(4, rngs=rngs)",
    "nnx.RMSNorm(4, epsilon=1e-3, rngs=rngs)",
    "nnx.GroupNorm(4, 2, rngs=rngs)",
    "nnx.InstanceNorm(4, rngs=rngs)",
    "nnx.BatchNorm(4, rngs=rngs)",
    "nnx.BatchNorm(4, use_running_average=True, rngs=rngs)",
    "nnx.Conv(4, 6, (3, 3), 2, rngs=rngs)",
    "nnx.Conv(4, 4, (3, 3), feature_group_count=2, kernel_dilation=2, rngs=rngs)",
    "nnx.Conv(4, 4, (2, 2), padding='CIRCULAR', rngs=rngs)",
    "nnx.ConvTranspose(4, 3, (3, 3), strides=2, rngs=rngs)",
    "nnx.Conv(4, 3, (3, 3), strides=None, rngs=rngs)",
    "nnx.ConvTranspose(4, 3, (3, 3), strides=None, kernel_dilation=None, rngs=rngs)",
    "nnx.ConvTranspose(4, 3, (2, 2), (3, 3), padding='VALID', rngs=rngs)",
    "nnx.Sequential(nnx.Linear(4, 3, rngs=rngs), nnx.gelu, nnx.Dropout(0.0))",
    "nnx.Dropout(0.5, deterministic=True, rngs=rngs)",
    "nnx.Conv(4, 4, (2, 2), mask=np.tri(16, 4, dtype=bool).reshape(2, 2, 4, 4), rngs=rngs)",
    "nnx.ConvTranspose(4, 4, (3, 3), padding='CIRCULAR', rngs=rngs)",
    "nnx.PReLU(0.2)",
    "functools.partial(nnx.max_pool, window_shape=(2, 2), strides=None)",
    "functools.partial(nnx.avg_pool, window_shape=(2, 2), strides=(2, 2), padding='SAME')",
]


@pytest.mark.parametrize("code", LAYERS)
def test_layer_computes_the_same(code: str) -> None:
    a, b = programs(f"""
        import functools
        import jax.numpy as jnp
        import numpy as np
        from flax import nnx
        def make(rngs):
            return {code}
        """)
    theirs, ours = a["make"](nnx.Rngs(0)), b["make"](sx.Rngs(0))
    if isinstance(theirs, nnx.Module):
        copy_parameters(theirs, ours)
    assert_equal(compiled(theirs, X), compiled(ours, X))


def test_attention_computes_the_same() -> None:
    a, b = programs("""
        from flax import nnx
        def make(rngs):
            return nnx.MultiHeadAttention(
                2, 4, qkv_features=4, out_features=6, decode=False, rngs=rngs)
        """)
    theirs, ours = a["make"](nnx.Rngs(0)), b["make"](sx.Rngs(0))
    values = nnx.to_pure_dict(nnx.state(theirs, nnx.Param))
    short = {"query": "q", "key": "k", "value": "v", "out": "out"}
    sx.update(ours, {short[name]: value for name, value in values.items()})
    x, mask = X[0], jnp.tril(jnp.ones((4, 4), bool))[None, None]
    for inputs, options in (((x,), {"mask": mask}), ((x, 2 * x), {})):
        assert_equal(*(compiled(layer, *inputs, **options) for layer in (theirs, ours)))


def test_masks_and_their_attention_compute_the_same() -> None:
    a, b = programs("""
        from flax import nnx
        def attend(x, real):
            masks = nnx.make_causal_mask(real), nnx.make_attention_mask(real, real)
            mask = nnx.combine_masks(*masks)
            return nnx.dot_product_attention(x, 2 * x, x, mask=mask)
        def causal(x):
            return nnx.dot_product_attention(x, x, x, is_causal=True, deterministic=True)
        """)
    real = jnp.array([[True, True, True, False], [True] * 4])
    assert_equal(jax.jit(a["attend"])(X, real), jax.jit(b["attend"])(X, real))
    assert_equal(jax.jit(a["causal"])(X), jax.jit(b["causal"])(X))


def test_walks_and_streams_compute_the_same() -> None:
    a, b = programs("""
        import jax.numpy as jnp
        from flax import nnx
        def run(model, x):
            half = nnx.map(lambda path, v: v.astype(jnp.bfloat16), model)
            error, y = nnx.checkify(lambda model, x: model(x).sum())(half, x)
            with nnx.fork_rngs(model):
                z = model(x)
            return error.get() is None, y, z
        def make(rngs):
            return nnx.Linear(4, 3, rngs=rngs)
        """)
    theirs, ours = a["make"](nnx.Rngs(0)), b["make"](sx.Rngs(0))
    copy_parameters(theirs, ours)
    first, second = a["run"](theirs, X), b["run"](ours, X)
    assert first[0] is second[0] is True
    assert_equal(first[1], second[1])
    assert_equal(first[2], second[2])


def test_recurrent_network_computes_the_same() -> None:
    a, b = programs("""
        from flax import nnx
        def make(rngs):
            return nnx.RNN(nnx.LSTMCell(4, 3, rngs=rngs))
        """)
    theirs, ours = a["make"](nnx.Rngs(0)), b["make"](sx.Rngs(0))
    cell = nnx.to_pure_dict(nnx.state(theirs, nnx.Param))["cell"]
    bias = jnp.arange(3.0)
    for gate in "ifgo":
        cell[f"h{gate}"]["bias"] = bias
    nnx.update(theirs, {"cell": cell})
    ours(X[0])  # the order of its gates is that of the parameters
    named_gates = gates_of(ours.cell)
    kernel = jnp.stack([cell["if_" if g == "f" else f"i{g}"]["kernel"] for g in named_gates], 1)
    recurrent = jnp.stack([cell[f"h{g}"]["kernel"] for g in named_gates], 1)
    biases = jnp.stack([bias] * 4)
    sx.update(
        ours,
        {"cell": {"input": {"kernel": kernel, "bias": biases}, "recurrent": {"kernel": recurrent}}},
    )
    assert_equal(compiled(theirs, X[0]), compiled(ours, X[0]))


def gates_of(cell: Any) -> str:
    """The gates of an LSTM cell in the order of its kernel, found by what each changes."""
    start = cell.initial_carry(jnp.zeros((1, 4)))
    carry = jax.tree.map(lambda x: x + 0.5, start)
    zeros = {path: jnp.zeros_like(value) for path, value in sx.state(cell, sx.Param).flat().items()}
    names: dict[int, str] = {}
    for gate in range(4):
        probe = {**zeros, ("input", "bias"): zeros["input", "bias"].at[gate].set(1.0)}
        sx.update(cell, sx.State.from_flat(probe))
        (hidden, memory), _ = cell(carry, jnp.zeros((1, 4)))
        sigmoid, tanh = jax.nn.sigmoid, jnp.tanh
        expected = {"f": 0.5 * sigmoid(1.0), "g": 0.25 + 0.5 * tanh(1.0), "o": 0.25, "i": 0.25}
        for name, value in expected.items():
            if name in "fg" and np.allclose(memory, value):
                names[gate] = name
        if gate not in names:
            names[gate] = "o" if np.allclose(hidden, sigmoid(1.0) * tanh(0.25)) else "i"
    return "".join(names[gate] for gate in range(4))


TRAINING = """
    import jax
    import jax.numpy as jnp
    import optax
    from flax import nnx

    class Count(nnx.Variable):
        pass

    class Net(nnx.Module):
        def __init__(self, *, rngs: nnx.Rngs):
            self.layers = nnx.List([nnx.Linear(4, 4, rngs=rngs) for _ in range(2)])
            self.norm = nnx.BatchNorm(num_features=4, momentum=0.9, rngs=rngs)
            self.dropout = nnx.Dropout(rate=0.0, rngs=rngs)
            self.scale = nnx.Param(jnp.ones((1, 4)))
            self.calls = Count(jnp.array(0))

        def __call__(self, x):
            self.calls[...] += 1
            for layer in self.layers:
                x = nnx.relu(layer(x))
            self.sow(nnx.Intermediate, "h", x)
            return self.dropout(self.norm(x)) * self.scale.value

    def loss_fn(model, x):
        y = model(x)
        return jnp.mean((y - 1) ** 2), y

    @nnx.jit
    def train_step(model, optimizer: nnx.Optimizer, metrics: nnx.MultiMetric, x):
        (loss, y), grads = nnx.value_and_grad(loss_fn, has_aux=True)(model, x)
        nnx.pop(model, nnx.Intermediate)
        metrics.update(loss=loss, logits=y, labels=jnp.zeros(y.shape[0], int))
        optimizer.update(model, grads)
        return loss

    def train(model: Net, x):
        optimizer = nnx.Optimizer(model, optax.sgd(0.1, 0.9), wrt=nnx.Param)
        metrics = nnx.MultiMetric(loss=nnx.metrics.Average("loss"), accuracy=nnx.metrics.Accuracy())
        model.train()
        losses = [train_step(model, optimizer, metrics, x) for _ in range(3)]
        model.eval()
        return losses, metrics.compute(), model(x), model.norm.mean.get_value(), model.calls.value
    """


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of Flax: sow, .value
def test_training_computes_the_same() -> None:
    a, b = programs(TRAINING)
    theirs, ours = a["Net"](rngs=nnx.Rngs(0)), b["Net"](rngs=sx.Rngs(0))
    copy_parameters(theirs, ours)
    x = X.reshape(-1, 4)
    first, second = a["train"](theirs, x), b["train"](ours, x)
    for one, two in zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True):
        np.testing.assert_allclose(one, two, rtol=1e-4, atol=1e-4)


def test_loops_and_batches_compute_the_same() -> None:
    a, b = programs("""
        import jax
        import jax.numpy as jnp
        from flax import nnx

        @nnx.split_rngs(splits=3)
        @nnx.vmap
        def make(rngs: nnx.Rngs):
            return nnx.Linear(4, 4, rngs=rngs)

        def run(layers, x):
            @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
            def forward(x, layer):
                return nnx.remat(lambda layer, x: nnx.tanh(layer(x)))(layer, x)

            each = nnx.vmap(lambda layer, x: layer(x), in_axes=(0, None))
            start = nnx.cond(x.sum() > 0, lambda x: x, lambda x: -x, x)
            return forward(start, layers), each(layers, x)
        """)
    theirs, ours = a["make"](nnx.Rngs(0)), b["make"](sx.Rngs(0))
    copy_parameters(theirs, ours)
    for one, two in zip(a["run"](theirs, X[0, 0]), b["run"](ours, X[0, 0]), strict=True):
        assert_equal(one, two)


def test_function_of_arrays_is_compiled_the_same() -> None:
    import equinox as eqx

    _, b = programs("""
        import equinox as eqx
        @eqx.filter_jit
        def scaled(tree, how):
            return {name: value * 2 if how == "twice" else value for name, value in tree.items()}
        """)
    theirs = eqx.filter_jit(lambda tree, how: {"x": tree["x"] * 2})
    assert_equal(theirs({"x": X}, "twice")["x"], b["scaled"]({"x": X}, "twice")["x"])


def test_accuracy_at_its_threshold_computes_the_same() -> None:
    a, b = programs("""
        import jax.numpy as jnp
        from flax import nnx
        def measure(logits, labels):
            accuracy = nnx.metrics.Accuracy(threshold=0.5)
            accuracy.update(logits=logits, labels=labels)
            return accuracy.compute()
        """)
    logits, labels = jnp.array([0.2, 0.5, 0.5, 0.9]), jnp.array([0, 1, 0, 1])
    assert float(a["measure"](logits, labels)) == float(b["measure"](logits, labels)) == 0.75


def test_states_split_and_copied_compute_the_same() -> None:
    a, b = programs("""
        from flax import nnx
        def make(rngs):
            return nnx.Sequential(nnx.Linear(4, 4, rngs=rngs), nnx.BatchNorm(4, rngs=rngs))
        def run(model, x):
            graph, state = nnx.split(model)
            params, others = nnx.split_state(state, nnx.Param, ...)
            copy = nnx.merge(graph, params, others, copy=True)
            copy(x)
            return copy.layers[1].mean[...], model.layers[1].mean[...]
        """)
    theirs, ours = a["make"](nnx.Rngs(0)), b["make"](sx.Rngs(0))
    copy_parameters(theirs, ours)
    for one, two in zip(a["run"](theirs, X[0, 0]), b["run"](ours, X[0, 0]), strict=True):
        assert_equal(one, two)
