# SPDX-License-Identifier: Apache-2.0
"""Convolutions and pooling against Flax and PyTorch: results and gradients."""

from __future__ import annotations

from typing import Any

import flax.linen as linen
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import shardax as sx
from shardax.errors import LayerConfigError, LayerInputError
from tests.advice import run_advice
from tests.needs import needs
from tests.values import with_values

SIZES = {1: (9,), 2: (9, 7), 3: (6, 7, 5)}


def floats(*shape: int) -> np.ndarray:
    return np.random.default_rng(3).normal(size=shape).astype(np.float32)


def close(found: Any, expected: Any, tolerance: float = 2e-5) -> None:
    np.testing.assert_allclose(found, expected, rtol=tolerance, atol=tolerance)


@sx.jit
def call(layer: Any, x: Any) -> Any:
    return layer(x)


def check_against_flax(layer: Any, peer: Any, x: np.ndarray) -> None:
    params = {"kernel": floats(*layer.kernel.shape) / 3, "bias": floats(*layer.bias.shape)}
    layer.kernel.value, layer.bias.value = params["kernel"], params["bias"]
    graphdef, state = sx.split(layer)

    @jax.jit
    def both(params: Any, state: Any, x: Any) -> Any:
        expected, pull = jax.vjp(lambda p, x: peer.apply({"params": p}, x), params, x)
        found, ours = jax.vjp(lambda state, x: sx.merge(graphdef, state)(x), state, x)
        weights = floats(*expected.shape)
        return expected, found, pull(weights), ours(weights)

    expected, found, (of_params, of_x), (our_params, our_x) = both(params, state, x)
    close(found, expected)
    close(our_x, of_x, 1e-4)
    for name, gradient in of_params.items():
        close(our_params[name], gradient, 2e-4)


CONVOLUTIONS: list[dict[str, Any]] = [
    {},
    {"padding": "VALID"},
    {"padding": "CIRCULAR"},
    {"padding": "REFLECT"},
    {"padding": 1},
    {"padding": "SAME", "strides": 2},
    {"padding": "VALID", "dilation": 2},
    {"padding": "CIRCULAR", "strides": 2, "dilation": 2},
    {"padding": "REFLECT", "dilation": 2},
    {"padding": 0, "input_dilation": 2},
    {"padding": 2, "input_dilation": 3, "strides": 2, "dilation": 2, "groups": 2},
    {"groups": 2},
    {"groups": 4, "strides": 2},
    {"padding": [(2, 0)], "groups": 2, "strides": 2, "dilation": 2},
]


# Every option in two dimensions, those that combine several in one and three too.
@pytest.mark.parametrize(
    ("rank", "options"),
    [(rank, one) for rank in (1, 2, 3) for one in CONVOLUTIONS if rank == 2 or len(one) > 2],
    ids=str,
)
def test_convolution_and_its_gradients_equal_flax(rank: int, options: dict[str, Any]):
    options = dict(options)
    if isinstance(options.get("padding"), list):
        options["padding"] = options["padding"] * rank
    layer = sx.nn.Conv(4, 8, (3, 2, 3)[:rank], **options, rngs=sx.Rngs(0))
    rename = {"dilation": "kernel_dilation", "groups": "feature_group_count"}
    given = {rename.get(name, name): value for name, value in options.items()}
    peer = linen.Conv(8, (3, 2, 3)[:rank], **given)
    check_against_flax(layer, peer, floats(2, *SIZES[rank], 4))


def test_causal_convolution_equals_flax_and_reads_no_future():
    layer = sx.nn.Conv(4, 8, 3, padding="CAUSAL", dilation=2, rngs=sx.Rngs(0))
    peer = linen.Conv(8, (3,), padding="CAUSAL", kernel_dilation=2)
    x = floats(2, 9, 4)
    check_against_flax(layer, peer, x)
    changed = np.concatenate([x[:, :5], x[:, 5:] + 1], axis=1)
    close(call(layer, changed)[:, :5], call(layer, x)[:, :5], 0)


TRANSPOSED: list[dict[str, Any]] = [
    {},
    {"strides": 2},
    {"strides": 3},
    {"strides": 5},
    {"padding": "VALID", "strides": 2},
    {"padding": "VALID", "strides": 4},
    {"padding": "VALID", "dilation": 2},
    {"padding": [(1, 2)], "strides": 2},
    {"padding": "CIRCULAR"},
    {"padding": "CIRCULAR", "strides": 2, "dilation": 2},
    {"padding": "CIRCULAR", "strides": 5},
]


