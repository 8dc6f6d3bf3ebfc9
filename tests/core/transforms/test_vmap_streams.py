# SPDX-License-Identifier: Apache-2.0
"""Random streams under ``vmap``: split where they have an axis, shared where they have none."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh

import shardax as sx
from shardax.errors import ForeignMutationError, TransformError
from tests.strategies import assert_equal_values
from tests.values import with_values

ONES = jnp.ones((3, 64))
WITH_SHARED_STREAMS = sx.StateAxes({sx.RngState: None, ...: 0})


def _state(rngs: sx.Rngs) -> dict[Any, Any]:
    return sx.state(rngs).flat()


def _drop(layer: Any, x: Any) -> Any:
    return layer(x)


def _count(layer: sx.nn.Dropout) -> Any:
    assert layer.stream is not None
    return layer.stream.count


def _lane_streams(rngs: sx.Rngs, count: int) -> list[sx.Rngs]:
    """One Rngs per lane: the parts of ``rngs.fork(split=count)``."""
    graphdef, state = sx.split(rngs.fork(split=count))
    return [sx.merge(graphdef, jax.tree.map(lambda x, i=i: x[i], state)) for i in range(count)]


def _lane_of(array: Any, lane: int, axis: int) -> Any:
    """One lane; by NumPy, but for keys."""
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        return array[lane]  # a vector, whose only axis is the first and the last
    return np.take(np.asarray(array), lane, axis)


# --- split ---


def test_batch_elements_draw_different_numbers() -> None:
    rngs = sx.Rngs(0)
    first = sx.vmap(lambda r: jax.random.normal(r.noise()), axis_size=3)(rngs)
    second = sx.vmap(lambda r: jax.random.normal(r.noise()), axis_size=3)(rngs)
    assert len({*first.tolist(), *second.tolist()}) == 6
    assert (rngs.default.key.shape, int(rngs.default.count)) == ((), 2)


@given(st.sampled_from([1, 3]), st.integers(0, 3), st.lists(st.sampled_from("ab"), max_size=4))
@settings(max_examples=20)
def test_batch_elements_are_a_loop_over_a_split_fork(
    count: int, before: int, draws: list[str]
) -> None:
    rngs, other = sx.Rngs(a=0, b=1), sx.Rngs(a=0, b=1)
    for _ in range(before):
        rngs.a()
        other.a()

    def draw(r: sx.Rngs) -> Any:
        return [jax.random.key_data(r[name]()) for name in draws]

    lanes = [draw(lane) for lane in _lane_streams(other, count)]
    expected = jax.tree.map(lambda *rows: np.stack(rows), *lanes)
    assert_equal_values(sx.vmap(draw, axis_size=count)(rngs), expected)
    assert int(rngs.a.count) == before + ("a" in draws)
    assert int(rngs.b.count) == ("b" in draws)


def test_stream_that_no_batch_element_drew_from_stays() -> None:
    rngs = sx.Rngs(params=0, dropout=1)
    sx.vmap(lambda r, x: x + jax.random.normal(r.dropout()), in_axes=(0, 0))(rngs, ONES[:, 0])
    assert (int(rngs.params.count), int(rngs.dropout.count)) == (0, 1)


def test_ensemble_has_different_parameters_per_batch_element() -> None:
    rngs = sx.Rngs(0)
    made = sx.vmap(lambda r: sx.nn.Linear(2, 3, rngs=r), axis_size=4)(rngs)
    lanes = [sx.nn.Linear(2, 3, rngs=lane) for lane in _lane_streams(sx.Rngs(0), 4)]
    assert_equal_values(made.kernel.value, np.stack([lane.kernel.value for lane in lanes]))
    assert len(np.unique(made.kernel.value[:, 0, 0])) == 4


def test_dropout_drops_other_elements_in_every_batch_element() -> None:
    layer = sx.nn.Dropout(0.5, rngs=sx.Rngs(0))
    y = sx.vmap(_drop)(layer, ONES)
    assert len({tuple(row) for row in y.tolist()}) == 3
    assert int(_count(layer)) == 1


def test_axis_position_does_not_matter_to_streams() -> None:
    drawn = [
        sx.vmap(lambda r, x: x + jax.random.normal(r.noise()), in_axes=(axis, 0))(
            sx.Rngs(0), jnp.zeros(3)
        )
        for axis in (0, -1, 1)
    ]
    assert_equal_values(drawn[0], drawn[1])
    assert_equal_values(drawn[0], drawn[2])


def test_stream_shared_by_arguments_is_split_once() -> None:
    rngs = sx.Rngs(0)
    layers = [sx.nn.Dropout(0.5, rngs=rngs) for _ in range(2)]
    y = sx.vmap(lambda a, b, x: (a(x), b(x)))(*layers, ONES)
    assert int(rngs.default.count) == 1
    assert len({tuple(row) for part in y for row in part.tolist()}) == 6


def test_batch_elements_of_batch_elements_draw_different_numbers() -> None:
    def outer(r: sx.Rngs) -> Any:
        return sx.vmap(lambda r: jax.random.normal(r.noise()), axis_size=3)(r)

    rngs = sx.Rngs(0)
    drawn = sx.vmap(outer, axis_size=2)(rngs)
    assert len(set(drawn.ravel().tolist())) == 6 and int(rngs.default.count) == 1


def test_vmap_draws_the_same_compiled() -> None:
    def draw(r: sx.Rngs) -> Any:
        return sx.vmap(lambda r: jax.random.normal(r.noise()), axis_size=3)(r)

    eager, compiled = sx.Rngs(0), sx.Rngs(0)
    run = sx.jit(draw)
    for _ in range(3):
        assert_equal_values(run(compiled), draw(eager))
    assert_equal_values(_state(compiled), _state(eager))


# --- shared ---


def test_unmapped_stream_draws_the_same_per_batch_element() -> None:
    rngs, eager = sx.Rngs(0), sx.Rngs(0)
    drawn = sx.vmap(
        lambda r, x: (jax.random.normal(r.noise()), jax.random.normal(r.noise())), in_axes=(None, 0)
    )(rngs, ONES)
    expected = [jax.random.normal(eager.noise()) for _ in range(2)]
    assert [row.tolist() for row in drawn] == [[float(x)] * 3 for x in expected]
    assert_equal_values(_state(rngs), _state(eager))


def test_bound_model_shares_its_streams() -> None:
    layer = sx.nn.Dropout(0.5, rngs=sx.Rngs(0))
    y = sx.vmap(layer)(ONES)
    assert len({tuple(row) for row in y.tolist()}) == 1 and int(_count(layer)) == 1


def test_streams_and_parameters_split_independently() -> None:
    class Noisy(sx.Module):
        def __init__(self) -> None:
            self.scale = sx.Param(jnp.ones(()))
            self.rngs = sx.Rngs(0)

        def __call__(self, x: Any) -> Any:
            return self.scale * x + jax.random.normal(self.rngs.noise())

    model, many = Noisy(), Noisy()
    many.scale.value = jnp.ones(3)
    zeros = jnp.zeros(3)
    split = sx.StateAxes({sx.Param: None, ...: 0})
    assert len(set(sx.vmap(_drop, in_axes=(split, 0))(model, zeros).tolist())) == 3
    assert len(set(sx.vmap(_drop, in_axes=(WITH_SHARED_STREAMS, 0))(many, zeros).tolist())) == 1


def test_some_streams_may_be_split_by_name() -> None:
    def draw(r: sx.Rngs) -> Any:
        return jax.random.normal(r.params()), jax.random.normal(r.dropout())

    axes = sx.StateAxes({"dropout": 0, ...: None})
    params, dropout = sx.vmap(draw, in_axes=axes, axis_size=3)(sx.Rngs(params=0, dropout=0))
    assert (len(set(params.tolist())), len(set(dropout.tolist()))) == (1, 3)


# --- already one key per lane ---


def test_stream_of_keys_is_mapped_as_array() -> None:
    rngs = sx.Rngs(0).fork(split=3)
    lanes = _lane_streams(sx.Rngs(0), 3)
    for _ in range(2):
        drawn = sx.vmap(lambda r: jax.random.normal(r.noise()))(rngs)
        assert drawn.tolist() == [float(jax.random.normal(lane.noise())) for lane in lanes]
    assert rngs.default.count.tolist() == [2, 2, 2]


def _draw_twice(r: sx.Rngs) -> Any:
    return jax.random.normal(r.params()) + jax.random.normal(r.params())


OVER = {
    "vmap": sx.vmap(_draw_twice),
    "scan": sx.scan(_draw_twice, in_axes=0, out_axes=0),
    "jit": sx.jit(sx.vmap(_draw_twice)),
}


@functools.cache
def _keys() -> Any:
    return jax.random.split(jax.random.key(0), 3)


@functools.cache
def _drawn_by_each_lane() -> Any:
    """What a stream of each key gives in two calls."""
    lanes = [sx.Rngs(params=key) for key in _keys()]
    return np.array([[_draw_twice(lane) for lane in lanes] for _ in range(2)])


@pytest.mark.parametrize("form", ["typed", "raw", "default", "mixed"])
@pytest.mark.parametrize("over", OVER)
def test_rngs_of_key_array_give_one_per_batch_element(form: str, over: str) -> None:
    rngs = {
        "typed": lambda: sx.Rngs(params=_keys()),
        "raw": lambda: sx.Rngs(params=jax.random.key_data(_keys())),
        "default": lambda: sx.Rngs(_keys()),
        "mixed": lambda: sx.Rngs(params=_keys(), dropout=7),
    }[form]()
    for expected in _drawn_by_each_lane():
        np.testing.assert_allclose(OVER[over](rngs), expected, rtol=1e-6)
    assert rngs.params.count.value.tolist() == [4, 4, 4]


def test_keys_written_into_stream_are_mapped() -> None:
    expected = [float(jax.random.normal(sx.Rngs(params=key).params())) for key in _keys()]
    for run in (sx.vmap, lambda f: sx.scan(f, in_axes=0, out_axes=0)):
        rngs = sx.Rngs(params=0)
        rngs.params.key.value = _keys()
        drawn = run(lambda r: jax.random.normal(r.params()))(rngs)
        np.testing.assert_allclose(drawn, expected, rtol=1e-6)
        assert rngs.params.count.value.tolist() == [1, 1, 1]


def test_rngs_of_key_table_map_along_axes() -> None:
    keys = jax.random.split(jax.random.key(0), (2, 3))
    draw = sx.vmap(lambda r: jax.random.normal(r.params()))
    rows = sx.vmap(draw)(sx.Rngs(params=keys))
    columns = sx.vmap(draw, in_axes=1)(sx.Rngs(params=keys))
    expected = [[float(jax.random.normal(sx.Rngs(params=k).params())) for k in row] for row in keys]
    np.testing.assert_allclose(rows, expected, rtol=1e-6)
    np.testing.assert_allclose(np.transpose(columns), rows, rtol=1e-6)


def test_new_streams_have_a_key_per_batch_element() -> None:
    forks = sx.vmap(lambda r: r.fork(), axis_size=3)(sx.Rngs(0))
    assert forks.default.key.shape == forks.default.count.shape == (3,)
    assert len(set(sx.vmap(lambda r: jax.random.normal(r.noise()))(forks).tolist())) == 3


@pytest.mark.parametrize("out_axes", [0, -1])
def test_new_layers_keep_a_key_per_batch_element(out_axes: int) -> None:
    """The trap: with the caller's one stream the members are no slices of the ensemble."""

    class Block(sx.Module):
        def __init__(self, rngs: sx.Rngs) -> None:
            self.linear = sx.nn.Linear(64, 64, rngs=rngs)
            self.layers = [sx.nn.Dropout(0.5, rngs=rngs)]
            self.rngs = rngs

    rngs = sx.Rngs(0)
    made = sx.vmap(Block, axis_size=3, out_axes=out_axes)(rngs)
    stream = made.layers[0].stream
    assert made.rngs is not rngs and made.rngs.default is stream is not rngs.default
    assert (stream.key.shape, stream.count.value.tolist()) == ((3,), [1, 1, 1])
    lanes = [Block(lane) for lane in _lane_streams(sx.Rngs(0), 3)]
    for i, lane in enumerate(lanes):
        whole = jax.tree.map(lambda a, i=i: _lane_of(a, i, out_axes), sx.state(made))
        assert_equal_values(whole.flat(), sx.state(lane).flat())
    assert (rngs.default.key.shape, int(rngs.default.count)) == ((), 1)


