# SPDX-License-Identifier: Apache-2.0
"""Lazy values: nothing is computed until someone reads, and the numbers never depend on how."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.extend.random
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import shardax as sx
from shardax import extend
from shardax._core.init.keys import KeySource
from shardax._core.init.lazy import Init, LazyKey
from shardax.errors import MetadataError, ModuleError, ShardaxError
from tests.strategies import assert_equal_values

INITIALIZERS = {
    "normal": jax.nn.initializers.normal(0.02),
    "truncated normal": jax.nn.initializers.truncated_normal(),
    "glorot uniform": jax.nn.initializers.glorot_uniform(),
    "zeros": jax.nn.initializers.zeros,
}
each_initializer = pytest.mark.parametrize(
    "initializer", INITIALIZERS.values(), ids=INITIALIZERS.keys()
)

BUILD_WITHOUT_BACKEND = """
import jax, jax.numpy as jnp, numpy as np, shardax as sx

class Model(sx.Module):
    def __init__(self, rngs):
        normal = jax.nn.initializers.lecun_normal()
        self.kernel = sx.Param(sx.Init(normal, (10**6, 10**6), rngs=rngs), axes=("embed", "mlp"))
        self.head = self.kernel
        self.calls = sx.Variable(0)
        self.table = np.ones(3)
        self.layers = [rngs.scope("layer"), rngs.fork(), sx.Init(normal, (2, 2), rngs=rngs)]

model = Model(sx.Rngs(0, dropout=1))
twin = sx.clone(model)
assert twin.kernel.is_lazy and twin.kernel.shape == (10**6, 10**6)
assert sx.graphdef(model) == sx.graphdef(twin) and len(sx.find_duplicates(twin)) == 1
assert "Param(float32[1000000, 1000000], lazy" in repr(model)
try:
    jnp.ones(2)
except RuntimeError as error:
    print("as expected:", str(error)[:28])
