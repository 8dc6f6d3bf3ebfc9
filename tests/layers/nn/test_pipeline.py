# SPDX-License-Identifier: Apache-2.0
"""Stacks that run as pipelines: results, state, gradients, collectives, and what is refused."""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import shardax as sx
from shardax._parallel.pipeline import _moves, bubble_share
from shardax.errors import ModuleError, PartitionError
from shardax.hlo import read_program
from tests.values import with_values

RULES = {"layers": "stage", "batch": "data", "embed": None, "mlp": "model", "seen": None}
KINDS = [AxisType.Auto, AxisType.Explicit]


def make_mesh(sizes: dict[str, int], kind: AxisType) -> Mesh:
    """Returns a mesh over as many devices as it needs."""
    count = int(np.prod(list(sizes.values())))
    kinds = (kind,) * len(sizes)
    devices = jax.devices()[:count]
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=kinds, devices=devices)


class Block(sx.Module):
    """Draws, counts, keeps statistics, and sows rows, merged rows and a number."""

    def __init__(self, rngs: sx.Rngs) -> None:
        # No norm and no gate: each layer of it is in every program below, several times.
        self.mlp = sx.nn.MLP(8, 16, gated=False, rngs=rngs)
        self.dropout = sx.nn.Dropout(0.3, rngs=rngs)
        self.calls = sx.Variable(np.zeros((), np.int32))
        self.mean = sx.BatchStat(np.zeros(8, np.float32))

    def __call__(self, x: jax.Array, mask: jax.Array | None = None, scale: float = 1.0) -> Any:
        """Adds the perceptron's result where the mask is."""
        y = scale * self.mlp(x)
        self.calls[...] += 1
        self.mean[...] = 0.9 * self.mean + 0.1 * jnp.mean(y, axis=(0, 1))
        y = y if mask is None else jnp.where(mask[..., None], y, 0)
        self.sow("rows", y)
        self.sow("tokens", y.reshape(-1, 8))
        self.sow("size", jnp.mean(y**2))
        return x + self.dropout(y)


def make_stack(
    microbatches: int | None,
    own_streams: bool = False,
    remat: Any = None,
    length: int = 6,
    schedule: str | None = None,
) -> Any:
    """Returns blocks with one stream together, or one each."""
    rngs = sx.Rngs(params=0, dropout=1)

    def make() -> Block:
        return Block(rngs.fork() if own_streams else rngs)

    given: dict[str, Any] = {"remat": remat, "schedule": schedule}
    return with_values(sx.nn.Stack(make, length, microbatches=microbatches, **given))


def batch() -> tuple[np.ndarray, np.ndarray]:
    """Returns eight rows of five positions, and their mask."""
    x = np.random.default_rng(3).normal(size=(8, 5, 8)).astype(np.float32)
    return x, np.arange(40).reshape(8, 5) % 3 > 0


@sx.jit
def value_and_gradients(stack: Any, x: jax.Array, mask: jax.Array) -> Any:
    """Returns the loss, and gradients of parameters and input."""

    def loss(stack: Any, x: jax.Array) -> jax.Array:
        return jnp.mean(stack(x, mask, scale=0.5) ** 2)

    return sx.value_and_grad(loss, argnums=(0, 1))(stack, x)


def all_that_leaves(
    stack: Any, x: jax.Array, mask: jax.Array, step: Any = value_and_gradients
) -> dict[str, np.ndarray]:
    """Returns every number of a step by name: results, gradients and state."""
    value, (gradient, of_x) = step(stack, x, mask)
    numbers = {"value": value, "x": of_x, **{f"grad{p}": g for p, g in gradient.flat().items()}}
    for path, variable in sx.iter_variables(stack):
        for place, leaf in enumerate(jax.tree.leaves(variable.value)):
            is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
            numbers[f"{path}{place}"] = jax.random.key_data(leaf) if is_key else leaf
    return {name: np.asarray(number) for name, number in numbers.items()}


@functools.cache
def on_one_device(microbatches: int, own_streams: bool, length: int = 6) -> Any:
    """Returns every number of a step of layers in turn."""
    return all_that_leaves(make_stack(microbatches, own_streams, length=length), *batch())


def assert_alike(found: dict[str, np.ndarray], wanted: dict[str, np.ndarray]) -> None:
    """Asserts that the same names have the same numbers, up to rounding."""
    assert found.keys() == wanted.keys()
    for name, number in wanted.items():
        np.testing.assert_allclose(found[name], number, rtol=2e-5, atol=2e-6, err_msg=name)