# Every option in two dimensions; in one and three those that differ most.
@pytest.mark.parametrize(
    ("rank", "options"),
    [(2, one) for one in TRANSPOSED] + [(1, TRANSPOSED[10]), (3, TRANSPOSED[7])],
    ids=str,
)
def test_transposed_convolution_and_its_gradients_equal_flax(rank: int, options: dict[str, Any]):
    options = dict(options)
    if isinstance(options.get("padding"), list):
        options["padding"] = options["padding"] * rank
    steps = (options.pop("strides", 1),) * rank
    layer = sx.nn.ConvTranspose(4, 6, (3, 4, 2)[:rank], strides=steps, **options, rngs=sx.Rngs(0))
    given = {"kernel_dilation" if n == "dilation" else n: v for n, v in options.items()}
    if "kernel_dilation" in given:
        given["kernel_dilation"] = (given["kernel_dilation"],) * rank
    peer = linen.ConvTranspose(6, (3, 4, 2)[:rank], strides=steps, **given)
    check_against_flax(layer, peer, floats(2, *SIZES[rank], 4))


@pytest.mark.parametrize("name", ["Conv", "ConvTranspose"])
def test_masked_kernels_and_their_gradients_equal_flax(name: str):
    mask = np.random.default_rng(0).integers(0, 2, (3, 2, 4, 6))
    layer = getattr(sx.nn, name)(4, 6, (3, 2), mask=mask, rngs=sx.Rngs(0))
    peer = getattr(linen, name)(6, (3, 2), mask=mask)
    check_against_flax(layer, peer, floats(2, 5, 6, 4))
    assert [path for path, _ in sx.iter_variables(layer, sx.Param)] == [("kernel",), ("bias",)]


def test_transposed_groups_are_convolved_separately():
    whole = with_values(
        sx.nn.ConvTranspose(4, 6, (3, 3), strides=2, groups=2, rngs=sx.Rngs(0)), seed=1
    )
    x, kernel, bias = floats(2, 5, 5, 4), whole.kernel.value, whole.bias.value
    parts = []
    for group in range(2):
        part = sx.nn.ConvTranspose(2, 3, (3, 3), strides=2, rngs=sx.Rngs(0))
        own = slice(3 * group, 3 * group + 3)
        part.kernel.value, part.bias.value = np.asarray(kernel)[..., own], np.asarray(bias)[own]
        parts.append(call(part, x[..., 2 * group : 2 * group + 2]))
    close(call(whole, x), np.concatenate(parts, -1))


# Each pair of a rank, a padding and strides.
@pytest.mark.parametrize(
    ("rank", "padding", "strides"),
    [
        (rank, padding, (None, 1, 3)[(rank + place) % 3])
        for rank in (1, 2, 3)
        for place, padding in enumerate(("VALID", "SAME", 1))
    ],
)
def test_pooling_and_its_gradients_equal_flax(rank: int, padding: Any, strides: int | None):
    x, window = floats(2, *SIZES[rank], 4), (3, 2, 3)[:rank]
    steps = window if strides is None else (strides,) * rank
    pairs = [(1, 1)] * rank if padding == 1 else padding
    pools = [
        (sx.nn.max_pool, linen.max_pool, {}),
        (sx.nn.avg_pool, linen.avg_pool, {}),
        (sx.nn.avg_pool, linen.avg_pool, {"count_include_pad": False}),
    ]

    def ours(x: Any) -> list[Any]:
        return [f(x, window, strides=strides, padding=padding, **more) for f, _, more in pools]

    def theirs(x: Any) -> list[Any]:
        return [f(x, window, strides=steps, padding=pairs, **more) for _, f, more in pools]

    @jax.jit
    def results_and_gradients(x: Any) -> Any:
        weights = floats(*jax.eval_shape(theirs, x)[0].shape)

        def each(pool: Any) -> Any:
            y, pull = jax.vjp(pool, x)
            seeds = np.eye(len(pools), dtype=np.float32)
            return y, [pull([seed * weights for seed in row]) for row in seeds]

        return each(ours), each(theirs)

    found, expected = results_and_gradients(x)
    jax.tree.map(close, found, expected)


def test_pooling_takes_integers_and_any_batch_dimensions():
    x = np.arange(24).reshape(2, 1, 3, 4, 1)
    assert sx.nn.max_pool(x, (3, 2)).ravel().tolist() == [9, 11, 21, 23]
    assert sx.nn.avg_pool(x[0, 0], (3, 2)).ravel().tolist() == [4.5, 6.5]