"""


def test_build_clone_and_print_run_no_jax_operation() -> None:
    # On a platform that does not exist any operation fails, as the last lines of the program show.
    environment = {**os.environ, "JAX_PLATFORMS": "none_such"}
    environment.pop("XLA_FLAGS", None)
    done = subprocess.run(
        [sys.executable, "-c", BUILD_WITHOUT_BACKEND],
        env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.stdout == "as expected: Unable to initialize backend\n", done.stderr


@pytest.mark.usefixtures("without_collections")
def test_building_makes_no_array() -> None:
    before = len(jax.live_arrays())
    rngs = sx.Rngs(0)
    params = [sx.Param(Init(INITIALIZERS["normal"], (50, 50), rngs=rngs)) for _ in range(5)]
    assert len(jax.live_arrays()) == before
    _ = params[3].value
    assert [param.is_lazy for param in params] == [True, True, True, False, True]


def test_lazy_shape_size_and_canonical_dtype_are_known() -> None:
    lazy = Init(INITIALIZERS["normal"], (2, 3), jnp.float64 if jax.config.x64_enabled else float)
    assert (lazy.shape, lazy.dtype, lazy.ndim, lazy.size) == ((2, 3), jnp.float32, 2, 6)
    assert repr(lazy) == "Init(float32[2, 3])"
    assert Init(INITIALIZERS["normal"], (2,), jnp.bfloat16).dtype == jnp.bfloat16


def test_reading_order_does_not_change_values() -> None:
    def make() -> list[sx.Param[Any]]:
        rngs = sx.Rngs(0)
        return [sx.Param(Init(INITIALIZERS["normal"], (3,), rngs=rngs)) for _ in range(3)]

    forwards, backwards = make(), make()
    read = {i: backwards[i].value for i in (2, 0, 1)}
    for i, param in enumerate(forwards):
        assert_equal_values(param.value, read[i])
    assert len({float(param[0]) for param in forwards}) == 3


def test_reading_twice_gives_the_same_array() -> None:
    param = sx.Param(Init(INITIALIZERS["normal"], (3,), rngs=sx.Rngs(0)))
    assert param.value is param.value


@each_initializer
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
def test_values_equal_initializer_called_with_stream_key(initializer: Any, dtype: Any) -> None:
    rngs = sx.Rngs(params=0)
    lazy = Init(initializer, (6, 4), dtype, rngs=rngs)
    key = sx.Rngs(params=0).params()
    assert_equal_values(lazy.compute(), jax.jit(lambda k: initializer(k, (6, 4), dtype))(key))


def assert_shards_equal_whole(lazy: Init, sharding: NamedSharding) -> None:
    sharded = lazy.compute(sharding)
    assert sharded.sharding == sharding
    assert_equal_values(jax.device_get(sharded), jax.device_get(lazy.compute()))


@each_initializer
def test_values_written_straight_into_shards_are_bit_identical(
    initializer: Any, auto_mesh: jax.sharding.Mesh
) -> None:
    lazy = Init(initializer, (64, 24), rngs=sx.Rngs(7))
    assert_shards_equal_whole(lazy, NamedSharding(auto_mesh, PartitionSpec("data", "model")))


@pytest.mark.parametrize("spec", [("model",), (None, "data"), (("data", "model"),), ()], ids=str)
def test_they_are_so_however_they_are_laid_out(spec: Any, mesh: jax.sharding.Mesh) -> None:
    lazy = Init(INITIALIZERS["normal"], (64, 24), rngs=sx.Rngs(7))
    assert_shards_equal_whole(lazy, NamedSharding(mesh, PartitionSpec(*spec)))


def test_equal_initializer_shape_and_dtype_share_one_program() -> None:
    compiled: list[str] = []

    def note(name: str, _: float, **__: Any) -> None:
        if "backend_compile" in name:
            compiled.append(name)

    normal, rngs = jax.nn.initializers.normal, sx.Rngs(0)
    params = [sx.Param(Init(normal(0.0123), (5, 7), rngs=rngs)) for _ in range(4)]
    jax.monitoring.register_event_duration_secs_listener(note)
    try:
        _ = params[0].value
        first = len(compiled)
        for param in params[1:]:
            _ = param.value
    finally:
        jax.monitoring.unregister_event_duration_listener(note)
    assert (first >= 1, len(compiled) - first) == (True, 0)


def test_traced_key_makes_value_inside_the_transform() -> None:
    @jax.jit
    def make(seed: jax.Array) -> jax.Array:
        param = sx.Param(Init(INITIALIZERS["normal"], (3,), rngs=sx.Rngs(jax.random.key(seed))))
        assert not param.is_lazy
        return param.value

    eager = sx.Param(Init(INITIALIZERS["normal"], (3,), rngs=sx.Rngs(jax.random.key(5))))
    assert_equal_values(make(jnp.asarray(5)), eager.value)


def test_closure_read_inside_transform_materializes_outside() -> None:
    param = sx.Param(Init(INITIALIZERS["normal"], (3,), rngs=sx.Rngs(0)))
    doubled = jax.jit(lambda x: param * x)(2.0)
    assert not param.is_lazy
    assert_equal_values(doubled, param.value * 2)  # a real array, not a leaked tracer


def test_passing_model_to_plain_transform_materializes_it() -> None:
    param = sx.Param(Init(INITIALIZERS["normal"], (3,), rngs=sx.Rngs(0)))
    total = jax.jit(lambda p: p.sum())(param)
    assert not param.is_lazy and float(total) == pytest.approx(float(param.sum()))


def test_init_without_stream_needs_keyless_initializer() -> None:
    assert Init(jax.nn.initializers.ones, (2,)).compute().tolist() == [1.0, 1.0]
    for initializer in (INITIALIZERS["normal"], INITIALIZERS["glorot uniform"]):
        with pytest.raises(ModuleError, match=r"shape \(2, 2\) needs a random key.*rngs=rngs"):
            _ = sx.Param(Init(initializer, (2, 2))).value
    assert issubclass(ModuleError, (ShardaxError, ValueError))


@pytest.mark.parametrize("read", [lambda p: p.value, lambda p: p + 1, lambda p: p.sum(), jnp.sin])
def test_missing_attribute_inside_initializer_is_named(read: Callable[[Any], Any]) -> None:
    def broken(key: Any, shape: Any, dtype: Any) -> Any:
        return jnp.zeros(shape, dtype).missing

    with pytest.raises(AttributeError, match="no attribute missing"):
        read(sx.Param(Init(broken, (2,))))


def test_property_of_variable_hides_no_missing_attribute() -> None:
    class Averaged(sx.Param):
        @property
        def mean(self) -> Any:  # arrays have one too
            return self.missing

    with pytest.raises(AttributeError, match="no attribute 'missing'"):
        _ = Averaged(jnp.ones(2)).mean


def test_stream_may_be_named_or_given() -> None:
    def draw(**arguments: Any) -> jax.Array:
        return Init(INITIALIZERS["normal"], (2,), **arguments).compute()

    rngs = [sx.Rngs(params=0, noise=1) for _ in range(4)]
    assert_equal_values(draw(rngs=rngs[0]), draw(stream=rngs[1].params))
    assert_equal_values(draw(stream="noise", rngs=rngs[2]), draw(stream=rngs[3].noise))
    assert float(draw(rngs=sx.Rngs(params=0))[0]) != float(draw(rngs=sx.Rngs(params=1))[0])


def test_variable_stays_lazy_when_initializer_raises() -> None:
    fails = True

    def initializer(key: Any, shape: Any, dtype: Any) -> Any:
        if fails:
            raise ValueError("not yet")
        return jnp.ones(shape, dtype)

    param = sx.Param(sx.Init(initializer, (2,)))
    with pytest.raises(ValueError, match="not yet"):
        _ = param.value
    assert param.is_lazy
    fails = False
    assert param.value.tolist() == [1.0, 1.0] and not param.is_lazy


@pytest.mark.parametrize("copied", [sx.clone, lambda p: p.freeze()], ids=["clone", "freeze"])
def test_copy_of_lazy_variable_is_lazy_and_computes_equal_numbers(copied: Any) -> None:
    param = sx.Param(Init(INITIALIZERS["normal"], (3,), rngs=sx.Rngs(0)))
    copy = copied(param)
    assert param.is_lazy and copy.is_lazy
    assert_equal_values(copy.value, param.value)
    assert copy.value is not param.value


# --- key sources ---


def test_key_source_computes_what_fold_in_computes() -> None:
    expected = jax.random.fold_in(jax.random.fold_in(jax.random.key(3), 1), 2)
    for root in (3, jax.random.key(3)):
        lazy = LazyKey(KeySource(root).fold(1, 2))
        assert (lazy.shape, lazy.dtype) == ((), jax.random.key(0).dtype)
        assert_equal_values(lazy.compute(), expected)


def test_deleted_key_affects_only_its_own_stream() -> None:
    one, other = sx.Rngs(11), sx.Rngs(11)
    one.default.key.value.delete()  # as donating it would
    assert_equal_values(other(), sx.Rngs(11)())


def test_keys_follow_the_configured_implementation() -> None:
    default = sx.Rngs(0).default.key.value.dtype
    jax.config.update("jax_default_prng_impl", "rbg")
    try:
        assert sx.Rngs(0).default.key.value.dtype == jax.random.key(0).dtype != default
        assert sx.Rngs(0)().dtype == jax.random.key(0).dtype
    finally:
        jax.config.update("jax_default_prng_impl", "threefry2x32")
    assert sx.Rngs(0).default.key.value.dtype == default


def test_values_made_under_a_mesh_leave_later_ones() -> None:
    # What is kept of a generator is kept for the whole process, so this one is of this test alone.
    known = jax.extend.random.threefry_prng_impl
    functions = {"seed": known.seed, "split": known.split, "fold_in": known.fold_in}
    functions |= {"random_bits": known.random_bits, "key_shape": known.key_shape}
    generator = jax.extend.random.define_prng_impl(**functions, name="test_lazy")

    def values() -> sx.State:
        return sx.state(sx.nn.Linear(4, 3, rngs=sx.Rngs(jax.random.key(0, impl=generator))))

    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Explicit,))
    with jax.set_mesh(mesh):
        under_mesh = sx.nn.Linear(4, 3, rngs=sx.Rngs(jax.random.key(0, impl=generator)))
        made = under_mesh(jax.device_put(jnp.ones((2, 4)), PartitionSpec("data")))
        expected = jnp.ones((2, 4)) @ under_mesh.kernel.value
    assert_equal_values(values().flat()["kernel",], under_mesh.kernel.value)
    assert_equal_values(made, expected)


def test_initializer_with_effects_makes_them_once() -> None:
    calls: list[str] = []

    def initializer(key: Any, shape: Any, dtype: Any) -> Any:
        jax.debug.callback(lambda: calls.append("made"))
        return jnp.full(shape, 2, dtype)

    value = sx.Param(sx.Init(initializer, (2,))).value
    jax.effects_barrier()
    assert (value.tolist(), calls) == ([2.0, 2.0], ["made"])


def test_initializer_may_be_a_partial_function() -> None:
    def filled(key: Any, shape: Any, dtype: Any, *, by: float) -> Any:
        return jnp.full(shape, by, dtype)

    param = sx.Param(sx.Init(functools.partial(filled, by=3.0), (2,)), axes=("embed",))
    assert (param.tolist(), param.axes) == ([3.0, 3.0], ("embed",))


def test_names_of_an_initializer_belong_to_new_params() -> None:
    param = sx.Param(jnp.zeros(2), axes=("embed",))
    ones = sx.partition.with_partitioning(jax.nn.initializers.ones, ("mlp",))
    with pytest.raises(MetadataError) as caught:
        param[...] = sx.Init(ones, (2,))
    assert str(caught.value) == (
        "A Param with axes=('embed',) was given an initializer with the names ('mlp',) of a box: "
        "give the names once, to a new Param."
    )
    assert (param.tolist(), param.axes) == ([0.0, 0.0], ("embed",))


class Doubled(extend.LazyValue):
    """A lazy value of another Variable's."""

    def __init__(self, of: sx.Variable) -> None:
        self.of = of
        self.shape, self.dtype = of.shape, of.dtype

    def compute(self, sharding: Any = None) -> jax.Array:
        return jax.device_put(2 * self.of.value, sharding)


@pytest.mark.parametrize(
    "transform",
    [
        sx.grad,
        lambda loss: lambda base: sx.jit(sx.grad(loss))(base),
        lambda loss: lambda base: sx.grad(sx.remat(loss))(base),
    ],
)
def test_lazy_value_reads_variables_and_not_their_copies_in_transforms(transform: Any) -> None:
    base = sx.Param(jnp.ones(()))
    doubled = sx.Variable(Doubled(base))
    gradient = transform(lambda base: base.value * doubled.value)(base)
    assert (float(gradient), float(doubled)) == (2.0, 2.0)


def test_lazy_value_computes_in_plain_jax_transforms_without_leaks() -> None:
    base = sx.Param(jnp.ones(()))
    doubled = sx.Variable(Doubled(base))
    with jax.check_tracer_leaks():
        assert float(jax.jit(lambda x: x + doubled.value)(1.0)) == 3.0
    assert float(doubled) == 2.0
