# SPDX-License-Identifier: Apache-2.0
"""Experts over a mesh axis against the layer of one device: numbers, drops, wire bytes."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import shardax as sx
from shardax.hlo import read_program
from tests.values import with_values

X = np.random.default_rng(0).normal(size=(8, 8, 8)).astype(np.float32)
MASK = np.arange(8) < np.array([[3], [8], [0], [5], [1], [2], [7], [8]])
AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit
SHARED = {"batch": "data", "expert": "data"}
APART = {"batch": "data", "expert": "expert"}


def make(dispatch: Any = "dropless", **options: Any) -> sx.nn.MoE:
    options = {"num_experts": 8, "top_k": 2, "capacity_factor": 0.6} | options
    return with_values(sx.nn.MoE(8, 16, dispatch=dispatch, **options, rngs=sx.Rngs(0)))


def mesh_of(sizes: dict[str, int], kind: AxisType = AUTO) -> Mesh:
    """Returns a mesh over as many devices as it needs."""
    devices = jax.devices()[: int(np.prod(list(sizes.values())))]
    kinds = (kind,) * len(sizes)
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=kinds, devices=devices)


@sx.jit
def step(model: Any, x: jax.Array, mask: Any = None) -> Any:
    """Returns the result, the load-balance loss, and gradients of the model and the input."""

    def loss(model: Any, x: jax.Array) -> Any:
        y = model(x) if mask is None else model(x, mask=mask)
        balance = sx.nn.load_balance_loss(model)
        return (y.astype(np.float32) ** 2).sum() + 3 * balance, (y, balance)

    return sx.grad(loss, argnums=(0, 1), has_aux=True)(model, x)


def on_mesh(
    build: Callable[[], Any],
    sizes: dict[str, int],
    rules: dict[str, Any],
    spec: P,
    kind: AxisType = AUTO,
    microbatches: int | None = None,
    function: Any = step,
    more: tuple[Any, ...] = (),
) -> tuple[Any, str]:
    """Returns what a function gives for a model laid out over a mesh, and its program."""
    mesh = mesh_of(sizes, kind)
    pipeline = sx.parallel(microbatches=microbatches)
    with jax.set_mesh(mesh), sx.axis_rules(rules), pipeline:
        model = sx.shard(build(), mesh, rules)
        x = jax.device_put(X, NamedSharding(mesh, spec))
        program = function.lower(model, x, *more).compile()
        return program(model, x, *more), program.as_text()


def exchanges(text: str) -> int:
    return text.count(" all-to-all(")


def assert_alike(found: Any, wanted: Any, tolerance: float = 1e-5) -> None:
    """Asserts that arrays are equal up to rounding of their largest numbers."""
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        scale = max(1.0, float(np.abs(np.asarray(other, np.float32)).max()))
        np.testing.assert_allclose(
            np.asarray(one, np.float32), np.asarray(other, np.float32), atol=tolerance * scale
        )


LAYOUTS: list[tuple[dict[str, int], dict[str, Any], P]] = [
    ({"data": 8}, SHARED, P("data")),
    ({"expert": 2}, {"expert": "expert"}, P()),
    ({"expert": 4}, {"expert": "expert", "seq": "expert"}, P(None, "expert")),
    ({"data": 2, "expert": 4}, APART | {"embed": "data"}, P("data")),
    ({"data": 2, "expert": 4}, APART | {"batch": ("data", "expert")}, P(("data", "expert"))),
    ({"data": 2, "expert": 4}, {"batch": "expert", "seq": "data", "expert": "expert"}, P("expert")),
    ({"data": 2, "expert": 2, "model": 2}, APART | {"mlp": "model"}, P("data")),
    ({"x": 2, "y": 2, "model": 2}, {"batch": "y", "expert": ("x", "y"), "mlp": "model"}, P("y")),
]


@functools.cache
def on_layout(dispatch: str, place: int) -> tuple[Any, str]:
    """Returns what a step gives over one of the layouts, and its program; kinds of axes differ."""
    kind = (AUTO, EXPLICIT)[(place + (dispatch == "capacity")) % 2]
    return on_mesh(lambda: make(dispatch), *LAYOUTS[place], kind)


@functools.cache
def on_one_device(dispatch: str) -> Any:
    return step(make(dispatch), X)


# Both dispatches over the layouts that differ most, one over those that vary them.
@pytest.mark.parametrize(
    ("dispatch", "place"),
    [
        *(("dropless", place) for place in (0, 1, 4, 6)),
        *(("capacity", place) for place in (0, 2, 3, 5, 6, 7)),
    ],
    ids=lambda value: str(LAYOUTS[value][:2]) if isinstance(value, int) else value,
)
def test_results_and_gradients_equal_one_device(dispatch: str, place: int):
    wanted = on_one_device(dispatch)
    found, text = on_layout(dispatch, place)
    assert_alike(found, wanted)
    assert exchanges(text) == 4  # there and back, in both directions
    result, dropped = np.asarray(found[1][0]), (np.asarray(wanted[1][0]) == 0).all(-1)
    np.testing.assert_array_equal((result == 0).all(-1), dropped)
    assert dropped.any() == (dispatch == "capacity")


@pytest.mark.parametrize("kinds", [(AUTO, EXPLICIT), (EXPLICIT, AUTO)], ids=str)
def test_axes_of_different_kinds_give_the_numbers_of_one_device(kinds: Any):
    sizes, rules, spec = {"data": 2, "expert": 4}, APART, P("data")
    mesh = jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=kinds)
    with jax.set_mesh(mesh), sx.axis_rules(rules):
        model = sx.shard(make(), mesh, rules)
        found = step(model, jax.device_put(X, NamedSharding(mesh, spec)))
    assert_alike(found, on_one_device("dropless"))


TOKENS_ALONE: list[tuple[dict[str, int], dict[str, Any], P]] = [
    ({"data": 8}, {"batch": "data"}, P("data")),
    ({"data": 4, "model": 2}, {"batch": "data", "embed": "data", "mlp": "model"}, P("data")),
    ({"data": 2, "context": 4}, {"batch": "data", "seq": "context"}, P("data", "context")),
]


# Each pair of a layout, a dispatch and a kind of axes.
@pytest.mark.parametrize("place", range(3), ids=lambda place: str(TOKENS_ALONE[place][:2]))
@pytest.mark.parametrize("dispatch", ["dropless", "capacity"])
def test_split_tokens_are_sorted_on_their_device(dispatch: str, place: int):
    sizes, rules, spec = TOKENS_ALONE[place]
    kind = (AUTO, EXPLICIT)[(place + (dispatch == "capacity")) % 2]
    found, text = on_mesh(lambda: make(dispatch), sizes, rules, spec, kind)
    assert_alike(found, on_one_device(dispatch))
    facts = read_program(text, sizes)
    tokens = X.size * 4  # bytes of all tokens; of the rows of all, twice as many
    moved = [each for each in facts.collectives if each.kind != "all-reduce"]
    sent = [each.payload for each in moved if each.dtype == "f32"]  # and not counts
    kernel = 8 * 8 * 16 * 4 // sizes.get("model", 1)  # gathered where it is split by the batch
    assert not {tokens, 2 * tokens} & {*sent} - ({kernel} if "embed" in rules else set())
    assert exchanges(text) == 0


def test_biases_are_added_once_over_split_layers():
    def build() -> Any:
        return make("capacity", use_bias=True)

    found, _ = on_mesh(build, *LAYOUTS[7], EXPLICIT)
    assert_alike(found, step(build(), X))


@pytest.mark.parametrize("place", [0, 6], ids=lambda place: str(LAYOUTS[place][0]))
@pytest.mark.parametrize("dispatch", ["dropless", "capacity"])
def test_wire_bytes_equal_a_hand_count(dispatch: str, place: int):
    """No kernel is gathered, and tokens only where they were alike before."""
    sizes, rules, _ = LAYOUTS[place]
    _, text = on_layout(dispatch, place)
    facts = read_program(text, sizes)
    axis = rules["expert"]
    alone = axis == "data"  # tokens are split over the experts' axis alone
    batches = 1 if alone else sizes["data"]
    devices, tokens = sizes[axis], 64 // batches // sizes[axis]
    local = 8 // devices
    # The most rows for another device: each token as often as it can choose experts of one.
    rows, places = tokens * min(2, local), 10  # of an expert: 0.6 * 2 * 64 tokens / 8 experts
    chunk = min(rows, local * places) if dispatch == "capacity" else rows
    row, others = 8 * 4, (devices - 1) / devices
    exchanged = [each for each in facts.collectives if each.kind == "all-to-all"]
    assert {each.axes for each in exchanged} == {(axis,)}
    assert [each.wire_bytes for each in exchanged] == [others * devices * chunk * row] * 4
    gathered = {each.payload for each in facts.collectives if each.kind == "all-gather"}
    whole = devices * tokens * row  # tokens that were cut over the experts
    kernel = 8 * 8 * 4  # the router's, along the experts or what they share an axis with
    counts = {devices * 8 * 4, batches * devices * 2 * 8 * 4}
    assert gathered <= {kernel, *counts, *(() if alone else (whole,))}
    reduced = [each for each in facts.collectives if each.axes == ("model",)]
    sums = [each.payload for each in reduced if each.kind == "all-reduce"]
    assert sum(sums) == (0 if alone else 2 * tokens * row + tokens * 2 * 4)  # y, x, weights


def test_programs_for_tpu_and_gpu_send_no_padding():
    graph, state = sx.split(make())

    def loss(state: Any, x: jax.Array) -> Any:
        return (sx.merge(graph, state)(x) ** 2).sum()

    with jax.set_mesh(mesh_of({"data": 4})), sx.axis_rules(SHARED):
        traced = jax.jit(jax.grad(loss, argnums=(0, 1), allow_int=True)).trace(state, X)
    for platform, ragged, padded in (("tpu", 4, 0), ("cuda", 4, 0), ("cpu", 0, 4)):
        text = traced.lower(lowering_platforms=(platform,)).as_text()
        assert text.count("@ragged_all_to_all") == ragged
        assert text.count("stablehlo.all_to_all") == padded


def ragged(x: Any, y: Any, starts: Any, sizes: Any, places: Any, expected: Any, *, axis_name: Any):
    """What JAX documents of ``ragged_all_to_all``, which XLA for CPU does not have."""
    me = jax.lax.axis_index(axis_name)
    every = [jax.lax.all_gather(each, axis_name) for each in (x, starts, sizes, places)]
    count = len(sizes) // len(every[0])
    number = jnp.arange(len(y))[:, None]
    agree = True
    for device, (rows, *numbers) in enumerate(zip(*every, strict=True)):
        for slice_ in range(count):
            start, size, place = (each[me * count + slice_] for each in numbers)
            agree &= expected[device * count + slice_] == size
            inside = (number >= place) & (number < place + size)
            y = jnp.where(inside, rows[jnp.clip(number[:, 0] - place + start, 0, len(x) - 1)], y)
    return jnp.where(agree, y, jnp.nan)


@pytest.mark.parametrize("dispatch", ["dropless", "capacity"])
def test_ragged_exchange_equals_one_device(dispatch: str, monkeypatch: pytest.MonkeyPatch):
    chosen = lambda *args, default, **_: default(*args)  # noqa: E731
    monkeypatch.setattr(jax.lax, "platform_dependent", chosen)
    monkeypatch.setattr(jax.lax, "ragged_all_to_all", ragged)
    function = sx.jit(step.function)
    found, text = on_mesh(lambda: make(dispatch), {"data": 4}, SHARED, P("data"), function=function)
    assert_alike(found, on_one_device(dispatch))
    assert exchanges(text) == 0


def test_stack_with_remat_equals_one_device():
    def build() -> Any:
        return sx.nn.Stack(lambda: make("capacity"), 3, remat="full")

    found, text = on_mesh(build, {"data": 2, "expert": 4}, APART, P("data"), EXPLICIT)
    assert_alike(found, step(build(), X))
    assert exchanges(text) >= 4


def test_layers_mapped_over_one_input_equal_one_device():
    @sx.jit
    def mapped(stack: Any, x: jax.Array) -> Any:
        def loss(stack: Any) -> Any:
            y = sx.vmap(lambda layer, x: layer(x), in_axes=(0, None))(stack.stacked, x)
            return (y**2).sum() + sx.nn.load_balance_loss(stack)

        return sx.grad(loss)(stack)

    def build() -> Any:
        return sx.nn.Stack(make, 3)

    found, text = on_mesh(build, {"data": 2, "expert": 4}, APART, P("data"), function=mapped)
    assert_alike(found, mapped(build(), X))
    assert exchanges(text) == 3


# Without drops in a circular pipeline: tests/models/test_forms_of_parallelism.py.
def test_experts_in_a_pipeline_equal_one_device():
    def build() -> Any:
        return sx.nn.Stack(lambda: make("capacity", use_bias=True), 2, microbatches=2)

    rules, sizes = APART | {"layers": "stage"}, {"data": 2, "expert": 2, "stage": 2}
    found, text = on_mesh(build, sizes, rules, P("data"), EXPLICIT)
    assert_alike(found, step(build(), X))
    assert exchanges(text) == 4


def test_masked_tokens_take_no_place_as_on_one_device() -> None:
    found, _ = on_mesh(lambda: make("capacity"), *LAYOUTS[3], EXPLICIT, more=(MASK,))
    assert_alike(found, step(make("capacity"), X, MASK))


@pytest.mark.parametrize("kind", [AUTO, EXPLICIT], ids=str)
def test_low_rank_terms_and_masks_equal_one_device(kind: AxisType):
    def build() -> Any:
        layer = sx.surgery.LoRA(make(use_bias=True), 3, 2.0, rngs=sx.Rngs(1))
        return with_values(layer)

    sizes = {"data": 2, "expert": 2, "model": 2}
    rules = APART | {"mlp": "model"}
    found, _ = on_mesh(build, sizes, rules, P("data"), kind, more=(MASK,))
    assert_alike(found, step(build(), X, MASK), 3e-5)


def make_narrow(dispatch: str) -> Any:
    return make(dispatch, dtype="bfloat16", capacity_factor=2.0)


@functools.cache
def narrow_on_one_device(dispatch: str) -> Any:
    return step(make_narrow(dispatch), X)


@pytest.mark.parametrize(
    ("dispatch", "experts"),
    [("dropless", "expert"), ("capacity", "expert"), ("capacity", None)],
    ids=str,
)
def test_bfloat16_beside_a_compiler_axis_equals_one_device(dispatch: str, experts: str | None):
    sizes = {"data": 2, "expert": 2, "other": 2}
    rules = {"batch": "data", "embed": "other", "expert": experts}
    found, _ = on_mesh(lambda: make_narrow(dispatch), sizes, rules, P("data"))
    assert_alike(found, narrow_on_one_device(dispatch), 0.03)


def test_bfloat16_equals_one_device_up_to_rounding():
    found, _ = on_mesh(lambda: make_narrow("capacity"), {"data": 4}, SHARED, P("data"))
    assert found[1][0].dtype == jnp.bfloat16
    assert_alike(found, narrow_on_one_device("capacity"), 2e-2)


@pytest.mark.filterwarnings("ignore:.*context manager has been deprecated:DeprecationWarning")
def test_eager_call_and_with_mesh_equal_one_device():
    mesh, wanted = mesh_of({"data": 4}), on_one_device("dropless")[1][0]
    for scope in (jax.set_mesh(mesh), mesh):
        with contextlib.ExitStack() as scopes:
            scopes.enter_context(scope)
            scopes.enter_context(sx.axis_rules(SHARED))
            layer = sx.shard(make(), mesh, SHARED)
            call = sx.jit(lambda layer, x: layer(x))
            assert exchanges(call.lower(layer, X).compile().as_text()) == 2
            assert_alike((layer(X), call(layer, X)), (wanted, wanted))


def test_undividable_and_dense_dispatch_exchange_nothing():
    call = sx.jit(lambda layer, x: layer(x))
    mesh = mesh_of({"data": 2, "expert": 4})
    for dispatch, x in (("dropless", X[:3, :3]), ("capacity", X[:2, :3]), ("dense", X[:2])):
        with jax.set_mesh(mesh), sx.axis_rules(APART):
            layer = sx.shard(make(dispatch), mesh, APART)
            program = call.lower(layer, x).compile()
            assert exchanges(program.as_text()) == 0
            assert_alike(program(layer, x), call(make(dispatch), x))
