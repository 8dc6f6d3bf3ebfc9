# SPDX-License-Identifier: Apache-2.0
"""Recurrent cells, RNN and Bidirectional against Flax: results, gradients, masks, meshes."""

from __future__ import annotations

import functools
from typing import Any

import flax.linen as linen
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import shardax as sx
from shardax.errors import LayerConfigError, LayerInputError
from tests.advice import run_advice
from tests.values import with_values

INPUTS, FEATURES, BATCH, TIME = 3, 4, 4, 6
# Our class, the peer's, the letters of its gates in our order.
CELLS: dict[str, tuple[Any, Any, str]] = {
    "simple": (sx.nn.SimpleCell, linen.SimpleCell, ""),
    "lstm": (sx.nn.LSTMCell, linen.LSTMCell, "ifgo"),
    "gru": (sx.nn.GRUCell, linen.GRUCell, "rzn"),
}
LENGTHS = np.array([6, 3, 1, 5])
REAL = np.arange(TIME)[None] < LENGTHS[:, None]
MASK = np.array([list(map(int, row)) for row in ("111111", "111100", "001111", "101101")], bool)


def floats(*shape: int, seed: int = 3) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def close(found: Any, expected: Any, tolerance: float = 2e-6) -> None:
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=tolerance, atol=tolerance)


def make(name: str, seed: int = 0, **options: Any) -> Any:
    """A cell with biases that are not zero, as far as the peer has them."""
    cell = with_values(CELLS[name][0](INPUTS, FEATURES, rngs=sx.Rngs(seed), **options), seed)
    cell.input.bias.value = floats(*cell.input.bias.shape, seed=seed)
    if cell.recurrent.bias is not None:
        only_new = np.zeros((3, FEATURES), np.float32)
        only_new[2] = floats(FEATURES, seed=seed + 1)
        cell.recurrent.bias.value = only_new
    return cell


def peer_params(name: str, cell: Any) -> Any:
    """The parameters of a cell as those of Flax's."""
    given, kernel, bias = (cell.input.kernel[...], cell.recurrent.kernel[...], cell.input.bias[...])
    if name == "simple":
        return {"i": {"kernel": given[:, 0], "bias": bias[0]}, "h": {"kernel": kernel[:, 0]}}
    params = {}
    for index, gate in enumerate(CELLS[name][2]):
        params["i" + gate] = {"kernel": given[:, index]}
        params["h" + gate] = {"kernel": kernel[:, index]}
        # Flax's LSTM has its biases with the products of the carry.
        params[("h" if name == "lstm" else "i") + gate]["bias"] = bias[index]
    if name == "gru":
        params["hn"]["bias"] = cell.recurrent.bias[2]
    return params


def peer_carry(name: str, carry: Any) -> Any:
    return (carry[1], carry[0]) if name == "lstm" else carry


@sx.jit
def run(rnn: Any, x: Any, carry: Any = None, mask: Any = None) -> Any:
    given = {} if carry is None else {"carry": carry}
    return rnn(x, **given, mask=mask, return_carry=True)


@pytest.mark.parametrize("name", CELLS)
@pytest.mark.parametrize("reverse", [False, True])
def test_results_and_gradients_equal_flax(name: str, reverse: bool) -> None:
    cell, x = make(name), floats(BATCH, TIME, INPUTS)
    rnn, weights = sx.nn.RNN(cell, reverse=reverse), floats(BATCH, TIME, FEATURES, seed=5)
    peer: Any = linen.RNN(
        CELLS[name][1](FEATURES), reverse=reverse, keep_order=True, return_carry=True
    )

    def peer_loss(params: Any, x: Any) -> Any:
        carry, y = peer.apply({"params": {"cell": params}}, x, seq_lengths=LENGTHS)
        y *= REAL[..., None]  # the peer's other steps are not defined
        loss = (y * weights).sum() + sum(map(jnp.sum, jax.tree.leaves(carry)))
        return loss, (carry, y)

    params = peer_params(name, cell)
    graded_peer = jax.jit(jax.value_and_grad(peer_loss, (0, 1), has_aux=True))
    (_, (carry, y)), gradients = graded_peer(params, x)

    def loss(rnn: Any, x: Any) -> Any:
        carry, y = rnn(x, mask=REAL, return_carry=True)
        return (y * weights).sum() + sum(map(jnp.sum, jax.tree.leaves(carry))), (carry, y)

    graded = sx.jit(sx.value_and_grad(loss, argnums=(0, 1), has_aux=True))
    (_, (our_carry, our_y)), (ours, of_x) = graded(rnn, x)
    close((peer_carry(name, our_carry), our_y), (carry, y))
    close(of_x, gradients[1], 2e-5)
    grads = sx.clone(cell)
    sx.update(grads, ours["cell"])
    found = peer_params(name, grads)
    close(found, gradients[0], 2e-5)