@pytest.mark.parametrize(
    ("sizes", "own_streams", "kind"),
    [
        ({"stage": 2}, True, AxisType.Explicit),
        ({"stage": 3, "data": 2}, False, AxisType.Auto),
        ({"data": 2, "stage": 2, "model": 2}, False, AxisType.Explicit),
    ],
    ids=str,
)
def test_pipeline_equals_one_device_on_any_mesh(
    sizes: dict[str, int], own_streams: bool, kind: AxisType
) -> None:
    x, mask = batch()
    wanted = on_one_device(4, own_streams)
    mesh = make_mesh(sizes, kind)
    with jax.set_mesh(mesh), sx.axis_rules({n: a for n, a in RULES.items() if a in mesh.shape}):
        stack = sx.shard(make_stack(4, own_streams), mesh)
        rows = NamedSharding(mesh, PartitionSpec("data" if "data" in mesh.shape else None))
        found = all_that_leaves(stack, *jax.device_put((x, mask), rows))
    assert_alike(found, wanted)
    assert stack.stacked.mlp.up.kernel.sharding.spec[0] == "stage"


@pytest.mark.parametrize(
    ("sizes", "length", "microbatches", "own_streams", "kind"),
    [
        ({"stage": 2}, 6, 4, True, AxisType.Auto),  # rounds that stages do not divide
        ({"stage": 3}, 6, 2, False, AxisType.Explicit),  # fewer microbatches than stages
        ({"stage": 4}, 4, 4, True, AxisType.Auto),  # a single round
        ({"data": 2, "stage": 3}, 6, 4, False, AxisType.Auto),  # fewer rounds than stages
        ({"data": 2, "stage": 2, "model": 2}, 4, 4, True, AxisType.Explicit),
    ],
    ids=str,
)
def test_circular_schedule_equals_one_device_on_any_mesh(
    sizes: dict[str, int], length: int, microbatches: int, own_streams: bool, kind: AxisType
) -> None:
    x, mask = batch()
    given: dict[str, Any] = {"length": length, "schedule": "circular"}
    wanted = on_one_device(microbatches, own_streams, length)
    mesh = make_mesh(sizes, kind)
    with jax.set_mesh(mesh), sx.axis_rules({n: a for n, a in RULES.items() if a in mesh.shape}):
        stack = sx.shard(make_stack(microbatches, own_streams, **given), mesh)
        rows = NamedSharding(mesh, PartitionSpec("data" if "data" in mesh.shape else None))
        found = all_that_leaves(stack, *jax.device_put((x, mask), rows))
    assert_alike(found, wanted)
    assert stack.stacked.mlp.up.kernel.sharding.spec[0] == "stage"


@pytest.mark.parametrize(
    ("stages", "length", "microbatches", "permuted", "exchanged"),
    # With fewer rounds than stages each layer of a stage, else all but those that stay.
    [(4, 8, 8, 2, 0), (4, 16, 4, 0, 3), (2, 8, 2, 0, 2), (2, 6, 2, 0, 2)],
)
def test_circular_schedule_sends_layers_once_activations_each_tick(
    stages: int, length: int, microbatches: int, permuted: int, exchanged: int
) -> None:
    mesh = make_mesh({"stage": stages}, AxisType.Auto)
    linear = lambda: sx.nn.Linear(8, 8, use_bias=False, rngs=sx.Rngs(0))  # noqa: E731
    stack, x = with_values(sx.nn.Stack(linear, length)), np.ones((16, 8), np.float32)
    with jax.set_mesh(mesh), sx.axis_rules({"layers": "stage"}):
        sx.shard(stack, mesh)
        with sx.parallel(microbatches=microbatches, schedule="circular"):
            program = sx.jit(lambda stack, x: stack(x)).lower(stack, x).compile()
    facts = read_program(program.as_text(), {"stage": stages})
    rounds = length // stages
    ticks = (rounds - 1) * max(microbatches, stages) + microbatches + stages - 1
    sent = {each.kind: 0.0 for each in facts.collectives}
    for each in facts.collectives:
        sent[each.kind] += each.wire_bytes
    layer = 8 * 8 * 4
    assert sent == {
        # Rows of a microbatch at every tick, and before the first a stage's layers for others.
        "collective-permute": ticks * 16 // microbatches * 8 * 4 + permuted * layer,
        **({"all-to-all": exchanged * layer} if exchanged else {}),
        "all-reduce": 2 * (stages - 1) / stages * 16 * 8 * 4,  # results, to all stages
    }
    assert facts.matmul_flops == ticks * 2 * 16 // microbatches * 8 * 8