def test_pooling_keeps_batch_and_channels_split(mesh: Mesh):
    x = floats(4, 6, 6, 8)
    placed = jax.device_put(x, NamedSharding(mesh, PartitionSpec("data", None, None, "model")))
    windows = x.reshape(4, 3, 2, 3, 2, 8)
    for pool, expected in (
        (sx.nn.max_pool, windows.max((2, 4))),
        (sx.nn.avg_pool, windows.mean((2, 4))),
    ):
        close(jax.jit(lambda x, f=pool: f(x, (2, 2)))(placed), expected)


def test_sums_have_preferred_dtype_and_gradients_float32():
    layer = with_values(
        sx.nn.Conv(
            4, 8, 3, dtype="bfloat16", preferred_element_type="float32", precision="highest",
            rngs=sx.Rngs(0),
        )
    )  # fmt: skip
    x = floats(2, 9, 4).astype(jnp.bfloat16)
    function = sx.grad(lambda layer: (layer(x).sum(), layer(x)), has_aux=True)
    gradient, y = sx.jit(function)(layer)
    assert y.dtype == jnp.float32
    assert gradient["kernel"].dtype == jnp.float32


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"in_features": 0}, "in_features=0"),
        ({"kernel_size": (3, 0)}, r"kernel_size=\(3, 0\)"),
        ({"kernel_size": (1, 1, 1, 1)}, "1 to 3 dimensions"),
        ({"strides": (1, 2, 3)}, r"strides=\(1, 2, 3\)"),
        ({"padding": "same"}, "padding='same'"),
        ({"padding": -1}, "padding=-1"),
        ({"padding": [(1, 1)]}, "for each of 2 dimensions"),
        ({"padding": "CAUSAL"}, "kernels of one dimension"),
        ({"groups": 3}, "groups=3"),
        ({"kernel_axes": ("in", "out")}, "4 kernel_axes"),
        ({"precision": "best"}, "precision='best'"),
    ],
)
def test_invalid_convolution_options_are_refused(options: dict[str, Any], named: str):
    given = {"in_features": 4, "out_features": 8, "kernel_size": (3, 3), **options}
    with pytest.raises(LayerConfigError, match=named):
        sx.nn.Conv(**given, rngs=sx.Rngs(0))


def test_inputs_that_do_not_fit_are_refused():
    layer = sx.nn.Conv(4, 8, (3, 3), rngs=sx.Rngs(0))
    with pytest.raises(LayerInputError, match=r"Conv\(4, 8, \(3, 3\)\) takes .*window_1, 4"):
        layer(floats(2, 4, 9, 9))
    with pytest.raises(LayerInputError, match="Channels come last"):
        layer(floats(9, 4))
    with pytest.raises(LayerInputError, match="max_pool takes"):
        sx.nn.max_pool(floats(4), 2)
    reflecting = sx.nn.Conv(4, 8, 7, padding="REFLECT", rngs=sx.Rngs(0))
    with pytest.raises(LayerInputError, match="at least 4 along"):
        reflecting(floats(2, 3, 4))
    with pytest.raises(LayerConfigError, match="padding='REFLECT'"):
        sx.nn.ConvTranspose(4, 8, 3, padding="REFLECT", rngs=sx.Rngs(0))
    with pytest.raises(LayerConfigError, match=r"mask has the shape \(3,\)") as caught:
        sx.nn.Conv(4, 8, 3, mask=np.ones(3), rngs=sx.Rngs(0))
    mask = run_advice(
        caught.value, "np.broadcast_to(mask, (3, 4, 8))", {"np": np, "mask": np.ones((3, 1, 1))}
    )
    assert sx.nn.Conv(4, 8, 3, mask=mask, rngs=sx.Rngs(0)).mask.axes == ("window", "in", "out")


def test_grouped_convolution_with_split_kernel_equals_one_device() -> None:
    # Without the constraint in Conv, XLA's partitioner aborts the process in the gradient.
    def loss(conv: Any, x: Any) -> Any:
        return (conv(x) ** 2).sum()

    conv = with_values(sx.nn.Conv(8, 12, (3, 2), groups=2, rngs=sx.Rngs(0)))
    x = floats(4, 6, 6, 8)
    step = sx.jit(sx.value_and_grad(loss))
    value, gradients = step(conv, x)
    kinds = (jax.sharding.AxisType.Auto,) * 2
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=kinds)
    sx.shard(conv, mesh, {"in": "data", "out": "model"})
    split = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    with jax.set_mesh(mesh):
        found = step(conv, jax.device_put(x, split))
    np.testing.assert_allclose(found[0], value, rtol=1e-5)
    for one, other in zip(jax.tree.leaves(found[1]), jax.tree.leaves(gradients), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4)