@pytest.mark.parametrize("name", CELLS)
def test_bidirectional_equals_flax_in_both_directions(name: str) -> None:
    cells = make(name), make(name, seed=7)
    x = floats(BATCH, TIME, INPUTS)
    rnns = [linen.RNN(CELLS[name][1](FEATURES)) for _ in cells]
    params = {
        f"{way}_rnn": {"cell": peer_params(name, cell)}
        for way, cell in zip(("forward", "backward"), cells, strict=True)
    }

    class Both(linen.Module):
        def setup(self) -> None:
            self.forward_rnn, self.backward_rnn = rnns
            self.both = linen.Bidirectional(self.forward_rnn, self.backward_rnn)

        def __call__(self, x: Any) -> Any:
            return self.both(x, seq_lengths=LENGTHS)

    both: Any = Both()
    expected = np.asarray(jax.jit(both.apply)({"params": params}, x)) * REAL[..., None]
    found = sx.jit(lambda both, x: both(x, mask=REAL))(sx.nn.Bidirectional(*cells), x)
    close(found, expected)
    added = sx.nn.Bidirectional(
        sx.nn.RNN(cells[0]), sx.nn.RNN(cells[1], reverse=True), merge=jnp.add
    )
    (_, back), y = run(added, x, mask=REAL)
    close(y, expected[..., :FEATURES] + expected[..., FEATURES:])
    hidden = back[0] if name == "lstm" else back
    close(hidden, expected[:, 0, FEATURES:])  # it ends at the first step


@pytest.mark.parametrize(
    ("name", "reverse"), [("simple", False), ("lstm", False), ("lstm", True), ("gru", True)]
)
def test_masked_steps_do_not_exist(name: str, reverse: bool) -> None:
    rnn, x = sx.nn.RNN(make(name), reverse=reverse), floats(BATCH, TIME, INPUTS)
    poison = np.where(MASK[..., None], x, np.nan)
    carry, y = jax.tree.map(np.asarray, run(rnn, poison, mask=MASK))
    shorter = x[1:][MASK[1:]].reshape(3, 4, INPUTS)  # the other rows without what is masked
    for rows, given in ((slice(1), x[:1]), (slice(1, BATCH), shorter)):
        alone, kept = run(rnn, given)
        expected = np.zeros((len(given), TIME, FEATURES), np.float32)
        expected[MASK[rows]] = np.asarray(kept).reshape(-1, FEATURES)
        close(y[rows], expected)
        close(jax.tree.map(lambda leaf, rows=rows: leaf[rows], carry), alone)


@pytest.mark.parametrize("name", CELLS)
def test_sequence_in_two_parts_equals_the_whole(name: str) -> None:
    rnn, x = sx.nn.RNN(make(name)), floats(TIME, INPUTS)
    carry, first = run(rnn, x[:3])
    carry, second = run(rnn, x[3:], carry)
    close((carry, np.concatenate([first, second])), jax.tree.map(np.asarray, run(rnn, x)))
    one_step = sx.jit(lambda cell, carry, x: cell(carry, x))
    step = rnn.cell.initial_carry(x[0])
    for row in x:
        step, _ = one_step(rnn.cell, step, row)
    close(step, carry)


def test_input_products_are_one_product_outside_the_loop() -> None:
    rnn = sx.nn.RNN(make("lstm"))
    (loop,) = [
        eqn
        for eqn in sx.make_jaxpr(lambda x: rnn(x))(floats(BATCH, TIME, INPUTS)).eqns
        if eqn.primitive.name == "scan"
    ]
    assert str(loop.params["jaxpr"]).count("dot_general") == 1


