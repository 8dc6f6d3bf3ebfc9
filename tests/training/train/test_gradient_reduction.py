# SPDX-License-Identifier: Apache-2.0
"""Gradients that data-parallel devices sum once are those of the whole batch."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import shardax as sx
from shardax.errors import PartitionError, TrainError
from shardax.hlo import read_program
from shardax.train import TrainerSettings, data_parallel_value_and_grad
from tests.training.train.small_runs import raw
from tests.values import with_values

OVER = ("slice", "data")
RULES = {"batch": OVER, "mlp": "model"}
KINDS = [AxisType.Auto, AxisType.Explicit]
EMBED, HIDDEN, ROWS = 8, 16, 16


class Net(sx.Module):
    """Two products; counts its calls."""

    def __init__(self, dtype: Any = np.float32) -> None:
        normal, rngs = jax.nn.initializers.normal(0.3), sx.Rngs(0)
        self.up = sx.Param(
            sx.Init(normal, (EMBED, HIDDEN), dtype, rngs=rngs), axes=("embed", "mlp")
        )
        self.down = sx.Param(
            sx.Init(normal, (HIDDEN, EMBED), dtype, rngs=rngs), axes=("mlp", "embed")
        )
        self.bias = sx.Param(jnp.full(3, 0.1, dtype))  # cannot be divided
        self.calls = sx.BatchStat(0)

    def __call__(self, x: Any) -> Any:
        self.calls += 1
        return jnp.tanh(x @ self.up) @ self.down + self.bias.sum()


def loss(model: Any, batch: Any) -> Any:
    each = jnp.mean((model(batch["x"]) - 1) ** 2, axis=-1)
    mask = batch.get("mask")
    return jnp.mean(each) if mask is None else jnp.sum(each * mask) / jnp.maximum(mask.sum(), 1)


def make_batch(masked: bool = False) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    batch = {"x": rng.normal(size=(ROWS, EMBED)).astype(np.float32)}
    if masked:  # a device without any target, and others with different numbers
        batch["mask"] = np.float32(rng.random(ROWS) < np.linspace(-0.5, 1.2, ROWS))
    return batch


def make_mesh(kind: AxisType, shape: tuple[int, ...] = (2, 2, 2)) -> jax.sharding.Mesh:
    count = int(np.prod(shape))
    names = ("slice", "data", "model")
    return jax.make_mesh(shape, names, axis_types=(kind,) * 3, devices=jax.devices()[:count])


def placed(mesh: Any, tree: Any) -> Any:
    return jax.device_put(tree, NamedSharding(mesh, P(OVER)))


def reduced(mesh: Any, batch: Any, model: Any, loss: Any = loss, **options: Any) -> Any:
    """The value and gradients over a mesh."""
    sx.shard(with_values(model), mesh, RULES)
    with jax.set_mesh(mesh), sx.axis_rules(RULES):
        step = sx.jit(data_parallel_value_and_grad(loss, OVER, **options))
        return step(model, placed(mesh, batch))


def compiled(mesh: Any, batch: Any, **options: Any) -> Any:
    """The compiled program of that."""
    model = sx.shard(with_values(Net()), mesh, RULES)
    with jax.set_mesh(mesh), sx.axis_rules(RULES):
        step = sx.jit(data_parallel_value_and_grad(loss, OVER, **options))
        return step.lower(model, placed(mesh, batch)).compile()


def assert_near(found: Any, expected: Any, tolerance: float = 1e-5) -> None:
    for path, value in expected.flat().items():
        scale = np.abs(np.asarray(value, np.float32)).max()
        assert found.flat()[path].dtype == value.dtype
        np.testing.assert_allclose(
            np.asarray(found.flat()[path], np.float32), value, atol=tolerance * scale
        )


@functools.cache
def on_one_device(masked: bool) -> tuple[Any, Any]:
    """The value and gradients that all meshes have to give."""
    return sx.jit(sx.value_and_grad(loss))(with_values(Net()), make_batch(masked))


SHAPES = [(1, 1, 1), (1, 2, 1), (2, 2, 1), (2, 2, 2)]


FORMS: list[dict[str, Any]] = [
    {"steps": 2},
    {"layout": {"embed": OVER}},
    {"layout": {"embed": "data"}, "steps": 2, "reduce_dtype": "bfloat16"},
    {"layout": {"embed": "slice"}, "reduce_dtype": "bfloat16"},
]


# Each pair of shape, kind of axes, form and loss.
@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_value_and_gradients_are_those_of_one_device(
    kind: AxisType, shape: tuple[int, ...]
) -> None:
    row, column = SHAPES.index(shape), KINDS.index(kind)
    masked = bool((row // 2 + column) % 2)
    batch = make_batch(masked)
    value, gradients = on_one_device(masked)
    for options in FORMS[(row + column) % 2 :: 2]:
        model = Net()
        found, found_gradients = reduced(make_mesh(kind, shape), batch, model, **options)
        np.testing.assert_allclose(found, value, rtol=1e-6)
        assert_near(found_gradients, gradients, 0.02 if "reduce_dtype" in options else 1e-5)
        assert int(model.calls) == options.get("steps", 1)
        axes = options.get("layout", {}).get("embed")
        specs = {path[0]: value.sharding for path, value in found_gradients.flat().items()}
        mesh = make_mesh(kind, shape)
        assert specs["up"].is_equivalent_to(NamedSharding(mesh, P(axes, "model")), 2)
        assert specs["down"].is_equivalent_to(NamedSharding(mesh, P("model", axes)), 2)


# Of a device: an array of `up` and one of `down`, half of it by "model", and three numbers of the
# bias, which are summed as they are. Over two devices an all-reduce sends as many bytes as there
# are, and the other exchanges half of them.
ARRAYS = 2 * EMBED * HIDDEN // 2 * 4
BIAS = 3 * 4


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        # Within slices reduced and scattered, half of it summed across them, gathered within.
        ({}, {"data": ARRAYS / 2 + ARRAYS / 2, "slice": ARRAYS / 2}),
        # The same of half as many bytes; what is summed across is gathered there, too.
        ({"reduce_dtype": "bfloat16"}, {"data": ARRAYS / 2, "slice": ARRAYS / 4}),
        ({"layout": {"embed": "data"}}, {"data": ARRAYS / 2, "slice": ARRAYS / 2}),
        ({"layout": {"embed": OVER}}, {"data": ARRAYS / 2, "slice": ARRAYS / 4}),
        (
            {"layout": {"embed": OVER}, "reduce_dtype": "bfloat16"},
            {"data": ARRAYS / 4, "slice": ARRAYS / 8},
        ),
        # Each microbatch is split at once, and summed across slices in the end.
        ({"layout": {"embed": OVER}, "steps": 4}, {"data": 4 * ARRAYS / 2, "slice": ARRAYS / 4}),
    ],
    ids=["whole", "bfloat16", "inner", "split", "split-bfloat16", "microbatches"],
)
def test_wire_bytes_by_axis_equal_the_manual_count(
    options: dict[str, Any], expected: dict[str, float]
) -> None:
    mesh = make_mesh(AxisType.Auto)
    program = compiled(mesh, make_batch(), **options)
    found = {"slice": 0.0, "data": 0.0}
    kinds = set()
    for each in read_program(program.as_text(), dict(mesh.shape)).collectives:
        if each.axes != ("model",) and each.axes != OVER:
            found[each.axes[0]] += each.wire_bytes
            if each.payload > BIAS:
                kinds.add((each.kind, each.dtype))
    assert found == {axis: count + BIAS for axis, count in expected.items()}
    exchanged = {"all-to-all": "u16"} if "reduce_dtype" in options else {"reduce-scatter": "f32"}
    assert exchanged.items() <= dict(kinds).items()
    assert all(dtype == next(iter(exchanged.values())) for _, dtype in kinds)


def test_compiler_reduction_sends_all_bytes_across_slices() -> None:
    mesh, model = make_mesh(AxisType.Auto), with_values(Net())
    sx.shard(model, mesh, RULES)
    with jax.set_mesh(mesh), sx.axis_rules(RULES):
        flat = sx.jit(sx.value_and_grad(loss)).lower(model, placed(mesh, make_batch())).compile()
    sums = read_program(flat.as_text(), dict(mesh.shape)).collectives
    [across] = {each.axes for each in sums if "slice" in each.axes}
    assert across == OVER  # every byte goes between slices as often as within
    sent = sum(each.wire_bytes for each in sums if each.axes == OVER)
    # The bias has one number three times as its gradient, and the loss is one.
    assert sent == 2 * 3 / 4 * (ARRAYS + 4 + 4)


def test_of_bfloat16_only_what_travels_is_rounded() -> None:
    # Sums in bfloat16 would lose what is small beside the first device's number.
    mesh = make_mesh(AxisType.Auto, (1, 8, 1))
    weight = sx.Param(jnp.zeros(8), axes=("embed",))
    each = jnp.asarray([1.0] + [2.0**-9] * 7)
    sx.shard(weight, mesh, RULES)
    with jax.set_mesh(mesh), sx.axis_rules(RULES):
        step = data_parallel_value_and_grad(
            lambda weight, x: jnp.sum(weight.value) * jnp.sum(x),
            "data",
            layout={"embed": "data"},
            reduce_dtype="bfloat16",
        )
        _, gradient = sx.jit(step)(weight, jax.device_put(each, NamedSharding(mesh, P("data"))))
    np.testing.assert_array_equal(gradient, np.full(8, (1 + 7 * 2.0**-9) / 8, np.float32))


def test_devices_draw_different_numbers_and_stream_advances_once() -> None:
    mesh = make_mesh(AxisType.Auto, (2, 4, 1))
    model = sx.nn.Dropout(0.5, rngs=sx.Rngs(0))
    alone = sx.nn.Dropout(0.5, rngs=sx.Rngs(0))
    weight = sx.Param(jnp.ones(()))

    def draws(weight: Any, x: Any, model: Any) -> Any:
        y = model(x)
        return jnp.mean(y) * weight.value, y

    with jax.set_mesh(mesh):
        step = sx.jit(data_parallel_value_and_grad(draws, OVER, has_aux=True, wrt=...))
        (value, drawn), _ = step(weight, placed(mesh, np.ones((8, 64), np.float32)), model)
    rows = np.asarray(drawn)  # (devices, rows of each, ...)
    assert rows.shape == (8, 1, 64)
    assert len({row.tobytes() for row in rows}) == 8
    np.testing.assert_allclose(value, rows.mean(), rtol=1e-6)
    sx.jit(lambda model, x: model(x))(alone, np.ones((8, 64), np.float32))
    advanced = [[raw(v) for _, v in sx.iter_variables(one)] for one in (model, alone)]
    assert advanced[0] == advanced[1]


@pytest.mark.parametrize("steps", [1, 2])
def test_batch_statistics_of_a_shard_are_refused(steps: int) -> None:
    mesh, batch = make_mesh(AxisType.Auto), make_batch()

    def make(**options: Any) -> sx.nn.BatchNorm:
        return sx.nn.BatchNorm(EMBED, rngs=sx.Rngs(0), **options)

    def loss(model: Any, batch: Any) -> Any:
        return jnp.mean(jnp.sin(model(batch["x"]) * 2))

    own = make()
    before = [np.asarray(v.value) for _, v in sx.iter_variables(own, sx.BatchStat)]
    with pytest.raises(PartitionError, match=r"(?s)mean.*BatchStat of.*axis_name=\('slice'"):
        reduced(mesh, batch, own, loss, steps=steps)
    after = [np.asarray(v.value) for _, v in sx.iter_variables(own, sx.BatchStat)]
    np.testing.assert_equal(after, before)
    synced, alone = make(axis_name=OVER), with_values(make())
    value, gradients = reduced(mesh, batch, synced, loss, steps=steps)
    expected = sx.jit(sx.train.accumulated_value_and_grad(loss, steps))(alone, batch)
    np.testing.assert_allclose(value, expected[0], rtol=1e-5)
    np.testing.assert_allclose(synced.mean.value, alone.mean.value, rtol=1e-5, atol=1e-6)
    assert_near(gradients, expected[1], 1e-4)


@pytest.mark.parametrize("scanned", [False, True], ids=["layers", "scanned"])
def test_decoder_gradients_equal_those_of_one_device(scanned: bool) -> None:
    config = sx.models.DecoderConfig(
        vocab_size=64, embed_dim=16, num_layers=2, num_heads=2, mlp_dim=32, scan_layers=scanned
    )
    tokens = np.random.default_rng(0).integers(0, 64, (8, 17))
    batch = {"inputs": tokens[:, :-1], "targets": tokens[:, 1:]}

    def loss(model: Any, batch: Any) -> Any:
        return sx.models.blockwise_cross_entropy(
            model.hidden_states(batch["inputs"]), model.head_kernel, batch["targets"], block_size=16
        )

    alone = with_values(sx.models.Decoder(config, rngs=sx.Rngs(0)))
    value, expected = sx.jit(sx.value_and_grad(loss))(alone, batch)
    model = sx.models.Decoder(config, rngs=sx.Rngs(0))
    mesh, layout = make_mesh(AxisType.Auto), {"embed": "data"}
    found, gradients = reduced(mesh, batch, model, loss, steps=2, layout=layout)
    np.testing.assert_allclose(found, value, rtol=1e-5)
    assert_near(gradients, expected, 1e-4)


def test_invalid_reductions_are_refused_with_the_cause() -> None:
    for given, message in (
        ({"over": ()}, r"over=\(\) must be data axes"),
        ({"over": ("data", "data")}, "each once"),
        ({"over": "data", "reduce_dtype": "float16"}, "overflows"),
    ):
        with pytest.raises(PartitionError, match=message):
            data_parallel_value_and_grad(loss, **given)
    with pytest.raises(TrainError, match="steps=0"):
        data_parallel_value_and_grad(loss, "data", steps=0)
    with pytest.raises(PartitionError, match=r"none is in scope.*set_mesh"):
        data_parallel_value_and_grad(loss, "data")(Net(), make_batch())
    mesh = make_mesh(AxisType.Auto)
    odd = {"x": jnp.ones((6, EMBED))}
    for over, rules, options, batch, message in (
        ("dta", RULES, {}, make_batch(), "'dta' is no axis .*slice=2, data=2, model=2"),
        ("data", RULES, {"steps": 2}, odd, r"batch\['x'\] of shape \(6, 8\).*multiple of 4"),
        (
            "data",
            {"embed": "data"},
            {},
            make_batch(),
            r"up is split over 'data'.*sx.value_and_grad",
        ),
        ("data", RULES, {"layout": {"embed": "dta"}}, make_batch(), r"(?s)laid out.*up.*'dta'"),
    ):
        with jax.set_mesh(mesh), sx.axis_rules(rules):
            step = data_parallel_value_and_grad(loss, over, **options)
            with pytest.raises(PartitionError, match=message):
                step(Net(), batch)


def test_reduce_over_as_one_string_is_refused() -> None:
    with pytest.raises(
        TrainError, match=r"not one string, but reduce_over='data'\. Write reduce_over=\("
    ):
        TrainerSettings(steps=1, reduce_over="data")  # pyright: ignore[reportArgumentType]