@pytest.mark.parametrize("stages", range(1, 9))
@pytest.mark.parametrize("rounds", range(1, 13))
def test_layers_reach_rounds_by_permutations_of_stages(stages: int, rounds: int) -> None:
    moves = _moves(stages, rounds)
    assert len(moves) == rounds
    arrived = {}
    for move in moves:
        assert sorted(here for here, _ in move.pairs) == list(range(stages))
        assert sorted(there for _, there in move.pairs) == list(range(stages))
        for here, there in move.pairs:
            arrived[there, move.round[there]] = here * rounds + move.slot[here]
    every = itertools.product(range(stages), range(rounds))
    assert arrived == {(stage, turn): turn * stages + stage for stage, turn in every}


@pytest.mark.parametrize("schedule", ["gpipe", "circular"])
@pytest.mark.parametrize("stages", [1, 2, 3, 5])
@pytest.mark.parametrize("microbatches", [1, 2, 5, 7])
def test_bubble_share_equals_a_simulation(schedule: str, stages: int, microbatches: int) -> None:
    rounds = 3 if schedule == "circular" else 1
    ready = dict.fromkeys(range(microbatches), 0)  # when a microbatch may begin its round
    free = [0] * stages
    for turn in range(rounds):
        for number in range(microbatches):
            at = max(ready[number], turn * max(microbatches, stages) + number)
            for stage in range(stages):
                at = max(at, free[stage])
                free[stage] = at = at + 1
            ready[number] = at
    share = 1 - rounds * microbatches / max(free)
    assert bubble_share(schedule, stages, microbatches, rounds) == pytest.approx(share)


def test_microbatches_change_only_draws_and_state() -> None:
    x, mask = batch()
    whole, parts, one = make_stack(None), make_stack(4), make_stack(1)
    drawn = all_that_leaves(make_stack(None), x, mask)
    assert_alike(all_that_leaves(one, x, mask), drawn)
    for stack in (whole, parts):
        stack.eval()
    wanted, found = (all_that_leaves(stack, x, mask) for stack in (whole, parts))
    # The state goes from one microbatch to the next.
    assert found.pop("('stacked', 'calls')0").tolist() == [4] * 6
    assert wanted.pop("('stacked', 'calls')0").tolist() == [1] * 6
    del found["('stacked', 'mean')0"], wanted["('stacked', 'mean')0"]
    assert_alike(found, wanted)
    again = make_stack(None)
    again.eval()
    call = sx.jit(lambda stack, x, mask: stack(x, mask, scale=0.5))
    for rows in (slice(i, None, 4) for i in range(4)):
        call(again, x[rows], mask[rows])
    np.testing.assert_allclose(parts.stacked.mean.value, again.stacked.mean.value, atol=1e-6)


def test_microbatches_draw_apart_and_advance_streams_once() -> None:
    class Noise(sx.Module):
        def __init__(self, rngs: sx.Rngs) -> None:
            self.stream = rngs.noise

        def __call__(self, x: jax.Array) -> jax.Array:
            return x + self.stream.normal(x.shape)

    rngs = sx.Rngs(noise=0)
    stack = sx.nn.Stack(lambda: Noise(rngs), 3, microbatches=2)
    y = stack(np.zeros((4, 6), np.float32))
    assert len(np.unique(np.asarray(y))) == 24
    assert int(rngs.noise.count) == int(stack.stacked.stream.count) == 3


class Row(sx.Module):
    """Draws, counts and sows rows."""

    def __init__(self, rngs: sx.Rngs) -> None:
        self.linear = sx.nn.Linear(8, 8, rngs=rngs)
        self.dropout = sx.nn.Dropout(0.3, rngs=rngs)
        self.calls = sx.Variable(np.zeros((), np.int32))

    def __call__(self, x: jax.Array, mask: jax.Array, scale: float) -> jax.Array:
        """Adds the layer's result where the mask is."""
        self.calls[...] += 1
        y = jnp.where(mask[..., None], scale * self.linear(x), 0)
        self.sow("rows", y)
        return x + self.dropout(y)


class Pair(sx.Module):
    """Two layers, which are a stack of their own."""

    def __init__(self, rngs: sx.Rngs) -> None:
        self.inner = sx.nn.Stack(lambda: Row(rngs), 2, axis_name="inner")

    def __call__(self, x: jax.Array, mask: jax.Array, scale: float) -> jax.Array:
        """Runs both."""
        return self.inner(x, mask, scale=scale)