class Noisy(sx.Module):
    """A cell of a user: another carry, dropout, and a count of its steps."""

    def __init__(self, rngs: sx.Rngs) -> None:
        self.linear = sx.nn.Linear(INPUTS, FEATURES, rngs=rngs)
        self.dropout = sx.nn.Dropout(0.5, rngs=rngs)
        self.steps = sx.Variable(np.int32(0))

    def initial_carry(self, x: Any) -> Any:
        return {"sum": jnp.zeros((*x.shape[:-1], FEATURES))}

    def __call__(self, carry: Any, x: Any) -> Any:
        self.steps += 1
        total = carry["sum"] + self.dropout(self.linear(x))
        return {"sum": total}, {"half": total / 2}


def test_custom_cell_keeps_state_and_draws_each_step() -> None:
    rnn = sx.nn.RNN(with_values(Noisy(sx.Rngs(0))))
    x = np.ones((TIME, INPUTS), np.float32)
    carry, y = run(rnn, x)
    assert (int(rnn.cell.steps), y["half"].shape) == (TIME, (TIME, FEATURES))
    close(np.asarray(carry["sum"]), 2 * np.asarray(y["half"])[-1])
    added = np.diff(np.asarray(y["half"]), axis=0)
    assert len(np.unique(added != 0, axis=0)) > 1
    rnn.eval()
    linear = rnn.cell.linear
    step = np.asarray(x[0] @ np.asarray(linear.kernel.value) + np.asarray(linear.bias.value))
    close(run(rnn, x)[1]["half"], np.arange(1, TIME + 1)[:, None] * step / 2, 1e-5)


def run_both(both: Any, x: Any, mask: Any) -> Any:
    start = tuple(rnn.cell.initial_carry(x[:, 0]) for rnn in (both.forward, both.backward))

    def loss(both: Any, x: Any) -> Any:
        y = both(x, mask=mask)
        return (y**2).sum(), (y, both(x, start, mask=MASK), both(x))

    (_, y), grads = sx.value_and_grad(loss, has_aux=True)(both, x)
    return y, jax.tree.leaves(grads)


def make_both(name: str) -> Any:
    return sx.nn.Bidirectional(make(name), make(name, seed=1))


@functools.cache
def on_one_device(name: str) -> Any:
    return sx.jit(run_both)(make_both(name), floats(BATCH, TIME, INPUTS), MASK)


# Every cell over both kinds of axes, and split both ways; each kind split both ways.
@pytest.mark.parametrize(
    ("name", "split", "kind", "compiled"),
    [
        ("simple", "out", AxisType.Auto, True),
        ("simple", "hidden", AxisType.Explicit, True),
        ("gru", "out", AxisType.Explicit, True),
        ("lstm", "hidden", AxisType.Explicit, True),
        ("lstm", "hidden", AxisType.Auto, False),
    ],
)
def test_results_on_a_mesh_equal_one_device(
    name: str, split: str, kind: Any, compiled: bool
) -> None:
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(kind, kind))
    x, expected = floats(BATCH, TIME, INPUTS), on_one_device(name)
    both = make_both(name)
    cell = both.forward.cell
    sx.shard(both, mesh, [(split, "model")])
    kernel = cell.recurrent.kernel
    assert kernel.value.sharding.spec == PartitionSpec(
        *("model" if axis == split else None for axis in kernel.axes)
    )
    placed = jax.device_put(x, NamedSharding(mesh, PartitionSpec("data")))
    mask = jax.device_put(MASK, NamedSharding(mesh, PartitionSpec("data", None)))
    with jax.set_mesh(mesh):
        close((sx.jit(run_both) if compiled else run_both)(both, placed, mask), expected, 2e-5)


def test_split_time_over_explicit_axes_becomes_whole() -> None:
    mesh = jax.make_mesh((2, 2), ("data", "seq"), axis_types=(AxisType.Explicit,) * 2)
    rnn, x = sx.nn.RNN(make("lstm")), floats(BATCH, TIME, INPUTS)
    placed = jax.device_put(x, NamedSharding(mesh, PartitionSpec("data", "seq")))
    _, found = run(rnn, placed)
    assert found.sharding.spec == PartitionSpec("data", None, None)
    close(found, run(rnn, x)[1])


