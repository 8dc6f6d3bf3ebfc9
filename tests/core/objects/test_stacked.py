# SPDX-License-Identifier: Apache-2.0
"""Stacked values and objects: the numbers of the parts to the last bit, and nothing computed."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import shardax as sx
from shardax._core.graph.stacked_values import LazyStack, part_of, stack_values, with_part
from shardax._core.graph.stacking import stack_objects, unstack_objects
from shardax._core.init.lazy import Init, LazyKey
from shardax.errors import ModuleError
from tests.strategies import Pair, assert_equal_values, assert_same_model, models

initializers = jax.nn.initializers
INITIALIZERS = {
    "normal": initializers.normal(0.02),
    "lecun normal": initializers.lecun_normal(),
    "glorot uniform": initializers.glorot_uniform(),
    "orthogonal": initializers.orthogonal(),
    "zeros": initializers.zeros,
}


def lazies(
    initializer: Any, count: int = 3, dtype: Any = jnp.float32, **options: Any
) -> list[Init]:
    rngs = sx.Rngs(0)
    return [Init(initializer, (8, 12), dtype, rngs=rngs, **options) for _ in range(count)]


def computed(parts: Any) -> np.ndarray:
    return np.stack([np.asarray(part.compute()) for part in parts])


# --- lazy values ----------------------------------------------------------------------------------


@pytest.mark.parametrize("initializer", INITIALIZERS.values(), ids=INITIALIZERS.keys())
@pytest.mark.parametrize("spec", [None, P(None, "data", "model"), P("data", None, "model")])
def test_lazy_stack_is_bitwise_equal_to_its_parts(
    initializer: Any, spec: Any, auto_mesh: Mesh
) -> None:
    parts = lazies(initializer, 4)
    sharding = None if spec is None else NamedSharding(auto_mesh, spec)
    array = LazyStack(parts).compute(sharding)
    assert sharding is None or array.sharding == sharding
    assert_equal_values(np.asarray(array), computed(parts))


def test_batch_dependent_generators_are_not_batched() -> None:
    keys = [jax.random.key(seed, impl="rbg") for seed in range(3)]
    parts = [Init(INITIALIZERS["normal"], (5, 3), rngs=sx.Rngs(key)) for key in keys]
    assert_equal_values(np.asarray(LazyStack(parts).compute()), computed(parts))


def test_equal_parts_share_one_program() -> None:
    normal, uniform = lazies(INITIALIZERS["normal"]), lazies(INITIALIZERS["glorot uniform"])
    alike, unlike = LazyStack(normal), LazyStack([normal[0], uniform[0]])
    assert (alike.is_known, unlike.is_known, LazyStack([unlike]).is_known) == (True, False, False)
    assert alike.program() is LazyStack(lazies(INITIALIZERS["normal"])).program()
    assert_equal_values(np.asarray(unlike.compute()), computed([normal[0], uniform[0]]))
    assert LazyStack([unlike]).compute().shape == (1, 2, 8, 12)


@pytest.mark.parametrize("spec", [P(None, "data", "model"), P("data", None, "model")])
def test_unlike_parts_go_to_their_shards_too(spec: P, mesh: Mesh) -> None:
    names = ("normal", "orthogonal")
    parts = [lazies(INITIALIZERS[name], 1)[0] for name in names]
    array = LazyStack(parts).compute(NamedSharding(mesh, spec))
    assert array.sharding == NamedSharding(mesh, spec)
    assert_equal_values(np.asarray(array), computed(parts))


def test_stacks_of_stacks_are_one_program_too() -> None:
    parts = lazies(INITIALIZERS["normal"], 6)
    nested = LazyStack([LazyStack(parts[:3]), LazyStack(parts[3:])])
    assert (nested.shape, nested.is_known) == ((2, 3, 8, 12), True)
    assert_equal_values(np.asarray(nested.compute()), computed(parts).reshape(2, 3, 8, 12))


def test_lazy_keys_stack() -> None:
    rngs = sx.Rngs(0)
    parts = [rngs.fork().default.key._value for _ in range(3)]
    assert {type(part) for part in parts} == {LazyKey}
    stacked = LazyStack(parts)
    assert (stacked.shape, stacked.dtype) == ((3,), parts[0].dtype)
    assert_equal_values(stacked.compute(), jnp.stack([part.compute() for part in parts]))


def test_initializer_without_its_key_says_so() -> None:
    parts = [Init(INITIALIZERS["normal"], (2,)) for _ in range(2)]
    with pytest.raises(sx.errors.ModuleError, match="rngs=rngs"):
        LazyStack(parts).compute()


# --- values ---------------------------------------------------------------------------------------


def test_stacking_and_unstacking_keep_variable_kinds() -> None:
    struct = jax.ShapeDtypeStruct((2,), jnp.float32)
    rows = [
        ([np.uint32(1), np.uint32(2)], np.ndarray),
        ([jnp.ones(2), jnp.zeros(2)], jax.Array),
        ([struct, jnp.zeros(2)], jax.ShapeDtypeStruct),
        (lazies(INITIALIZERS["normal"], 2), LazyStack),
        ([lazies(INITIALIZERS["normal"], 1)[0], jnp.zeros((8, 12))], jax.Array),
    ]
    for parts, kind in rows:
        parts = [np.asarray(part) if isinstance(part, np.generic) else part for part in parts]
        stacked = stack_values(parts)
        assert isinstance(stacked, kind) and stacked.shape == (2, *parts[0].shape)
        part = part_of(stacked, 1)
        assert (tuple(part.shape), part.dtype) == (tuple(parts[1].shape), parts[1].dtype)
    assert_equal_values(
        part_of(stack_values([(jnp.ones(2),), (jnp.zeros(2),)]), 1), (jnp.zeros(2),)
    )


def test_stacking_keeps_parts_where_they_are(mesh: Mesh) -> None:
    there = NamedSharding(mesh, P("data", "model"))
    parts = [jax.device_put(jnp.full((4, 8), float(i)), there) for i in range(3)]
    stacked = stack_values(parts)
    assert stacked.sharding == NamedSharding(mesh, P(None, "data", "model"))
    changed = with_part(stacked, 1, jnp.ones((4, 8)) * 9)
    assert changed.sharding == stacked.sharding
    np.testing.assert_array_equal(np.asarray(changed)[:, 0, 0], [0, 9, 2])


# --- objects --------------------------------------------------------------------------------------


@settings(max_examples=40)
@given(models())
def test_taking_apart_is_the_inverse_of_stacking(model: Any) -> None:
    twins = [model, sx.clone(model), sx.clone(model)]
    stacked = stack_objects(twins, "layers")
    assert stacked.shared == ()
    for twin, part in zip(twins, unstack_objects(stacked.root, (), 3), strict=True):
        assert_same_model(twin, part)


def test_axes_gain_stack_name_or_stay_unknown() -> None:
    class Layer(sx.Module):
        def __init__(self) -> None:
            self.named = sx.Param(jnp.zeros(2), axes=("embed",), tag="a")
            self.bare = sx.Param(jnp.zeros(2))
            self.array = np.zeros(3)

    root = stack_objects([Layer(), Layer()], "depth").root
    assert root.named.axes == ("depth", "embed") and dict(root.named.metadata) == {"tag": "a"}
    assert root.bare.axes is None and root.bare.shape == (2, 2)
    assert root.array.shape == (2, 3)


class Drawing(sx.Module):
    def __init__(self, stream: Any, scale: Any = None) -> None:
        self.stream = stream
        self.scale = scale


def test_stack_objects_keeps_what_all_have_in_common_as_one() -> None:
    stream = sx.Rngs(dropout=0).dropout
    root, shared = stack_objects([Drawing(stream), Drawing(stream)], "layers")
    assert root.stream is stream
    assert shared == (("stream",), ("stream", "key"), ("stream", "count"))
    first, second = unstack_objects(root, shared, 2)
    assert first.stream is stream and second.stream is stream


def test_single_one_shares_what_is_older() -> None:
    stream = sx.Rngs(dropout=0).dropout
    older = [id(stream), id(stream.key), id(stream.count)]
    assert stack_objects([Drawing(stream)], "layers", older).root.stream is stream
    assert stack_objects([Drawing(stream)], "layers").root.stream is not stream


def test_sharing_between_some_is_refused() -> None:
    stream, other = sx.Rngs(dropout=0).dropout, sx.Rngs(dropout=0).dropout
    with pytest.raises(ModuleError, match=r"\.stream is one object in the layers \[0, 2\]"):
        stack_objects([Drawing(stream), Drawing(other), Drawing(stream)], "layers")


def _holding(**attributes: Any) -> sx.Module:
    module = sx.Module()
    for name, value in attributes.items():
        setattr(module, name, value)
    return module


def _param() -> sx.Param[Any]:
    return sx.Param(np.float32(0))


def _twice(param: Any) -> sx.Module:
    return _holding(a=param, b=param)


@pytest.mark.parametrize(
    ("layer", "other", "found"),
    [
        (_holding(a=[_param()], b=_param()), _holding(a=[_param()] * 2, b=_param()),
         ".a[1]: absent against same as .a[0]"),
        (_holding(a=_param()), _holding(a=_param(), b=1), ".b: absent against 1 (int)"),
        (_holding(a=_param(), b=_param()), _twice(_param()),
         ".b: Param against same as .a"),
        (_holding(a=_param(), b=_param()), _holding(b=_param(), a=_param()),
         "(root): the order (a, b) against the order (b, a)"),
        (_holding(a={1: _param(), 2: 0}), _holding(a={2: 0, 1: _param()}),
         ".a: the order (1, 2) against the order (2, 1)"),
        (_holding(a=np.zeros(2)), _holding(a=sx.Variable(np.zeros(2))),
         ".a: array against Variable"),
        (_holding(a=(1, _param())), _holding(a=(2, _param())), ".a[0]: 1 (int) against 2 (int)"),
        (_holding(a=(1, _param())), _holding(a=3), ".a: tuple against 3 (int)"),
        (_holding(a=Pair(1, _param())), _holding(a=(1, _param())), ".a: Pair against tuple"),
    ],
)  # fmt: skip
def test_first_place_where_layers_differ_is_named(layer: Any, other: Any, found: str) -> None:
    with pytest.raises(ModuleError) as caught:
        stack_objects([layer, layer, other], "layers")
    assert str(caught.value) == (
        f"The layers of a stack must be alike, but layers 0 and 2 differ at {found}. Build every "
        f"layer in the same way, with what differs in a Variable; or keep the layers in a list."
    )


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        (2, 3, r"\.scale: 2 \(int\) against 3"),
        (2, sx.Param(0.0), r"\.scale: 2 \(int\) against Param"),
        ([1, 2], [1, 5], r"\.scale\[1\]: 2 \(int\) against 5"),
        (sx.Param(0.0), sx.BatchStat(0.0), r"\.scale: Param against BatchStat"),
        (
            sx.Param(0.0, tag="a"),
            sx.Param(0.0, tag="b"),
            r"\.scale: Param\(tag='a'\) against Param\(tag='b'\)",
        ),
        (sx.Param(np.zeros(2)), sx.Param(np.zeros(3)), r"\.scale is float32\[2\] in layer 0 and"),
        (sx.Param(np.int32(0)), sx.Param(0.0), r"\.scale is int32\[\] in layer 0 and float32\[\]"),
    ],
)
def test_unequal_parts_are_refused_by_path(first: Any, second: Any, message: str) -> None:
    stream = sx.Rngs(dropout=0).dropout
    with pytest.raises(ModuleError, match=message):
        stack_objects([Drawing(stream, first), Drawing(stream, second)], "layers")