def make_nested(microbatches: int | None) -> Any:
    """Returns four pairs of layers."""
    rngs = sx.Rngs(params=0, dropout=1)
    return with_values(sx.nn.Stack(lambda: Pair(rngs), 4, microbatches=microbatches))


@functools.cache
def nested_on_one_device() -> Any:
    """Returns every number of a step of nested stacks, of which the outer cuts the batch."""
    return all_that_leaves(make_nested(4), *batch())  # the inner could not cut its rows again


@pytest.mark.parametrize("schedule", ["gpipe", "circular"])
def test_nested_stacks_cut_the_batch_once(schedule: str) -> None:
    mesh = make_mesh({"stage": 2}, AxisType.Auto)
    scope = sx.parallel(microbatches=4, schedule=schedule)
    with scope, jax.set_mesh(mesh), sx.axis_rules({"layers": "stage"}):
        found = all_that_leaves(sx.shard(make_nested(None), mesh), *batch())
    assert_alike(found, nested_on_one_device())


def test_scope_cuts_nested_stacks_without_a_mesh() -> None:
    with sx.parallel(microbatches=4, schedule="circular"):
        found = all_that_leaves(make_nested(None), *batch())
    assert_alike(found, nested_on_one_device())


def test_values_sown_again_are_appended() -> None:
    x, mask = batch()
    stack = make_stack(2)
    stack.eval()
    stack(x, mask)
    stack(2 * x, mask)
    rows = stack.stacked.rows.value
    assert [r.shape for r in rows] == [(6, 8, 5, 8)] * 2
    assert not np.allclose(rows[0], rows[1])


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_stages_send_activations_and_no_parameters(kind: AxisType) -> None:
    mesh = make_mesh({"stage": 4}, kind)
    with jax.set_mesh(mesh), sx.axis_rules({"layers": "stage"}):
        stack = sx.shard(make_stack(4, length=8), mesh)
        stack.eval()
        run = sx.jit(lambda stack, x: stack(x))
        facts = read_program(run.lower(stack, batch()[0]).compile().as_text(), mesh.shape)
    sends = [c for c in facts.collectives if c.kind == "collective-permute"]
    row_bytes = 2 * 5 * 8 * 4
    ticks = 4 + 4 - 1
    assert sum(c.runs * c.payload for c in sends) == ticks * row_bytes
    # State and sown values without axis names are whole over Explicit axes; kernels never are.
    gathered = [c.payload for c in facts.collectives if c.kind in ("all-gather", "all-to-all")]
    kernel_bytes = 8 * 8 * 16 * 4
    assert kernel_bytes not in gathered
    assert not gathered or kind is AxisType.Explicit


@pytest.mark.parametrize(
    ("dtype", "policy"),
    [("float32", None), ("bfloat16", None), ("bfloat16", "full"), ("float32", "dots_saveable")],
)
def test_circular_schedule_keeps_no_layer_per_tick(dtype: str, policy: str | None) -> None:
    def make() -> Any:
        layer = lambda: sx.nn.Linear(128, 128, dtype=dtype, rngs=sx.Rngs(0))  # noqa: E731
        return with_values(sx.nn.Stack(layer, 8, remat=policy, schedule="circular"))

    def peak(microbatches: int) -> int:
        step = sx.jit(sx.value_and_grad(lambda stack, x: stack(x).astype("float32").sum()))
        with sx.parallel(microbatches=microbatches):
            compiled = step.lower(sx.shard(make(), mesh), np.ones((16, 128), dtype)).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    mesh = make_mesh({"stage": 4}, AxisType.Auto)
    with jax.set_mesh(mesh), sx.axis_rules({"layers": "stage"}):
        # Twice as many microbatches of half the rows: 16 ticks more, and rows as before.
        assert peak(16) - peak(8) < 2 * 128 * 128 * 4


@sx.jit
def gradients_of_rows(stack: Any, x: jax.Array) -> Any:
    def loss(stack: Any, x: jax.Array) -> jax.Array:
        return jnp.sum(stack(x).astype("float32") ** 2)

    return sx.grad(loss, argnums=(0, 1))(stack, x)