def test_ensembles_of_one_stream_drop_different_elements() -> None:
    rngs = sx.Rngs(0)
    make = sx.vmap(lambda r: sx.nn.Dropout(0.5, rngs=r), axis_size=3)
    y = [row for _ in range(2) for row in sx.vmap(_drop)(make(rngs), ONES).tolist()]
    assert len(set(map(tuple, y))) == 6 and int(rngs.default.count) == 2


def test_attached_layer_has_a_key_per_batch_element() -> None:
    def attach(model: sx.Module, rngs: sx.Rngs) -> Any:
        model.drop = sx.nn.Dropout(0.5, rngs=rngs)
        model.rngs = rngs
        return model, rngs

    model, rngs = sx.Module(), sx.Rngs(0)
    model.before = rngs.default
    assert sx.vmap(attach, axis_size=3)(model, rngs) == (model, rngs)
    assert model.before is rngs.default
    assert model.drop.stream.key.shape == model.rngs.default.key.shape == (3,)


def test_layers_made_in_scan_have_own_keys() -> None:
    made = sx.scan(lambda r: sx.nn.Dropout(0.5, rngs=r), in_axes=0, out_axes=0, length=3)
    rngs = sx.Rngs(0)
    layer = made(rngs)
    assert layer.stream is not rngs.default and layer.stream.key.shape == (3,)
    assert len({tuple(row) for row in sx.vmap(_drop)(layer, ONES).tolist()}) == 3


