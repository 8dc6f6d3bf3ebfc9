# SPDX-License-Identifier: Apache-2.0
"""Low-rank adapters: nothing at first, trained alone, merged to the same function."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from tests.surgery.decoders import TOKENS, close, decoder, in_every_layout, run

import shardax as sx
from shardax import errors
from shardax.surgery import LoRA, lora, merge_lora


def moved(adapted: Any) -> Any:
    """Draws all adapters anew, so that they do something."""
    for number, (_, variable) in enumerate(sx.iter_variables(adapted, "lora")):
        drawn = np.random.default_rng(number).normal(size=variable.shape)
        variable.value = jnp.asarray(0.3 * drawn, variable.dtype)
    return adapted


@in_every_layout
def test_adapters_of_a_decoder_begin_with_its_results_and_merge_into_its_structure(
    scanned: bool, tied: bool, remat: Any
) -> None:
    model = decoder(scanned, tied, remat)
    adapted = lora(sx.select(model), rank=3)
    assert (run(adapted) == run(model)).all()
    moved(adapted)
    assert jnp.abs(run(adapted) - run(model)).max() > 0.1
    merged = merge_lora(adapted)
    assert sx.graphdef(merged) == sx.graphdef(model)
    close(run(merged), run(adapted))
    close(sx.jit(run)(merged), sx.jit(run)(adapted))


def test_a_stack_is_adapted_as_its_layers_are() -> None:
    layers, stacked = (lora(sx.select(decoder(scanned)), rank=2) for scanned in (False, True))
    for path, variable in sx.iter_variables(moved(stacked), "lora"):
        for i in range(2) if path[:2] == ("layers", "stacked") else ():
            alone = sx.select(layers).at_keypaths(("layers", i, *path[2:])).get()
            alone[...] = variable[i]
    layers.head.a[...], layers.head.b[...] = stacked.head.a[...], stacked.head.b[...]
    close(run(layers), run(stacked))
    close(run(merge_lora(layers)), run(merge_lora(stacked)))


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
def test_kernels_of_any_rank_get_a_term_of_the_rank_asked_for(
    make: Any, shape: tuple[int, ...], shapes: list[tuple[int, ...]]
) -> None:
    layer = make()
    adapted = moved(lora(sx.select(layer), 2, scale=0.5))
    assert [adapted.a.shape, adapted.b.shape] == shapes
    merged = merge_lora(adapted)
    batch = () if isinstance(layer, sx.nn.Einsum) and not layer.equation.ellipsis else (7,)
    x = np.random.default_rng(5).normal(size=(*batch, *shape)).astype(np.float32)
    close(*sx.jit(lambda adapted, merged: (adapted(x), merged(x)))(adapted, merged))

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


def test_only_the_adapters_of_chosen_layers_are_trained() -> None:
    model = decoder(scanned=True)
    before = sx.state(model).flat()
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
    for path, value in sx.state(model).flat().items():
        assert (value == before[path]).all()


def test_adapters_have_the_axis_names_of_their_kernels_and_are_laid_out_by_them() -> None:
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
        close(sx.jit(run)(merge_lora(adapted)), sx.jit(run)(adapted))


def test_dtypes_stay_those_of_the_layer() -> None:
    layer = sx.nn.Linear(4, 3, param_dtype=jnp.bfloat16, rngs=sx.Rngs(0))
    adapted = moved(lora(sx.select(layer), 2))
    merged = merge_lora(adapted)
    assert {adapted.a.dtype, adapted.b.dtype, merged.kernel.dtype} == {jnp.dtype("bfloat16")}
    x = jnp.ones((2, 4), jnp.bfloat16)
    assert adapted(x).dtype == layer(x).dtype


def test_a_tied_layer_has_one_adapter() -> None:
    linear = sx.nn.Linear(3, 3, rngs=sx.Rngs(0))
    model = sx.nn.Sequential(linear, jnp.tanh, linear)
    adapted = moved(lora(sx.select(model), 1))
    assert adapted.layers[0] is adapted.layers[2]
    merged = merge_lora(adapted)
    assert merged.layers[0] is merged.layers[2]
    close(merged(jnp.ones(3)), adapted(jnp.ones(3)))


def test_an_ensemble_mapped_over_the_first_axis_is_adapted_member_by_member() -> None:
    make = sx.vmap(lambda key: sx.nn.Linear(4, 3, rngs=sx.Rngs(params=key)))
    ensemble = make(jax.random.split(jax.random.key(0), 5))
    adapted = moved(lora(sx.select(ensemble), 2))
    call = sx.vmap(lambda layer, x: layer(x), in_axes=(0, None))
    close(call(adapted, jnp.ones(4)), call(merge_lora(adapted), jnp.ones(4)))
    last = sx.vmap(lambda key: sx.nn.Linear(4, 3, rngs=sx.Rngs(params=key)), out_axes=-1)
    mapped = sx.nn.Sequential(last(jax.random.split(jax.random.key(0), 5)))
    with pytest.raises(errors.SelectionError, match=r"\.layers\[0\].*out_axes=0"):
        lora(sx.select(mapped), 2)


def test_what_has_an_adapter_already_or_no_linear_layer_is_refused() -> None:
    mlp = sx.nn.MLP(4, 6, rngs=sx.Rngs(0))
    adapted = lora(sx.select(mlp).at(lambda mlp: mlp.up), 2)
    with pytest.raises(errors.SelectionError, match=r"\.up has an adapter already"):
        lora(sx.select(adapted), 2)
    twice = lora(sx.select(adapted).at(lambda mlp: mlp.down), 2)
    assert sx.select(twice).at_instances_of(LoRA).count() == 2
    with pytest.raises(errors.EmptySelectionError):
        lora(sx.select(sx.nn.RMSNorm(4)), 2)
    with pytest.raises(errors.LayerConfigError, match="rank"):
        lora(sx.select(mlp), 0)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("groups", [1, 2])
def test_adapters_of_convolutions_run_over_meshes_in_stacks_and_are_trained_alone(
    kind: Any, groups: int
) -> None:
    rngs = sx.Rngs(0)
    stack = sx.nn.Stack(lambda: sx.nn.Conv(8, 8, (3, 3), groups=groups, rngs=rngs), 2)
    adapted = moved(lora(sx.select(stack), 2))
    x = jax.random.normal(jax.random.key(5), (4, 6, 6, 8))

    def loss(adapted: Any, x: Any) -> Any:
        y = adapted(x)
        return (y**2).sum(), y

    graded = sx.jit(sx.value_and_grad(loss, wrt="lora", has_aux=True))
    (_, expected), gradients = graded(adapted, x)
    close(merge_lora(adapted)(x), expected)
    assert {path[-1] for path in gradients.flat()} == {"a", "b"}
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(kind, kind))
    sx.shard(adapted, mesh, [("out", "model")])
    assert adapted.stacked.b.value.sharding.spec[-1] == "model"
    with jax.set_mesh(mesh):
        placed = jax.device_put(x, NamedSharding(mesh, PartitionSpec("data", None, None, "model")))
        (_, y), found = graded(adapted, placed)
        close(y, expected)
        for path, gradient in gradients.flat().items():
            np.testing.assert_allclose(found.flat()[path], gradient, rtol=1e-4, atol=1e-4)
        close(sx.jit(lambda model, x: model(x))(merge_lora(adapted), placed), expected)


@pytest.mark.parametrize("dispatch", ["dense", "dropless", "capacity"])
def test_each_kernel_of_experts_has_an_adapter_and_the_router_none(dispatch: Any) -> None:
    rngs, sizes = sx.Rngs(0), {"num_experts": 4, "dispatch": dispatch}
    stack = sx.nn.Stack(lambda: sx.nn.MoE(4, 8, rngs=rngs, **sizes), 2)
    adapted = lora(sx.select(stack), 2, scale=0.5)
    mask = jnp.arange(6) < 5
    x = jax.random.normal(jax.random.key(5), (4, 6, 4))
    assert (adapted(x) == stack(x)).all()
    moved(adapted)
    kernels = {(name, part) for name in "ab" for part in ("gate", "up", "down")}
    assert {path[1:] for path in sx.state(adapted, "lora").flat()} == kernels
    assert adapted.stacked.b["down"].axes == ("layers", "expert", None, "embed")

    def loss(model: Any, x: Any) -> Any:
        y = model(x, mask=jnp.broadcast_to(mask, x.shape[:-1]))
        return (y**2).sum() + sx.nn.load_balance_loss(model), y

    graded = sx.jit(sx.value_and_grad(loss, wrt="lora", has_aux=True))
    (value, expected), gradients = graded(adapted, x)
    merged = merge_lora(adapted)
    assert sx.graphdef(merged) == sx.graphdef(stack)
    total, y = sx.jit(loss)(merged, x)
    close(y, expected)
    close(total, value)
    for kind in (AxisType.Auto, AxisType.Explicit):
        mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(kind, kind))
        over_mesh = sx.shard(sx.clone(adapted), mesh, [("expert", "model")])
        with jax.set_mesh(mesh):
            placed = jax.device_put(x, NamedSharding(mesh, PartitionSpec("data")))
            (_, y), found = graded(over_mesh, placed)
            close(y, expected)
            for path, gradient in gradients.flat().items():
                np.testing.assert_allclose(found.flat()[path], gradient, rtol=1e-4, atol=1e-4)
            close(sx.jit(lambda model, x: model(x, mask=None))(merge_lora(over_mesh), placed), y)
    router = lora(sx.select(stack).at(lambda stack: stack.stacked.router), 2)
    assert {path[:-1] for path in sx.state(router, "lora").flat()} == {("stacked", "router")}


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_a_table_is_adapted_where_it_is_selected_and_its_transpose_with_it(kind: Any) -> None:
    embed = sx.nn.Embed(8, 4, rngs=sx.Rngs(0))
    head = sx.nn.Linear(4, 3, rngs=sx.Rngs(0))
    model = sx.nn.Sequential(embed, head)
    assert {path[:2] for path in sx.state(lora(sx.select(model), 2), "lora").flat()} == {
        ("layers", 1)
    }
    adapted = lora(sx.select(embed), 2, scale=0.5)
    tokens = jnp.array([[1, -1, 0], [7, 8, 3]])
    assert np.array_equal(adapted(tokens), embed(tokens), equal_nan=True)
    rates = jax.tree.map(lambda g: float(jnp.abs(g).max()), sx.grad(
        lambda model: (model(jnp.arange(8)) ** 2).sum(), wrt="lora")(adapted).flat())  # fmt: skip
    assert rates[("a",)] > 0.1 and rates[("b",)] == 0  # of the pair, b is drawn
    merged = merge_lora(moved(adapted))
    vectors = jax.random.normal(jax.random.key(1), (4, 2, 4))
    looked_up, logits = merged(tokens), merged.attend(vectors)
    np.testing.assert_allclose(adapted(tokens), looked_up, rtol=1e-5, atol=1e-6)
    close(adapted.attend(vectors), logits)
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(kind, kind))
    sx.shard(adapted, mesh, [("vocab", "data"), ("embed", "model")])
    with jax.set_mesh(mesh):
        rows = jax.device_put(tokens, NamedSharding(mesh, PartitionSpec("data")))
        y = sx.jit(lambda model, tokens: model(tokens))(adapted, rows)
        np.testing.assert_allclose(y, looked_up, rtol=1e-5, atol=1e-6)
        close(sx.jit(lambda model, x: model.attend(x))(adapted, vectors), logits)


@pytest.mark.parametrize(
    "base", [sx.nn.Linear, sx.nn.MoE, sx.nn.Embed], ids=lambda base: base.__name__
)
def test_a_layer_that_computes_something_else_than_its_base_is_refused(base: Any) -> None:
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
    adapted = LoRA(base(4, 3, rngs=sx.Rngs(0), **options), 2)
    if base is not sx.nn.MoE:
        with pytest.raises(TypeError, match="mask"):
            adapted(jnp.ones((2, 4), int), mask=jnp.ones(2))


def test_the_scale_of_experts_is_not_rounded_to_their_parameters() -> None:
    sizes = {"num_experts": 2, "dtype": jnp.float32, "rngs": sx.Rngs(0)}
    layer = sx.nn.MoE(4, 8, param_dtype=jnp.bfloat16, **sizes)
    adapted = moved(lora(sx.select(layer), 2, scale=1 / 3))
    whole = lora(sx.select(sx.nn.MoE(4, 8, **sizes)), 2, scale=1 / 3)
    for path, variable in sx.iter_variables(adapted, sx.Param):
        sx.select(whole).at_keypaths(path).get()[...] = variable[...].astype(jnp.float32)
    x = jax.random.normal(jax.random.key(5), (3, 4))
    close(adapted(x), whole(x))