@pytest.mark.parametrize("schedule", ["gpipe", "circular"])
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_bfloat16_pipeline_equals_one_device_up_to_rounding(kind: AxisType, schedule: str) -> None:
    x = batch()[0].astype("bfloat16")

    def make(schedule: str | None) -> Any:
        layer = lambda: sx.nn.Linear(8, 8, dtype="bfloat16", rngs=sx.Rngs(0))  # noqa: E731
        return with_values(sx.nn.Stack(layer, 8, microbatches=4, schedule=schedule))

    wanted = gradients_of_rows(make(None), x)
    mesh = make_mesh({"data": 2, "stage": 4}, kind)
    with jax.set_mesh(mesh), sx.axis_rules({"layers": "stage", "batch": "data"}):
        rows = NamedSharding(mesh, PartitionSpec("data"))
        found = gradients_of_rows(sx.shard(make(schedule), mesh), jax.device_put(x, rows))
    for one, other in zip(*map(jax.tree.leaves, (found, wanted)), strict=True):
        scale = max(1.0, float(np.abs(np.asarray(other, np.float32)).max()))
        np.testing.assert_allclose(
            np.asarray(one, np.float32), np.asarray(other, np.float32), atol=0.03 * scale
        )


@pytest.mark.parametrize("schedule", ["gpipe", "circular"])
def test_remat_gives_equal_numbers_in_less_memory(schedule: str) -> None:
    x, mask = (np.tile(item, (16, *[1] * (item.ndim - 1))) for item in batch())
    mesh = make_mesh({"stage": 4}, AxisType.Auto)
    peaks, numbers = [], []
    with jax.set_mesh(mesh), sx.axis_rules({"layers": "stage"}):
        for policy in (None, "full"):
            stack = sx.shard(make_stack(8, remat=policy, length=8, schedule=schedule), mesh)
            compiled = value_and_gradients.lower(stack, x, mask).compile()
            peaks.append(compiled.memory_analysis().temp_size_in_bytes)
            numbers.append(all_that_leaves(stack, x, mask, compiled))
    assert_alike(numbers[1], numbers[0])
    assert peaks[1] < 0.7 * peaks[0]


@sx.jit
def step_of_tokens(model: Any, tokens: jax.Array, mask: jax.Array) -> Any:
    """Returns the loss of a model of tokens, and the gradients of its parameters."""

    def loss(model: Any) -> jax.Array:
        return sx.models.cross_entropy(model(tokens, mask=mask)[:, :-1], tokens[:, 1:])

    return sx.value_and_grad(loss)(model)


@functools.cache
def transformer_on_one_device() -> Any:
    """Returns a transformer, what it is given, its loss and its gradients."""
    config = sx.models.TransformerConfig(
        num_layers=4,
        embed_dim=16,
        attention=sx.models.AttentionConfig(num_heads=4, head_dim=4),
        mlp=sx.models.MLPConfig(dim=32),
        scan_layers=True,
    )
    model = with_values(sx.models.Transformer(config, rngs=sx.Rngs(0)))
    tokens = np.random.default_rng(0).integers(0, 256, (8, 12), np.int32)
    given = tokens, np.arange(12)[None] >= np.arange(8)[:, None] % 3
    return model, given, *step_of_tokens(model, *given)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_rule_and_scope_make_transformer_a_pipeline(kind: AxisType) -> None:
    alone, given, wanted, gradient = transformer_on_one_device()
    mesh = make_mesh({"data": 2, "stage": 2, "model": 2}, kind)
    rules = {"batch": "data", "layers": "stage", "heads": "model", "kv_heads": "model"}
    rules |= {"mlp": "model", "vocab": "model"}
    with jax.set_mesh(mesh), sx.axis_rules(rules), sx.parallel(microbatches=2):
        model = sx.shard(sx.clone(alone), mesh)
        rows = NamedSharding(mesh, PartitionSpec("data"))
        found, ours = step_of_tokens(model, *jax.device_put(given, rows))
    np.testing.assert_allclose(found, wanted, rtol=1e-5)
    for path, number in gradient.flat().items():
        options = {"rtol": 1e-4, "atol": 2e-5, "err_msg": str(path)}
        np.testing.assert_allclose(ours.flat()[path], number, **options)


def test_cached_generation_is_not_cut() -> None:
    config = sx.models.TransformerConfig(num_layers=2, scan_layers=True)
    model = with_values(sx.models.Transformer(config, rngs=sx.Rngs(0)))
    prompts = [[0, 1, 2], [3, 4, 5]]
    wanted = sx.models.generate(model, prompts, max_new_tokens=3, seed=0)
    with sx.parallel(microbatches=2):
        found = sx.models.generate(model, prompts, max_new_tokens=3, seed=0)
    jax.tree.map(np.testing.assert_array_equal, found, wanted)


