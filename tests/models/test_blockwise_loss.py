# SPDX-License-Identifier: Apache-2.0
"""blockwise_cross_entropy: the plain loss of ``hidden @ kernel``, without its logits."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import shardax as sx
from shardax.errors import LayerConfigError, LayerInputError
from shardax.models import blockwise_cross_entropy, cross_entropy
from tests.conftest import make_mesh
from tests.models.small import BATCH, SMALL
from tests.models.test_meshes import wire_bytes
from tests.values import with_values

RULES = sx.models.DECODER_RULES
RANDOM = np.random.default_rng(0)
HIDDEN = RANDOM.normal(size=(8, 16, 16)).astype(np.float32)
KERNEL = RANDOM.normal(size=(16, 24)).astype(np.float32)
TARGETS = RANDOM.integers(0, 24, (8, 16), np.int32)
MASK = (RANDOM.random((8, 16)) > 0.3).astype(np.float32)


def plain(hidden: Any, kernel: Any, targets: Any, mask: Any = None) -> jax.Array:
    """The loss with all logits, their products summed in float32."""
    logits = jax.lax.dot_general(
        hidden,
        kernel.astype(hidden.dtype),
        (((hidden.ndim - 1,), (0,)), ((), ())),
        preferred_element_type=jnp.float32,
    )
    return cross_entropy(logits, targets, mask)


def assert_equal(found: Any, expected: Any, tolerance: float = 1e-5) -> None:
    leaves, others = jax.tree.leaves(found), jax.tree.leaves(expected)
    for one, other in zip(leaves, others, strict=True):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        one, other = np.asarray(one, np.float32), np.asarray(other, np.float32)
        most = np.nanmax(np.abs(other), initial=1e-30) if other.size else 1.0
        # Terms of a gradient are rounded, and may cancel.
        np.testing.assert_allclose(one, other, rtol=tolerance, atol=tolerance * max(most, 0.2))


@settings(max_examples=10)
@given(
    leading=st.lists(st.integers(1, 7), max_size=3).map(tuple),
    sizes=st.tuples(st.integers(1, 5), st.integers(1, 9)),
    block_size=st.integers(1, 40),
    dtypes=st.sampled_from(["float32 float32", "bfloat16 bfloat16", "bfloat16 float32"]),
    seed=st.integers(0, 99),
)
def test_loss_and_gradients_equal_those_of_all_logits(
    leading: Any, sizes: Any, block_size: int, dtypes: str, seed: int
) -> None:
    random = np.random.default_rng(seed)
    of_hidden, of_kernel = map(jnp.dtype, dtypes.split())
    hidden = random.normal(size=(*leading, sizes[0])).astype(of_hidden)
    kernel = random.normal(size=sizes).astype(of_kernel)
    targets = random.integers(0, sizes[1], leading, np.int32)
    mask = random.integers(0, 3, leading).astype(np.float32)
    blockwise = functools.partial(blockwise_cross_entropy, block_size=block_size)

    @jax.jit
    def masked_or_not(*given: Any) -> Any:
        return [
            (
                jax.value_and_grad(loss, (0, 1))(*given[:3]),
                jax.value_and_grad(loss, (0, 1, 3))(*given),
            )
            for loss in (blockwise, plain)
        ]

    found, expected = masked_or_not(hidden, kernel, targets, mask)
    # A gradient of the kernel in bfloat16 is summed in float32 over blocks: rounding differs.
    assert_equal(found, expected, 2e-5 if of_hidden == "float32" else 2e-2)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
def test_log_softmax_is_in_float32(dtype: str) -> None:
    blockwise = functools.partial(blockwise_cross_entropy, block_size=7)

    @jax.jit
    def narrow_and_wide(hidden: Any, kernel: Any) -> Any:
        wide = hidden.astype(jnp.float32), kernel.astype(jnp.float32)
        return (
            jax.value_and_grad(blockwise, (0, 1))(hidden, kernel, TARGETS),
            jax.value_and_grad(plain, (0, 1))(*wide, TARGETS),
        )

    with jax.enable_x64(dtype == "float64"):
        given = (each.astype(jnp.dtype(dtype)) for each in (HIDDEN, KERNEL))
        (loss, gradients), (wide_loss, wide) = narrow_and_wide(*given)
    assert loss.dtype == jnp.float32
    assert {gradient.dtype.name for gradient in gradients} == {dtype}
    np.testing.assert_allclose(loss, wide_loss, rtol=1e-5)
    expected = [np.asarray(each).astype(jnp.dtype(dtype)) for each in wide]
    assert_equal(list(gradients), expected, {"float64": 1e-5, "float16": 2e-3}.get(dtype, 2e-2))


def test_small_cotangents_do_not_vanish_in_float16() -> None:
    def loss(hidden: Any) -> Any:
        return 1e-6 * blockwise_cross_entropy(hidden, KERNEL * 1e3, TARGETS, block_size=5)

    both = jax.jit(lambda *hidden: [jnp.abs(jax.grad(loss)(each)).max() for each in hidden])
    wide, found = map(float, both(HIDDEN, HIDDEN.astype(np.float16)))
    assert found == pytest.approx(wide, rel=0.05)


# --- targets and masks ----------------------------------------------------------------------------


@jax.jit
def both_losses(targets: Any, mask: Any) -> Any:
    """Values and gradients of the blockwise and the plain loss, without the mask and with it."""
    blockwise = functools.partial(blockwise_cross_entropy, block_size=10)
    steps = [jax.value_and_grad(loss, (0, 1)) for loss in (blockwise, plain)]
    given = HIDDEN, KERNEL, targets
    return [step(*given) for step in steps], [step(*given, mask) for step in steps]


@pytest.mark.parametrize("target", [24, -1, -25, 2**31 - 1])
def test_unknown_target_gives_nan_unless_masked(target: int) -> None:
    targets, mask = TARGETS.copy(), np.ones_like(MASK)
    targets[1, 3], mask[1, 3] = target, 0
    unmasked, masked = both_losses(targets, mask)
    for value, gradients in unmasked:
        assert np.isnan(value) and all(np.isfinite(each).all() for each in gradients)
    (_, found), (_, expected) = unmasked
    assert_equal(found, expected)
    _, (_, of_known) = both_losses(TARGETS, mask)
    for each in masked:
        assert_equal(each, of_known)


def test_everything_masked_is_no_loss_and_no_gradient() -> None:
    step = jax.jit(jax.value_and_grad(blockwise_cross_entropy, (0, 1)))
    value, gradients = step(HIDDEN, KERNEL, TARGETS, MASK * 0)
    assert [np.abs(each).max() for each in (value, *gradients)] == [0, 0, 0]


def test_inputs_that_do_not_fit_are_refused() -> None:
    with pytest.raises(LayerInputError, match=r"hidden of shape \(8, 16, 16\) and targets"):
        blockwise_cross_entropy(HIDDEN, KERNEL, TARGETS[:, 1:])
    with pytest.raises(LayerInputError, match=r"mask of shape \(8,\)"):
        blockwise_cross_entropy(HIDDEN, KERNEL, TARGETS, MASK[:, 0])
    with pytest.raises(LayerInputError, match=r"kernel of shape \(24, 16\).*\(embed, vocab\)"):
        blockwise_cross_entropy(HIDDEN, KERNEL.T, TARGETS)
    with pytest.raises(LayerInputError, match="integers, not float32"):
        blockwise_cross_entropy(HIDDEN, KERNEL, MASK)
    with pytest.raises(LayerConfigError, match="block_size=0"):
        blockwise_cross_entropy(HIDDEN, KERNEL, TARGETS, block_size=0)


# --- transforms -----------------------------------------------------------------------------------


def test_transforms_agree_with_those_of_all_logits() -> None:
    blockwise = functools.partial(blockwise_cross_entropy, block_size=5)

    def mapped(loss: Any) -> Any:
        return jax.vmap(jax.value_and_grad(loss, (0, 1)), in_axes=(0, None, 0, 0))(
            HIDDEN, KERNEL, TARGETS, MASK
        )

    def scanned(loss: Any) -> Any:
        def step(kernel: Any, batch: Any) -> Any:
            value, gradient = jax.value_and_grad(loss, 1)(batch[0], kernel, *batch[1:])
            return kernel - gradient, value

        return jax.lax.scan(step, jnp.asarray(KERNEL), (HIDDEN, TARGETS, MASK))

    def twice(loss: Any) -> Any:
        def norm(hidden: Any) -> Any:
            return jnp.sum(jax.grad(loss)(hidden, KERNEL, TARGETS) ** 2)

        return jax.grad(norm)(jnp.asarray(HIDDEN))

    for run in (mapped, scanned, twice):
        assert_equal(*jax.jit(lambda run=run: (run(blockwise), run(plain)))(), 1e-4)


# --- meshes ---------------------------------------------------------------------------------------

KINDS = {"A": AxisType.Auto, "E": AxisType.Explicit}


def over_a_mesh(kinds: str, specs: Any, rules: Any, mask: Any, block_size: int) -> Any:
    """Returns (value, gradients) over data=2, model=4, and the compiled program."""
    types = tuple(KINDS[kind] for kind in kinds)
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=types)
    of_hidden, of_kernel = (PartitionSpec(*spec) for spec in specs)
    hidden = jax.device_put(HIDDEN, NamedSharding(mesh, of_hidden))
    kernel = jax.device_put(KERNEL, NamedSharding(mesh, of_kernel))
    tokens = NamedSharding(mesh, PartitionSpec(*of_hidden[:2]))
    targets = jax.device_put(TARGETS, tokens)
    mask = None if mask is None else jax.device_put(mask, tokens)
    blockwise = functools.partial(blockwise_cross_entropy, block_size=block_size)
    step = jax.jit(jax.value_and_grad(blockwise, (0, 1)))
    with jax.set_mesh(mesh), sx.axis_rules(rules):
        program = step.lower(hidden, kernel, targets, mask).compile()
        found = program(hidden, kernel, targets, mask)
    for one, gradient in zip((hidden, kernel), found[1], strict=True):
        if "E" in kinds:
            assert jax.typeof(gradient).sharding.spec == jax.typeof(one).sharding.spec
    return found, program.as_text()


@functools.cache
def on_one_device(masked: bool = True) -> Any:
    step = jax.jit(jax.value_and_grad(plain, (0, 1)))
    return step(HIDDEN, KERNEL, TARGETS, MASK if masked else None)


SPECS: dict[str, Any] = {
    "tensor": (("data", None, None), (None, "model")),
    "context": (("data", "model", None), (None, "model")),
    "fully": (("data", None, "model"), ("data", "model")),
    "batch": ((("data", "model"), None, None), ("model", None)),
    "vocab": ((None, None, None), (None, "model")),
}


# Each spec over two kinds of axes, each kind with rules and without.
@pytest.mark.parametrize(
    ("name", "kinds", "with_rules"),
    [
        (name, kinds, bool((i + j) % 2))
        for i, name in enumerate(SPECS)
        for j, kinds in enumerate([("AA", "EE"), ("AE", "EA")][i % 2])
    ],
)
def test_loss_and_gradients_over_meshes_equal_one_device(
    name: str, kinds: str, with_rules: bool
) -> None:
    rules = RULES if with_rules else sx.Rules([])
    found, _ = over_a_mesh(
        kinds, SPECS[name], rules, MASK, 28
    )  # cut 6, 6, 4 where only rows are split
    assert_equal(found, on_one_device())


@pytest.mark.parametrize("shape", [(8, 16), (16, 8)], ids=["rows", "time"])
def test_flat_tokens_are_split_over_all_devices(shape: Any, mesh: Any) -> None:
    hidden, targets = HIDDEN.reshape(-1, 16), TARGETS.reshape(-1)
    with jax.set_mesh(mesh):
        place = NamedSharding(mesh, PartitionSpec(("data", "model")))
        arrays = [jax.device_put(each, place) for each in (hidden, targets)]
        step = jax.jit(jax.value_and_grad(blockwise_cross_entropy, (0, 1)), static_argnums=4)
        found = step(arrays[0], KERNEL, arrays[1], None, shape[0])
    value, (of_hidden, of_kernel) = on_one_device(masked=False)
    assert_equal(found, (value, (of_hidden.reshape(hidden.shape), of_kernel)))


@pytest.mark.parametrize(("kinds", "rules"), [("AA", RULES), ("EE", sx.Rules([]))])
def test_kernel_gradient_is_summed_once_over_devices(kinds: str, rules: Any) -> None:
    specs = ("data", None, None), (None, "model")
    (_, many), (_, one) = (over_a_mesh(kinds, specs, rules, None, size) for size in (16, 512))
    of_kernel = KERNEL.nbytes // 4  # of a device
    assert set(wire_bytes(many)) == {"all-reduce"}
    assert wire_bytes(many)["all-reduce"] - wire_bytes(one)["all-reduce"] < of_kernel


# --- memory ---------------------------------------------------------------------------------------


def peak(loss: Any, mesh: Any = None) -> int:
    """Bytes of a device for a gradient, beside inputs and results, counted by the compiler."""
    specs: list[Any] = [None, None, None]
    if mesh is not None:
        names = ("data", None, None), (None, "model"), ("data", None)
        specs = [NamedSharding(mesh, PartitionSpec(*each)) for each in names]
    shapes = ((8, 128, 32), jnp.bfloat16), ((32, 4096), jnp.bfloat16), ((8, 128), jnp.int32)
    arrays = [
        jax.ShapeDtypeStruct(*shape, sharding=spec)
        for shape, spec in zip(shapes, specs, strict=True)
    ]
    step = jax.jit(jax.value_and_grad(loss, (0, 1)))
    with contextlib.nullcontext() if mesh is None else jax.set_mesh(mesh), sx.axis_rules(RULES):
        counted: Any = step.lower(*arrays).compile().memory_analysis()
    return counted.temp_size_in_bytes


@pytest.mark.parametrize("kind", [None, *KINDS.values()], ids=["one device", *KINDS])
def test_peak_memory_is_that_of_one_block(kind: Any) -> None:
    blockwise = functools.partial(blockwise_cross_entropy, block_size=64)
    mesh = None if kind is None else make_mesh(kind)
    assert peak(blockwise, mesh) < peak(plain, mesh) / 4


# --- models ---------------------------------------------------------------------------------------


@sx.jit
def both_of_model(model: Any, batch: Any) -> Any:
    """Loss and gradients of a model, blockwise and with all logits."""

    def blockwise(model: Any, batch: Any) -> Any:
        hidden = model.hidden_states(batch["inputs"])
        return blockwise_cross_entropy(hidden, model.head_kernel, batch["targets"], block_size=5)

    losses = blockwise, sx.models.next_token_loss
    return [sx.value_and_grad(loss)(model, batch) for loss in losses]


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_blockwise_loss_of_a_model_equals_its_loss(tied: bool, dtype: str) -> None:
    config = dataclasses.replace(SMALL, tied_head=tied, dtype=dtype)
    model = with_values(sx.models.Decoder(config, rngs=sx.Rngs(0)))
    assert sx.eval_shape(lambda m: m.hidden_states(BATCH["inputs"]), model).dtype == dtype
    assert_equal(*both_of_model(model, BATCH), 1e-4 if dtype == "float32" else 5e-2)


def test_blockwise_loss_over_a_mesh_equals_plain_loss(mesh: Any) -> None:
    config = dataclasses.replace(SMALL, tied_head=True)
    model = with_values(sx.models.Decoder(config, rngs=sx.Rngs(0)))
    model = sx.shard(model, mesh, RULES)
    batch = jax.device_put(BATCH, NamedSharding(mesh, PartitionSpec("data")))
    with jax.set_mesh(mesh), sx.axis_rules(RULES):
        assert_equal(*both_of_model(model, batch), 1e-4)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"output": sx.models.OutputConfig(softcap=30.0)}, "output.softcap"),
        ({"output": sx.models.OutputConfig(bias=True)}, "bias"),
        ({"output": sx.models.OutputConfig(bias=True, tied=True)}, "bias"),
        ({"head": None}, "head is None"),
    ],
)
def test_model_whose_logits_are_no_product_is_refused(options: Any, why: str) -> None:
    config = sx.models.TransformerConfig(num_layers=1, **options)
    model = sx.models.Transformer(config, rngs=sx.Rngs(0))
    with pytest.raises(LayerConfigError, match=f"{why}.*cross_entropy on its logits"):
        model.head_kernel  # noqa: B018


def test_head_with_adapters_is_refused() -> None:
    model = sx.models.Decoder(SMALL, rngs=sx.Rngs(0))
    adapted = sx.surgery.lora(sx.select(model).at(lambda model: model.head), 2, rngs=sx.Rngs(1))
    with pytest.raises(LayerConfigError, match="cross_entropy on its logits"):
        adapted.head_kernel  # noqa: B018
