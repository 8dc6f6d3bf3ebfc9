# SPDX-License-Identifier: Apache-2.0
"""Low-rank adapters: nothing at first, trained alone, merged to the same function."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import shardax as sx
from shardax import errors
from shardax.surgery import LoRA, lora, merge_lora
from tests.advice import run_advice
from tests.tools.surgery.decoders import TOKENS, close, decoder, in_every_layout, logits, run
from tests.values import with_values


def moved(adapted: Any) -> Any:
    """Draws all adapters anew, so that they do something."""
    for number, (_, variable) in enumerate(sx.iter_variables(adapted, "lora")):
        drawn = np.random.default_rng(number).normal(size=variable.shape)
        variable.value = (0.3 * drawn).astype(variable.dtype)
    return adapted


def normal(*shape: int) -> np.ndarray:
    return np.random.default_rng(5).normal(size=shape).astype(np.float32)


merge = sx.jit(merge_lora)


@in_every_layout
def test_decoder_adapters_start_at_zero_and_merge(scanned: bool, tied: bool, remat: Any) -> None:
    model = decoder(scanned, tied, remat)
    adapted = lora(sx.select(model), rank=2)
    np.testing.assert_array_equal(run(adapted), run(model))
    moved(adapted)
    found = np.asarray(run(adapted))
    assert np.abs(found - logits(tied)).max() > 0.1
    merged = merge(adapted)
    assert sx.graphdef(merged) == sx.graphdef(model)
    close(run(merged), found)


def test_stack_adapters_equal_those_of_its_layers() -> None:
    layers, stacked = (lora(sx.select(decoder(scanned)), rank=2) for scanned in (False, True))
    for path, variable in sx.iter_variables(moved(stacked), "lora"):
        for i in range(2) if path[:2] == ("layers", "stacked") else ():
            alone = sx.select(layers).at_keypaths(("layers", i, *path[2:])).get()
            alone.value = np.asarray(variable.value)[i]
    layers.head.a.value, layers.head.b.value = stacked.head.a.value, stacked.head.b.value
    close(run(layers), run(stacked))
    close(run(merge(layers)), run(merge(stacked)))


KERNELS = [
    (lambda: sx.nn.Linear(4, 3, rngs=sx.Rngs(0)), (4,), [(4, 2), (2, 3)]),
    (lambda: sx.nn.Linear(4, (3, 5), rngs=sx.Rngs(0)), (4,), [(4, 2), (2, 3, 5)]),
    (lambda: sx.nn.Linear((4, 3), 5, rngs=sx.Rngs(0)), (4, 3), [(4, 3, 2), (2, 5)]),
    (
        lambda: sx.nn.Einsum("...te,ehd->...thd", (4, 3, 5), rngs=sx.Rngs(0)),
        (6, 4),
        [(4, 2), (2, 3, 5)],
    ),
    (  # many kernels: one for each group
        lambda: sx.nn.Einsum("gte,geh->gth", (3, 4, 5), rngs=sx.Rngs(0)),
        (3, 6, 4),
        [(3, 4, 2), (3, 2, 5)],
    ),
    (
        lambda: sx.nn.Conv(4, 6, (3, 2), strides=2, dilation=2, rngs=sx.Rngs(0)),
        (9, 8, 4),
        [(3, 2, 4, 2), (2, 6)],
    ),
    (
        lambda: sx.nn.Conv(4, 6, 3, groups=2, padding="CAUSAL", rngs=sx.Rngs(0)),
        (9, 4),
        [(3, 2, 2), (2, 6)],
    ),
    (
        lambda: sx.nn.ConvTranspose(4, 6, (2, 3), strides=2, groups=2, rngs=sx.Rngs(0)),
        (4, 5, 4),
        [(2, 3, 2, 2), (2, 6)],
    ),
]


@pytest.mark.parametrize(("make", "shape", "shapes"), KERNELS)
def test_kernels_get_a_term_of_given_rank(
    make: Any, shape: tuple[int, ...], shapes: list[tuple[int, ...]]
) -> None:
    layer = with_values(make())
    adapted = moved(lora(sx.select(layer), 2, scale=0.5))
    assert [adapted.a.shape, adapted.b.shape] == shapes
    batch = () if isinstance(layer, sx.nn.Einsum) and not layer.equation.ellipsis else (7,)
    x = normal(*batch, *shape)

    @sx.jit
    def both(adapted: Any) -> Any:
        merged = merge_lora(adapted)
        return merged, adapted(x), merged(x)

    merged, found, expected = both(adapted)
    close(found, expected)

    # By hand: the kernel as matrices, with a and b between them.
    kernels = shapes[0][0] if len(shapes[0]) == len(shapes[1]) == 3 and not batch else 1
    after, before, *terms = (
        np.asarray(variable.value)
        for variable in (merged.kernel, layer.kernel, adapted.a, adapted.b)
    )
    change = (after - before).reshape(kernels, -1)
    a, b = terms[0].reshape(kernels, -1, 2), terms[1].reshape(kernels, 2, -1)
    close(change, 0.5 * (a @ b).reshape(kernels, -1))
    assert [np.linalg.matrix_rank(matrix) for matrix in a @ b] == [2] * kernels


def test_lora_trains_only_adapters_of_chosen_layers() -> None:
    model = decoder(scanned=True)
    before = {path: np.asarray(value) for path, value in sx.state(model).flat().items()}
    chosen = sx.select(model).at_instances_of(sx.nn.MultiHeadAttention).at(lambda a: (a.q, a.v))
    adapted = lora(chosen, rank=2)
    optimizer = sx.train.Optimizer(adapted, optax.adam(0.1), wrt="lora")

    @sx.jit
    def step(adapted: Any, optimizer: Any) -> jax.Array:
        loss = lambda model: (model(TOKENS) ** 2).mean()  # noqa: E731
        value, grads = sx.value_and_grad(loss, wrt="lora")(adapted)
        optimizer.update(grads)
        return value

    losses = [float(step(adapted, optimizer)) for _ in range(5)]
    assert losses[-1] < losses[0]
    assert {path[-2:] for path in sx.state(adapted, "lora").flat()} == {
        ("q", "a"), ("q", "b"), ("v", "a"), ("v", "b"),
    }  # fmt: skip
    after = sx.state(model).flat()
    assert after.keys() == before.keys()
    for path, value in after.items():
        np.testing.assert_array_equal(value, before[path])


def test_adapters_have_axes_and_layout_of_kernels() -> None:
    mesh = jax.make_mesh((4, 2), ("data", "model"))
    model = sx.shard(decoder(scanned=True), mesh, sx.models.DECODER_RULES)
    adapted = lora(sx.select(model).at_instances_of(sx.nn.MultiHeadAttention), rank=2)
    q = adapted.layers.stacked.attn.q
    assert (q.a.axes, q.b.axes) == (
        ("layers", "embed", None),
        ("layers", None, "heads", "head_dim"),
    )
    sx.shard(adapted, mesh, sx.models.DECODER_RULES)
    assert q.b.sharding.spec == PartitionSpec(None, None, "model", None)
    sx.shard(moved(adapted), mesh, sx.models.DECODER_RULES)
    with jax.set_mesh(mesh):
        close(*sx.jit(lambda adapted: (merge_lora(adapted)(TOKENS), adapted(TOKENS)))(adapted))


def test_dtypes_stay_those_of_the_layer() -> None:
    layer = with_values(sx.nn.Linear(4, 3, param_dtype=jnp.bfloat16, rngs=sx.Rngs(0)))
    adapted = moved(lora(sx.select(layer), 2))
    kernel, y, expected = sx.eval_shape(
        lambda adapted, layer, x: (merge_lora(adapted).kernel.value, adapted(x), layer(x)),
        adapted,
        layer,
        jax.ShapeDtypeStruct((2, 4), jnp.bfloat16),
    )
    assert {adapted.a.dtype, adapted.b.dtype, kernel.dtype} == {jnp.dtype("bfloat16")}
    assert y.dtype == expected.dtype


def test_tied_layer_has_one_adapter() -> None:
    linear = with_values(sx.nn.Linear(3, 3, rngs=sx.Rngs(0)))
    model = sx.nn.Sequential(linear, jnp.tanh, linear)
    adapted = moved(lora(sx.select(model), 1))
    assert adapted.layers[0] is adapted.layers[2]
    merged = merge_lora(adapted)
    assert merged.layers[0] is merged.layers[2]
    x = np.ones(3, np.float32)
    close(*sx.jit(lambda merged, adapted: (merged(x), adapted(x)))(merged, adapted))


def test_ensemble_over_first_axis_is_adapted() -> None:
    keys = jax.random.split(jax.random.key(0), 5)
    make = sx.jit(sx.vmap(lambda key: sx.nn.Linear(4, 3, rngs=sx.Rngs(params=key))))
    adapted = moved(lora(sx.select(make(keys)), 2))
    call = sx.vmap(lambda layer, x: layer(x), in_axes=(0, None))
    x = np.arange(4, dtype=np.float32)
    close(*sx.jit(lambda adapted: (call(adapted, x), call(merge_lora(adapted), x)))(adapted))


def test_ensemble_over_last_axis_is_refused() -> None:
    keys = jax.random.split(jax.random.key(0), 5)
    last = sx.vmap(lambda key: sx.nn.Linear(4, 3, rngs=sx.Rngs(params=key)), out_axes=-1)
    mapped = sx.nn.Sequential(sx.jit(last)(keys))
    with pytest.raises(errors.SelectionError, match=r"\.layers\[0\].*out_axes=0"):
        lora(sx.select(mapped), 2)


def test_second_adapter_is_refused_beside_others_not() -> None:
    mlp = sx.nn.MLP(4, 6, rngs=sx.Rngs(0))
    adapted = lora(sx.select(mlp).at(lambda mlp: mlp.up), 2)
    with pytest.raises(errors.SelectionError, match=r"\.up has an adapter already") as caught:
        lora(sx.select(adapted), 2)
    merged = run_advice(caught.value, "sx.surgery.merge_lora(model)", {"sx": sx, "model": adapted})
    assert lora(sx.select(merged), 2) is not None
    twice = lora(sx.select(adapted).at(lambda mlp: mlp.down), 2)
    assert sx.select(twice).at_instances_of(LoRA).count() == 2


def test_lora_without_linear_layer_or_rank_is_refused() -> None:
    with pytest.raises(errors.SelectionError):
        lora(sx.select(sx.nn.RMSNorm(4)), 2)
    with pytest.raises(errors.LayerConfigError, match="rank"):
        lora(sx.select(sx.nn.MLP(4, 6, rngs=sx.Rngs(0))), 0)


# --- over meshes ----------------------------------------------------------------------------------

KINDS = pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])


def assert_gradients_close(found: Any, expected: Any) -> None:
    assert found.flat().keys() == expected.flat().keys()
    for path, gradient in expected.flat().items():
        np.testing.assert_allclose(found.flat()[path], gradient, rtol=1e-4, atol=1e-4)


@sx.jit
def graded_and_merged(adapted: Any, x: Any) -> Any:
    """Result and gradients of the adapters, and the result of the merged model."""

    def loss(adapted: Any) -> Any:
        y = adapted(x)
        return (y**2).sum(), y

    (_, y), gradients = sx.value_and_grad(loss, wrt="lora", has_aux=True)(adapted)
    return y, gradients, merge_lora(adapted)(x)


CONV_INPUT = normal(4, 6, 6, 8)


def adapted_convs(groups: int) -> Any:
    make = lambda: sx.nn.Conv(8, 8, (3, 3), groups=groups, rngs=sx.Rngs(0))  # noqa: E731
    return moved(lora(sx.select(with_values(sx.nn.Stack(make, 2))), 2))


@functools.cache
def convs_on_one_device(groups: int) -> Any:
    return graded_and_merged(adapted_convs(groups), CONV_INPUT)


@KINDS
@pytest.mark.parametrize("groups", [1, 2])
def test_adapters_of_stacked_convolutions_run_over_meshes(kind: Any, groups: int) -> None:
    expected, gradients, merged = convs_on_one_device(groups)
    close(merged, expected)
    assert {path[-1] for path in gradients.flat()} == {"a", "b"}
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(kind, kind))
    adapted = sx.shard(adapted_convs(groups), mesh, [("out", "model")])
    assert adapted.stacked.b.value.sharding.spec[-1] == "model"
    with jax.set_mesh(mesh):
        spec = PartitionSpec("data", None, None, "model")
        placed = jax.device_put(CONV_INPUT, NamedSharding(mesh, spec))
        y, found, merged = graded_and_merged(adapted, placed)
    close(y, expected)
    close(merged, expected)
    assert_gradients_close(found, gradients)


EXPERTS_INPUT = normal(4, 6, 4)
EXPERTS_MASK = np.broadcast_to(np.arange(6) < 5, (4, 6))


def stacked_experts(dispatch: Any) -> Any:
    sizes = {"num_experts": 4, "dispatch": dispatch}
    return with_values(sx.nn.Stack(lambda: sx.nn.MoE(4, 8, rngs=sx.Rngs(0), **sizes), 2))


def balanced_loss(model: Any, x: Any) -> Any:
    y = model(x, mask=EXPERTS_MASK)
    return (y**2).sum() + sx.nn.load_balance_loss(model), y


@pytest.mark.parametrize("dispatch", ["dense", "dropless", "capacity"])
def test_lora_has_an_adapter_for_each_kernel_of_experts(dispatch: Any) -> None:
    stack, x = stacked_experts(dispatch), EXPERTS_INPUT
    adapted = lora(sx.select(stack), 2, scale=0.5)
    kernels = {(name, part) for name in "ab" for part in ("gate", "up", "down")}
    assert {path[1:] for path in sx.state(adapted, "lora").flat()} == kernels
    assert adapted.stacked.b["down"].axes == ("layers", "expert", None, "embed")

    graded = sx.jit(sx.value_and_grad(balanced_loss, wrt="lora", has_aux=True))
    plain = sx.jit(balanced_loss)
    np.testing.assert_array_equal(graded(adapted, x)[0][1], plain(stack, x)[1])
    (value, expected), gradients = graded(moved(adapted), x)
    merged = merge(adapted)
    assert sx.graphdef(merged) == sx.graphdef(stack)
    total, y = plain(merged, x)
    close(y, expected)
    close(total, value)

    @sx.jit
    def over_a_mesh(adapted: Any, x: Any) -> Any:
        result = sx.value_and_grad(balanced_loss, wrt="lora", has_aux=True)(adapted, x)
        return *result, merge_lora(adapted)(x, mask=EXPERTS_MASK)

    for kind in (AxisType.Auto, AxisType.Explicit):
        mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(kind, kind))
        sharded = sx.shard(sx.clone(adapted), mesh, [("expert", "model")])
        with jax.set_mesh(mesh):
            placed = jax.device_put(x, NamedSharding(mesh, PartitionSpec("data")))
            (_, y), found, merged = over_a_mesh(sharded, placed)
        close(y, expected)
        close(merged, expected)
        assert_gradients_close(found, gradients)


def test_router_is_adapted_only_where_selected() -> None:
    stack = stacked_experts("dense")
    router = lora(sx.select(stack).at(lambda stack: stack.stacked.router), 2)
    assert {path[:-1] for path in sx.state(router, "lora").flat()} == {("stacked", "router")}


# --- tables ---------------------------------------------------------------------------------------

LOOKED_UP, VECTORS = np.array([[1, -1, 0], [7, 8, 3]]), normal(4, 2, 4)


@sx.jit
def use_table(model: Any, tokens: Any) -> Any:
    return model(tokens), model.attend(VECTORS)


def test_table_is_adapted_only_where_selected() -> None:
    embed = sx.nn.Embed(8, 4, rngs=sx.Rngs(0))
    model = sx.nn.Sequential(embed, sx.nn.Linear(4, 3, rngs=sx.Rngs(0)))
    found = sx.state(lora(sx.select(model), 2), "lora").flat()
    assert {path[:2] for path in found} == {("layers", 1)}


def test_table_adapter_starts_at_zero_and_is_trained() -> None:
    embed = with_values(sx.nn.Embed(8, 4, rngs=sx.Rngs(0)))
    adapted = lora(sx.select(embed), 2, scale=0.5)
    for found, expected in zip(
        use_table(adapted, LOOKED_UP), use_table(embed, LOOKED_UP), strict=True
    ):
        np.testing.assert_array_equal(found, expected)  # both NaN where there is no row
    loss = lambda model: (model(np.arange(8)) ** 2).sum()  # noqa: E731
    gradients = sx.jit(sx.grad(loss, wrt="lora"))(adapted).flat()
    rates = {path: np.abs(gradient).max() for path, gradient in gradients.items()}
    assert rates["a",] > 0.1 and rates["b",] == 0  # of the pair, b is drawn


@KINDS
def test_table_adapter_equals_the_merged_table(kind: Any) -> None:
    embed = with_values(sx.nn.Embed(8, 4, rngs=sx.Rngs(0)))
    adapted = moved(lora(sx.select(embed), 2, scale=0.5))
    looked_up, result = use_table(merge(adapted), LOOKED_UP)
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(kind, kind))
    over_mesh = sx.shard(sx.clone(adapted), mesh, [("vocab", "data"), ("embed", "model")])
    rows = jax.device_put(LOOKED_UP, NamedSharding(mesh, PartitionSpec("data")))
    found = [use_table(adapted, LOOKED_UP)]
    with jax.set_mesh(mesh):
        found.append(use_table(over_mesh, rows))
    for vectors, products in found:
        np.testing.assert_allclose(vectors, looked_up, rtol=1e-5, atol=1e-6)
        close(products, result)


# --- what is adapted otherwise, or not ------------------------------------------------------------


@pytest.mark.parametrize(
    "base", [sx.nn.Linear, sx.nn.MoE, sx.nn.Embed], ids=lambda base: base.__name__
)
def test_layer_with_its_own_call_is_refused(base: Any) -> None:
    class Doubled(base):
        def __call__(self, x: Any, **options: Any) -> Any:
            return 2 * super().__call__(x, **options)

    options = {"num_experts": 2} if base is sx.nn.MoE else {}
    layer = Doubled(4, 3, rngs=sx.Rngs(0), **options)
    model = sx.nn.Sequential(layer)
    with pytest.raises(errors.SelectionError, match=r"\.layers\[0\] is a Doubled, whose __call__"):
        lora(sx.select(model).at(lambda model: model.layers[0]), 2)
    with pytest.raises(errors.SelectionError, match="Doubled"):
        LoRA(layer, 2)


@pytest.mark.parametrize("base", [sx.nn.Linear, sx.nn.Embed], ids=lambda base: base.__name__)
def test_mask_reaches_no_layer_that_takes_none(base: Any) -> None:
    adapted = LoRA(base(4, 3, rngs=sx.Rngs(0)), 2)
    with pytest.raises(TypeError, match="mask"):
        adapted(np.ones((2, 4), int), mask=np.ones(2))


def test_scale_of_experts_keeps_float32_precision() -> None:
    sizes = {"num_experts": 2, "dtype": jnp.float32, "rngs": sx.Rngs(0)}
    layer = with_values(sx.nn.MoE(4, 8, param_dtype=jnp.bfloat16, **sizes))
    adapted = moved(lora(sx.select(layer), 2, scale=1 / 3))
    whole = lora(sx.select(sx.nn.MoE(4, 8, **sizes)), 2, scale=1 / 3)
    for path, variable in sx.iter_variables(adapted, sx.Param):
        sx.select(whole).at_keypaths(path).get().value = np.asarray(variable.value, np.float32)
    x = normal(3, 4)
    close(*sx.jit(lambda adapted, whole: (adapted(x), whole(x)))(adapted, whole))


@pytest.mark.parametrize(
    ("inputs", "outputs", "batch"),
    [
        ({"embed": 4}, {"heads": 3, "head": 2}, {}),
        ({"embed": 4}, {"embed": 4}, {}),
        ({"embed": 4}, {"mlp": 5}, {"expert": 2}),
        ({"heads": 3, "head": 2}, {}, {}),
    ],
    ids=str,
)
def test_named_layers_are_adapted_and_merged(
    inputs: dict[str, int], outputs: dict[str, int], batch: dict[str, int]
) -> None:
    layer = with_values(sx.named.Linear(inputs, outputs, batch_axes=batch, rngs=sx.Rngs(0)))
    model = sx.nn.Sequential(layer, with_values(sx.nn.Linear(4, 4, rngs=sx.Rngs(1))))
    adapted = sx.surgery.lora(sx.select(model), rank=2, scale=0.5, rngs=sx.Rngs(2))
    assert [type(part).__name__ for part in adapted.layers] == ["LoRA", "LoRA"]
    sizes = {**inputs, **batch, "row": 3}
    x = sx.named.NamedArray(normal(*sizes.values()), tuple(sizes))
    call = sx.jit(lambda layer, x: layer(x))
    first, kernel = adapted.layers[0], layer.kernel
    axes = kernel.axes or ()
    plain = call(layer, x)
    names = tuple(plain.axes)
    np.testing.assert_array_equal(call(first, x).unwrap(*names), plain.unwrap(*names))
    first.b.value = normal(*first.b.shape)
    count, end = len(batch), len(batch) + len(inputs)
    assert first.a.axes == (*axes[:end], None)
    assert first.b.axes == (*axes[:count], None, *axes[end:])
    lead = kernel.shape[:count]
    a = np.asarray(first.a.value).reshape(*lead, -1, 2)
    b = np.asarray(first.b.value).reshape(*lead, 2, -1)
    merged = merge(adapted)
    total = np.asarray(kernel.value) + 0.5 * (a @ b).reshape(kernel.shape)
    np.testing.assert_allclose(merged.layers[0].kernel.value, total, rtol=1e-5, atol=1e-6)
    expected = call(merged.layers[0], x).unwrap(*names)
    np.testing.assert_allclose(call(first, x).unwrap(*names), expected, rtol=1e-4, atol=1e-5)
    assert not np.allclose(expected, plain.unwrap(*names))


# --- with sizes: around any layer, or alone ---


class Cubed(sx.Module):
    """A layer of a user, with an argument of its own."""

    def __init__(self, rngs: sx.Rngs) -> None:
        self.weight = sx.Param(np.full((8, 4), 0.5, np.float32))

    def __call__(self, x: Any, power: int = 3, *, shift: float = 0.0) -> Any:
        return (x @ self.weight.value) ** power + shift


def sized(layer: Any, **options: Any) -> Any:
    adapter = sx.surgery.LoRA(layer, 2, 0.5, in_features=8, out_features=4, **options)
    return with_values(adapter)


def test_sized_adapters_add_their_term_to_any_layer() -> None:
    x = np.arange(24, dtype=np.float32).reshape(3, 8) / 24
    layer, adapter = (
        Cubed(sx.Rngs(0)),
        sx.surgery.LoRA(Cubed(sx.Rngs(0)), 2, 0.5, in_features=8, out_features=4),
    )
    np.testing.assert_array_equal(adapter(x, 2, shift=1.0), layer(x, 2, shift=1.0))
    adapter.b.value = b = np.arange(8, dtype=np.float32).reshape(2, 4)
    expected = np.asarray(layer(x)) + 0.5 * x @ np.asarray(adapter.a.value) @ b
    np.testing.assert_allclose(sx.jit(lambda m, x: m(x))(adapter, x), expected, rtol=1e-5)
    gradients = sx.grad(lambda adapter: adapter(x).sum(), wrt="lora")(adapter)
    assert sorted(gradients.flat()) == [("a",), ("b",)]
    assert (adapter.a.axes, adapter.b.axes) == (("in", None), (None, "out"))


def test_adapters_alone_are_layers_and_merge_into_one() -> None:
    x = np.ones((3, 8), np.float32)
    model = sx.nn.Sequential(sized(None), jnp.tanh)
    merged = sx.surgery.merge_lora(model)
    assert type(merged.layers[0]) is sx.nn.Linear
    assert merged.layers[0].bias is None
    np.testing.assert_allclose(merged(x), model(x), rtol=1e-5)
    narrow = sized(None, param_dtype=jnp.bfloat16)
    with jax.numpy_dtype_promotion("strict"):
        assert narrow(x.astype(jnp.bfloat16)).dtype == jnp.bfloat16


def test_lora_of_given_sizes_refuses_what_it_cannot_do() -> None:
    names: dict[str, Any] = {"sx": sx, "layer": Cubed(sx.Rngs(0))}
    with pytest.raises(errors.SelectionError, match="no kernel that LoRA knows") as caught:
        sx.surgery.LoRA(names["layer"], 2)
    code = "sx.surgery.LoRA(layer, 2, in_features=8, out_features=4)"
    adapter = run_advice(caught.value, code, names)
    assert adapter(np.ones((3, 8))).shape == (3, 4)
    with pytest.raises(errors.SelectionError, match="around a Cubed") as caught:
        sx.surgery.merge_lora(adapter)
    names["model"] = sx.nn.MLP(8, 4, rngs=sx.Rngs(0))
    run_advice(caught.value, "sx.surgery.lora(sx.select(model), rank=2)", names)
    with pytest.raises(errors.SelectionError, match="a Module that is called") as caught:
        sx.surgery.LoRA(3, 2, in_features=8, out_features=4)
    code = "sx.surgery.LoRA(None, 2, in_features=8, out_features=4)"
    assert run_advice(caught.value, code, names)(np.ones((3, 8))).shape == (3, 4)
    with pytest.raises(errors.LayerConfigError, match="out_features=None"):
        sx.surgery.LoRA(None, 2, in_features=8)
    conv = sx.nn.Conv(4, 4, 3, mask=np.ones((3, 4, 4)), rngs=sx.Rngs(0))
    with pytest.raises(errors.SelectionError, match="Conv with a mask of its kernel"):
        sx.surgery.lora(sx.select([conv]), rank=2)


def test_adapters_follow_an_ellipsis_inside_an_equation() -> None:
    layer = sx.nn.Einsum("ab...,bcd->acd...", (8, 4, 2), rngs=sx.Rngs(0))
    adapter = with_values(sx.surgery.LoRA(layer, 2))
    x = np.random.default_rng(0).normal(size=(2, 8, 3, 5)).astype(np.float32)
    np.testing.assert_allclose(adapter.merged()(x), adapter(x), rtol=1e-4, atol=1e-4)