def test_stacked_rnns_equal_single_ones_and_keep_dtypes() -> None:
    rngs = sx.Rngs(0)

    def make_rnn() -> Any:
        return sx.nn.RNN(sx.nn.GRUCell(FEATURES, FEATURES, dtype=jnp.bfloat16, rngs=rngs))

    stack = with_values(sx.nn.Stack(make_rnn, 3))
    x = floats(BATCH, TIME, FEATURES).astype(jnp.bfloat16)
    call = sx.jit(lambda layer, x: layer(x))
    y, expected = call(stack, x), x
    for rnn in sx.nn.unstack_layers(stack):
        expected = call(rnn, expected)
    assert (y.dtype, stack.stacked.cell.input.kernel.dtype) == (jnp.bfloat16, jnp.float32)
    np.testing.assert_array_equal(y, expected)


def test_recurrent_kernels_start_orthogonal_for_each_gate() -> None:
    cell = sx.nn.LSTMCell(INPUTS, FEATURES, rngs=sx.Rngs(0))
    kernel = np.asarray(cell.recurrent.kernel.value)
    for gate in range(4):
        close(kernel[:, gate].T @ kernel[:, gate], np.eye(FEATURES), 2e-6)
    assert not np.allclose(kernel[:, 0], kernel[:, 1])


def test_unsuitable_cells_and_inputs_are_refused() -> None:
    rnn = sx.nn.RNN(make("gru"))
    linear = sx.nn.Linear(2, 2, rngs=sx.Rngs(0))
    with pytest.raises(LayerConfigError, match=r"RNN runs a cell.*Linear does not say") as caught:
        sx.nn.RNN(linear)
    code = "def initial_carry(self, x):\n    return jnp.zeros((*x.shape[:-1], features), x.dtype)\n"
    names = {"jnp": jnp, "features": 2}
    run_advice(caught.value, code, names)
    step = lambda self, carry, x: (carry + linear(x), carry)  # noqa: E731
    methods = {"initial_carry": names["initial_carry"], "__call__": step}
    cell = type("Sum", (sx.Module,), methods)()
    assert sx.nn.RNN(cell)(jnp.ones((1, 4, 2))).shape == (1, 4, 2)
    with pytest.raises(LayerConfigError, match="RNN runs a cell") as caught:
        sx.nn.RNN(sx.nn.GRUCell)
    code = "sx.nn.RNN(sx.nn.LSTMCell(in_features, features, rngs=rngs))"
    names = {"sx": sx, "in_features": 2, "features": 3, "rngs": sx.Rngs(0)}
    assert run_advice(caught.value, code, names)(jnp.ones((1, 4, 2))).shape == (1, 4, 3)
    with pytest.raises(LayerConfigError, match="features"):
        sx.nn.LSTMCell(2, 0, rngs=sx.Rngs(0))
    with pytest.raises(LayerConfigError, match="reverse=False"):
        sx.nn.Bidirectional(rnn, rnn)
    with pytest.raises(LayerConfigError, match="reverse=True"):
        sx.nn.Bidirectional(sx.nn.RNN(make("gru"), reverse=True), make("gru"))
    for wrong in (floats(TIME), floats(2, 0, INPUTS), floats(BATCH, TIME, 5)):
        with pytest.raises(LayerInputError, match=r"RNN|GRUCell\(in_features=3\)"):
            rnn(wrong)
    x = floats(BATCH, TIME, INPUTS)
    for mask in (MASK[:2], MASK.astype(np.float32), MASK[0]):
        with pytest.raises(LayerInputError, match="mask of booleans"):
            rnn(x, mask=mask)
    with pytest.raises(LayerInputError, match="a carry of"):
        rnn(x, np.zeros((BATCH, FEATURES + 1), np.float32))
    with pytest.raises(LayerInputError, match="a carry of"):
        rnn(x, (np.zeros((BATCH, FEATURES), np.float32),) * 2)