def test_arguments_with_a_row_each_are_cut() -> None:
    class Biased(sx.Module):
        def __call__(self, x: jax.Array, bias: jax.Array) -> jax.Array:
            return x + bias

    def first_column(x: np.ndarray, bias: np.ndarray) -> np.ndarray:
        return np.asarray(stack(x, bias))[..., 0]

    stack = sx.nn.Stack(Biased, 2, microbatches=2)
    x, by_row, by_time = np.zeros((4, 3, 2)), np.arange(4.0), np.arange(3.0)
    assert first_column(x, by_row[:, None, None])[:, 0].tolist() == [0, 2, 4, 6]
    assert first_column(x, by_time[None, :, None])[0].tolist() == [0, 2, 4]
    # Time has the size of the batch, but only one reading fits.
    square, by_time = np.zeros((4, 4, 2)), np.arange(4.0)
    assert first_column(square, by_row[:, None, None])[:, 0].tolist() == [0, 2, 4, 6]
    with pytest.raises(ModuleError, match=r"4 rows and another dimension of size 4.*mask\[None\]"):
        sx.nn.Stack(Summed, 2, microbatches=2)(square, by_time)
    assert first_column(square, by_time[None, :, None])[0].tolist() == [0, 2, 4, 6]


class Summed(sx.Module):
    """Takes an argument of any shape."""

    def __call__(self, x: jax.Array, other: jax.Array) -> jax.Array:
        """Adds the sum."""
        return x + jnp.sum(other)


class Refused(sx.Module):
    """Does one thing that a pipeline cannot do."""

    def __init__(self, act: Callable[..., Any], shared: Any = None) -> None:
        self.act = act
        self.shared = shared

    def __call__(self, x: jax.Array) -> jax.Array:
        """Does it."""
        return self.act(self, x)


def _write_shared(layer: Any, x: jax.Array) -> jax.Array:
    layer.shared[...] += jnp.sum(x)
    return x


def _sow_counts(layer: Any, x: jax.Array) -> jax.Array:
    layer.sow("count", jnp.sum(x > 0))
    return x


@pytest.mark.parametrize(
    ("layers", "rows", "microbatches", "act", "rules", "message"),
    [
        (3, 4, 2, lambda _, x: x, {}, r"'stage' of 2 stages, but 3 layers cannot be divided"),
        (2, 5, 2, lambda _, x: x, {}, r"5 rows cannot be cut into 2 microbatches"),
        (2, 4, 2, lambda _, x: x, {"layers": ("stage", "data")}, "a pipeline has its stages along"),
        (2, 4, 2, _write_shared, {}, r"wrote \.shared, which they share"),
        (2, 4, 2, _sow_counts, {}, r"sowed int32\[\] at \.count .*neither rows"),
        (2, 4, 2, lambda _, x: x[:, :1], {}, r"from float32\[4,3\] to float32\[4,1\]"),
    ],
)
def test_unsupported_layers_and_batches_are_refused(
    layers: int,
    rows: int,
    microbatches: int,
    act: Callable[..., Any],
    rules: dict[str, Any],
    message: str,
) -> None:
    shared = sx.Variable(np.float32(0))
    make = lambda: Refused(act, shared if act is _write_shared else None)  # noqa: E731
    mesh = make_mesh({"stage": 2, "data": 2}, AxisType.Auto)
    with jax.set_mesh(mesh), sx.axis_rules({"layers": "stage", **rules}):
        stack = sx.nn.Stack(make, layers, microbatches=microbatches)
        before = sx.state(stack).flat()
        with pytest.raises(
            (ModuleError, sx.errors.TransformError), match=re.compile(message, re.S)
        ):
            stack(np.ones((rows, 3), np.float32))
        assert sx.state(stack).flat().keys() == before.keys()


@pytest.mark.parametrize("wrong", [0, -1, 1.5, True, "2"])
def test_number_of_microbatches_must_be_positive_integer(wrong: Any) -> None:
    with pytest.raises(PartitionError, match=r"microbatches=.* must be an integer of at least 1\."):
        sx.parallel(microbatches=wrong)


def test_unknown_schedules_are_refused() -> None:
    with pytest.raises(PartitionError, match="'1f1b' must be 'gpipe' or 'circular'"):
        sx.parallel(schedule="1f1b")
    with pytest.raises(sx.errors.LayerConfigError, match='use "gpipe" or "circular"'):
        make_stack(4, schedule="rounds")