def test_split_kernel_without_groups_stays_split(mesh: Mesh) -> None:
    conv = with_values(sx.nn.Conv(8, 12, (3, 2), rngs=sx.Rngs(0)))
    sx.shard(conv, mesh, {"out": "model"})
    x = jax.device_put(floats(4, 6, 6, 8), NamedSharding(mesh, PartitionSpec("data")))
    with jax.set_mesh(mesh):
        compiled = sx.jit(lambda conv, x: conv(x)).lower(conv, x).compile()
    assert "all-gather" not in compiled.as_text()


@pytest.mark.parametrize("pool", ["AdaptiveAvgPool", "AdaptiveMaxPool"])
@pytest.mark.parametrize("sizes", [(4, 3), (9, 1), (2, 11), (None, 7)], ids=str)
def test_adaptive_pools_reduce_the_documented_windows(pool: str, sizes: tuple[Any, ...]):
    x = floats(2, 9, 7, 3)
    counts = [size or length for size, length in zip(sizes, (9, 7), strict=True)]
    reduce = np.mean if pool == "AdaptiveAvgPool" else np.max
    expected = np.empty((2, *counts, 3), np.float32)
    for i, j in np.ndindex(*counts):
        rows, columns = (
            slice(place * length // count, -(-(place + 1) * length // count))
            for place, length, count in zip((i, j), (9, 7), counts, strict=True)
        )
        expected[:, i, j] = reduce(x[:, rows, columns], axis=(1, 2))
    close(call(getattr(sx.nn, pool)(sizes), x), expected)


def test_adaptive_pools_keep_dtypes_and_infinities():
    numbers = np.array([[1], [9], [-3]], np.int32)
    assert sx.nn.AdaptiveMaxPool(2)(numbers).tolist() == [[9], [9]]
    assert sx.nn.AdaptiveAvgPool(3)(numbers).dtype == jnp.float32
    assert sx.nn.AdaptiveMaxPool(1)(numbers > 5).tolist() == [[True]]
    ends = np.array([[np.inf], [1.0], [2.0]], jnp.bfloat16)
    assert sx.nn.AdaptiveAvgPool(3)(ends).dtype == jnp.bfloat16
    assert sx.nn.AdaptiveAvgPool(2)(ends).ravel().tolist() == [np.inf, 1.5]
    with pytest.raises(LayerConfigError, match="output_size=0"):
        sx.nn.AdaptiveAvgPool((2, 0))
    with pytest.raises(LayerInputError, match="at least one element"):
        sx.nn.AdaptiveAvgPool(2)(np.zeros((2, 0, 3)))
    with pytest.raises(LayerConfigError, match="given none"):
        sx.nn.AdaptiveAvgPool(())


def test_adaptive_pools_keep_the_batch_split(explicit_mesh: Mesh):
    x = floats(2, 5, 8)
    expected = sx.nn.AdaptiveAvgPool(2)(x)
    with jax.set_mesh(explicit_mesh):
        y = sx.nn.AdaptiveAvgPool(2)(jax.device_put(x, PartitionSpec("data", None, "model")))
    assert jax.typeof(y).sharding.spec == PartitionSpec("data", None, "model")
    close(y, expected)


@needs("torch")
@pytest.mark.parametrize("pool", ["AdaptiveAvgPool", "AdaptiveMaxPool"])
def test_adaptive_pools_and_their_gradients_equal_pytorch(pool: str):
    import torch

    x, sizes = floats(2, 9, 7, 3), (4, 10)
    theirs = torch.tensor(x.transpose(0, 3, 1, 2), requires_grad=True)
    expected = getattr(torch.nn, f"{pool}2d")(sizes)(theirs)
    expected.sin().sum().backward()
    layer = getattr(sx.nn, pool)(sizes)
    found, gradient = jax.value_and_grad(lambda x: jnp.sin(layer(x)).sum())(x)
    close(layer(x), expected.detach().numpy().transpose(0, 2, 3, 1))
    close(found, expected.detach().sin().sum(), 1e-4)
    close(gradient, theirs.grad.numpy().transpose(0, 2, 3, 1))