def test_key_per_batch_element_needs_an_axis() -> None:
    rngs = sx.Rngs(0).fork(split=3)
    with pytest.raises(
        TransformError, match=r"default\.key: 3\n  axis_size|axis_size: 2\n  .*key: 3"
    ):
        sx.vmap(lambda r: r.noise(), axis_size=2)(rngs)


# --- refused ---


def test_captured_stream_cannot_be_drawn_from() -> None:
    layer = sx.nn.Dropout(0.5, rngs=sx.Rngs(0))
    with pytest.raises(
        ForeignMutationError, match=r"RngState layer\.stream\.count was not passed in"
    ):
        sx.vmap(lambda x: layer(x))(ONES)
    assert int(_count(layer)) == 0


def test_split_stream_cannot_be_given_new_key() -> None:
    rngs = sx.Rngs(0)

    def reseed(r: sx.Rngs) -> None:
        r.default.key.value = jax.random.key(1)

    with pytest.raises(TransformError, match=r"stream at \.r\.default\.key was given another key"):
        sx.vmap(reseed, axis_size=3)(rngs)
    assert int(rngs.default.count) == 0


# --- meshes ---


def test_numbers_are_the_same_over_a_mesh(mesh: Mesh) -> None:
    def draw(model: Any, rngs: sx.Rngs) -> Any:
        return model.kernel + jax.random.uniform(rngs.noise(), model.kernel.shape)

    def make() -> Any:
        layers = sx.vmap(
            lambda r: sx.nn.Linear(4, 8, kernel_init=jax.nn.initializers.ones, rngs=r),
            axis_size=4,
            metadata={sx.partition.PARTITION_NAME: "layers"},
        )(sx.Rngs(0))
        return with_values(layers)

    expected = sx.vmap(draw)(make(), sx.Rngs(1))
    placed, rngs = sx.shard(make(), mesh, {"layers": "data", "out": "model"}), sx.Rngs(1)
    with jax.set_mesh(mesh):
        for run in (sx.vmap(draw), sx.jit(sx.vmap(draw))):
            rngs.default.count[...] = jnp.uint32(0)
            drawn = run(placed, rngs)
            np.testing.assert_allclose(drawn, expected, rtol=1e-5, atol=1e-6)
            assert drawn.sharding.spec == placed.kernel.sharding.spec
            assert int(rngs.default.count) == 1
