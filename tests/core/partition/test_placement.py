# SPDX-License-Identifier: Apache-2.0
"""Laying models out over meshes: where values go, that they stay the same, and what it costs."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import shardax as sx
from shardax._core.graph.static import Static
from shardax._core.init.lazy import LazyValue
from shardax._core.init.programs import InitializerProgram, initializer_program
from shardax.errors import (
    ConcurrentWriteError,
    ModuleError,
    NoMeshError,
    PartitionCheckError,
    TraceLeakError,
    TransformError,
)
from shardax.models.decoder import DECODER_RULES, Decoder, DecoderConfig
from tests.core.partition.models import RULES, Tower, assert_same_bits, kernel, values

INITIALIZERS: dict[str, tuple[Any, tuple[int, ...]]] = {
    "zeros": (jax.nn.initializers.zeros, (8, 16)),
    "ones": (jax.nn.initializers.ones, (8, 16)),
    "constant": (jax.nn.initializers.constant(0.1), (8, 16)),
    "normal": (jax.nn.initializers.normal(0.02), (8, 16)),
    "truncated_normal": (jax.nn.initializers.truncated_normal(), (8, 16)),
    "uniform": (jax.nn.initializers.uniform(), (8, 16)),
    "glorot_uniform": (jax.nn.initializers.glorot_uniform(), (8, 16)),
    "he_normal": (jax.nn.initializers.he_normal(), (8, 16)),
    "orthogonal": (jax.nn.initializers.orthogonal(), (8, 16)),
    "delta_orthogonal": (jax.nn.initializers.delta_orthogonal(), (3, 8, 16)),
}


def make_mesh(shape: tuple[int, int], kind: AxisType = AxisType.Auto) -> Mesh:
    devices = jax.devices()[: shape[0] * shape[1]]
    return jax.make_mesh(shape, ("data", "model"), axis_types=(kind, kind), devices=devices)


def places(tree: Any) -> dict[Any, Any]:
    """Path to sharding, as the arrays have it."""
    return {p: jax.tree.map(lambda x: x.sharding, v) for p, v in sx.state(tree).flat().items()}


@pytest.fixture
def programs_compiled() -> Iterator[list[str]]:
    """Collects one entry for every program that XLA compiles."""
    compiled: list[str] = []

    def listen(event: str, seconds: float, **_: Any) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            compiled.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield compiled
    jax.monitoring.unregister_event_duration_listener(listen)


# --- where values go ------------------------------------------------------------------------------


def test_lazy_model_is_created_sharded_with_unsharded_values(mesh: Mesh) -> None:
    model, plain = Tower(), Tower()
    assert sx.shard(model, mesh, RULES) is model
    assert places(model) == sx.shardings(plain, mesh, RULES).flat()
    assert_same_bits(values(model), values(plain))


def test_existing_model_is_moved_with_its_values(mesh: Mesh) -> None:
    model, plain = Tower(), Tower()
    values(model)
    sx.shard(model, mesh, RULES)
    assert places(model) == sx.shardings(plain, mesh, RULES).flat()
    assert_same_bits(values(model), values(plain))


def test_model_moves_between_meshes_and_axis_types() -> None:
    model = sx.shard(Tower(), make_mesh((2, 4)), RULES)
    other = make_mesh((4, 2), AxisType.Explicit)
    sx.shard(model, other, {"embed": "model"})
    assert places(model) == sx.shardings(Tower(), other, {"embed": "model"}).flat()
    assert_same_bits(values(model), values(Tower()))


def test_values_that_are_in_place_are_left_alone(mesh: Mesh) -> None:
    model = sx.shard(Tower(), mesh, RULES)
    before = jax.tree.leaves(sx.state(model))
    sx.shard(model, mesh, RULES)
    after = jax.tree.leaves(sx.state(model))
    assert all(one is other for one, other in zip(before, after, strict=True))


def test_sharded_model_computes_the_unsharded_result(auto_mesh: Mesh) -> None:
    tokens = jnp.arange(8)
    run = sx.jit(lambda model, tokens: model(tokens))
    expected = run(Tower(), tokens)
    assert np.allclose(run(sx.shard(Tower(), auto_mesh, RULES), tokens), expected, atol=1e-5)


def test_mesh_and_rules_in_scope_are_used(mesh: Mesh) -> None:
    with jax.set_mesh(mesh), sx.axis_rules(RULES):
        model = sx.shard(Tower())
    assert places(model) == sx.shardings(Tower(), mesh, RULES).flat()
    assert_same_bits(values(model), values(Tower()))


def test_shard_without_rules_replicates_everything(mesh: Mesh) -> None:
    model = sx.shard(Tower(), mesh)
    leaves = jax.tree.leaves(sx.state(model))
    assert all(leaf.sharding.is_fully_replicated for leaf in leaves)
    assert all(leaf.sharding.mesh == mesh for leaf in leaves)


def test_modules_are_placed_together_sharing_variables(mesh: Mesh) -> None:
    model = Tower()
    momentum = {"up": sx.OptState(jnp.zeros((8, 16)), axes=("embed", "mlp"))}
    tree = (model, momentum, [model.embed])
    placed = sx.shard(tree, mesh, RULES)
    assert placed is tree
    assert momentum["up"].sharding == NamedSharding(mesh, P("data", "model"))
    assert model.head is model.embed
    assert places(model) == sx.shardings(Tower(), mesh, RULES).flat()


def test_plain_arrays_and_states_return_in_new_pytree(mesh: Mesh) -> None:
    model = Tower(depth=1)
    state = sx.state(Tower(depth=1, seed=1))
    placed = sx.shard({"model": model, "step": jnp.int32(3), "state": state, "n": 5}, mesh, RULES)
    assert placed["model"] is model
    assert placed["n"] == 5
    assert int(placed["step"]) == 3
    assert placed["step"].sharding == NamedSharding(mesh, P())
    expected = sx.shardings(model, mesh, RULES).flat()
    assert {
        p: jax.tree.map(lambda x: x.sharding, v) for p, v in placed["state"].flat().items()
    } == (expected)
    assert placed["state"].origins() == state.origins()


def test_model_created_under_jit_can_be_sharded(auto_mesh: Mesh) -> None:
    model = sx.jit(lambda: sx.shard(Tower(depth=1), auto_mesh, RULES))()
    wanted = sx.shardings(Tower(depth=1), auto_mesh, RULES).flat()
    for path, place in places(model).items():
        if path[-1] in ("embed", "up", "down"):
            assert place.is_equivalent_to(wanted[path], 2)
    assert_same_bits(values(model), values(Tower(depth=1)))


class Doubled(LazyValue):
    """A value that is twice that of a Variable, at the moment when it is computed."""

    __slots__ = ("source",)

    def __init__(self, source: sx.Variable[Any]) -> None:
        self.source, self.shape, self.dtype = source, source.shape, source.dtype

    def compute(self, sharding: Any = None) -> jax.Array:
        return jax.device_put(2 * self.source.value, sharding)


def test_dependent_lazy_values_are_computed_after_their_sources(auto_mesh: Mesh) -> None:
    source = kernel(sx.Rngs(0), (8, 16), ("embed", "mlp"))
    plain = np.asarray(source.replace(source._value).value)
    dependent = sx.OptState(Doubled(source), axes=("embed", "mlp"))
    sx.shard([dependent, source], auto_mesh, RULES)
    assert source.sharding == NamedSharding(auto_mesh, P("data", "model"))
    assert dependent.sharding == source.sharding
    assert_same_bits([np.asarray(dependent.value)], [2 * plain])


# --- the same numbers on every mesh ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        *((name, (2, 4)) for name in INITIALIZERS),
        # One that is computed in parts, one that is not, and one without random numbers.
        *(
            (name, shape)
            for name in ("normal", "orthogonal", "zeros")
            for shape in [(8, 1), (1, 1)]
        ),
    ],
    ids=str,
)
def test_initializer_is_bitwise_equal_across_meshes(name: str, shape: tuple[int, int]) -> None:
    initializer, size = INITIALIZERS[name]
    mesh = make_mesh(shape)
    made = [sx.Param(sx.Init(initializer, size, rngs=sx.Rngs(0))) for _ in range(2)]
    made[0].set_metadata(axes=(*[None] * (len(size) - 2), "embed", "mlp"))
    sx.shard(made[0], mesh, RULES)
    assert made[0].sharding.spec[-2:] == ("data", "model")
    assert_same_bits([np.asarray(made[0].value)], [np.asarray(made[1].value)])


def test_decoder_parameters_are_bitwise_equal_when_sharded(mesh: Mesh) -> None:
    config = DecoderConfig(num_layers=1, num_heads=4, num_kv_heads=4)
    model = sx.shard(Decoder(config, rngs=sx.Rngs(0)), mesh, DECODER_RULES)
    assert not any(v.sharding.is_fully_replicated for _, v in sx.iter_variables(model, is_matrix))
    assert_same_bits(values(model), values(Decoder(config, rngs=sx.Rngs(0))))


def is_matrix(path: Any, variable: Any) -> bool:
    return variable.ndim > 1


@settings(max_examples=8)
@given(
    shape=st.lists(st.integers(1, 13), min_size=1, max_size=3),
    names=st.permutations(["data", "model", None]),
    initializer=st.sampled_from(["normal", "uniform", "truncated_normal"]),
    dtype=st.sampled_from(["float32", "bfloat16", "float16"]),
    seed=st.integers(0, 2**31 - 1),
)
def test_random_shapes_are_bitwise_equal_when_sharded(
    shape: list[int], names: list[Any], initializer: str, dtype: str, seed: int
) -> None:
    mesh = make_mesh((2, 4))
    axes = tuple(names[: len(shape)])
    size = tuple(n * mesh.shape.get(a, 1) for n, a in zip(shape, axes, strict=True))

    def make(axes: Any) -> sx.Param[Any]:
        init = sx.Init(INITIALIZERS[initializer][0], size, dtype, rngs=sx.Rngs(seed))
        return sx.Param(init, axes=axes)

    placed = sx.shard(make(axes), mesh, {"data": "data", "model": "model"})
    assert placed.sharding.spec == P(*axes)
    assert_same_bits([np.asarray(placed.value)], [np.asarray(make(None).value)])


EVERY_GENERATOR = """
import jax, shardax as sx
from jax.sharding import AxisType

jax.config.update("jax_num_cpu_devices", 8)
normal = jax.nn.initializers.lecun_normal()
for kind in (AxisType.Auto, AxisType.Explicit):
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(kind, kind))
    for generator in ("threefry2x32", "rbg", "unsafe_rbg"):
        def make():
            rngs = sx.Rngs(jax.random.key(5, impl=generator))
            axes = ("data", "model")
            return [sx.Param(sx.Init(normal, (8, 16), rngs=rngs), axes=axes) for _ in range(3)]

        placed = sx.shard(make(), mesh, {"data": "data", "model": "model"})
        pairs = list(zip(placed, make(), strict=True))
        assert all(one.sharding.shard_shape(one.shape) == (4, 4) for one, _ in pairs)
        same = [one.value.tolist() == other.value.tolist() for one, other in pairs]
        print(kind.name, generator, same)
"""


def test_generators_are_bitwise_equal_when_sharded() -> None:
    # By itself, because without LLVM's optimizations, as tests compile (see the root conftest.py),
    # the last bits of normal numbers of "rbg" depend on how large the computed part is.
    environment = {**os.environ}
    environment.pop("XLA_FLAGS", None)
    command = [sys.executable, "-c", EVERY_GENERATOR]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.stdout.splitlines() == [
        f"{kind} {generator} [True, True, True]"
        for kind in ("Auto", "Explicit")
        for generator in ("threefry2x32", "rbg", "unsafe_rbg")
    ], done.stderr


def rows_of_length_one(key: Any, shape: tuple[int, ...], dtype: Any) -> Any:
    """An initializer whose sums would round differently if they were cut in parts."""
    drawn = jax.random.normal(key, shape, dtype)
    return drawn / jnp.sqrt((drawn**2).sum(-1, keepdims=True))


def test_reducing_initializer_is_bitwise_equal_when_sharded(mesh: Mesh) -> None:
    def make() -> sx.Param[Any]:
        init = sx.Init(rows_of_length_one, (16, 4096), rngs=sx.Rngs(0))
        return sx.Param(init, axes=("embed", "mlp"))

    assert_same_bits(values(sx.shard(make(), mesh, {"mlp": "model"})), values(make()))


# --- what it costs --------------------------------------------------------------------------------


def bytes_per_device() -> dict[Any, int]:
    """Live bytes of arrays by device. Looking at ``addressable_shards`` would make new arrays."""
    held: dict[Any, int] = {}
    for array in jax.live_arrays():
        piece = math.prod(array.sharding.shard_shape(array.shape)) * array.dtype.itemsize
        for device in array.sharding.device_set:
            held[device] = held.get(device, 0) + piece
    return held


@pytest.mark.usefixtures("without_collections")
def test_peak_memory_is_shards_plus_one_array(mesh: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    rngs = sx.Rngs(0)
    model = [kernel(rngs, (256, 512), ("embed", "mlp")) for _ in range(6)]
    model += [kernel(rngs, (512, 256), ("mlp", None))]
    before = bytes_per_device()
    grown: list[int] = []
    call = InitializerProgram.__call__

    def probed(self: InitializerProgram, words: Any) -> Any:
        array = call(self, words)
        now = bytes_per_device()
        grown.append(max(now[device] - before.get(device, 0) for device in now))
        return array

    monkeypatch.setattr(InitializerProgram, "__call__", probed)
    sx.shard(model, mesh, RULES)
    monkeypatch.undo()
    pieces = [4 * math.prod(v.sharding.shard_shape(v.shape)) for v in model]
    assert pieces == [4 * 256 * 512 // 8] * 6 + [4 * 512 * 256 // 4]
    assert len(grown) == 7
    assert max(grown) <= sum(pieces) + max(pieces)
    assert grown[0] < 2 * pieces[0]  # the first array was written straight into its shards


@pytest.mark.usefixtures("without_collections")
def test_moving_frees_each_array_before_the_next(auto_mesh: Mesh) -> None:
    size = 4 * 256 * 512
    numbers = [np.full((256, 512), i, np.float32) for i in range(6)]
    model = [sx.Param(jnp.asarray(each), axes=("embed", "mlp")) for each in numbers]
    first = jax.devices()[0]
    before = bytes_per_device()[first]
    seen = []
    put = jax.device_put

    def probed(*args: Any, **kwargs: Any) -> Any:
        seen.append(bytes_per_device()[first] - before)
        return put(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax, "device_put", probed)
        sx.shard(model, auto_mesh, RULES)
    assert len(seen) == 6
    assert seen == [i * (size // 8 - size) for i in range(6)]
    assert bytes_per_device()[first] - before == 6 * (size // 8 - size)


def test_initializer_program_needs_less_than_whole_array(explicit_mesh: Mesh) -> None:
    shape, sharding = (256, 512), NamedSharding(explicit_mesh, P("data", "model"))
    initializer = Static(jax.nn.initializers.lecun_normal())
    with jax.set_mesh(explicit_mesh):
        program = initializer_program(initializer, shape, np.float32, "threefry2x32", sharding)
        memory = program.lower().compile().memory_analysis()
    assert memory.temp_size_in_bytes < 4 * 256 * 512 // 2


def test_number_of_programs_is_independent_of_depth(
    auto_mesh: Mesh, programs_compiled: list[str]
) -> None:
    def count(depth: int, turned: int) -> int:
        # In another order of devices all is compiled again, by itself.
        mesh = Mesh(np.roll(auto_mesh.devices, turned, axis=1), auto_mesh.axis_names)
        programs_compiled.clear()
        sx.shard(Tower(depth), mesh, RULES)
        return len(programs_compiled)

    count(2, turned=3)  # what is compiled without a mesh
    shallow = count(2, turned=1)
    assert shallow > 3
    assert count(40, turned=2) == shallow


def test_placing_equal_second_model_compiles_nothing(
    auto_mesh: Mesh, programs_compiled: list[str]
) -> None:
    sx.shard(Tower(seed=1), auto_mesh, RULES)
    programs_compiled.clear()
    sx.shard(Tower(seed=1), auto_mesh, RULES)
    assert programs_compiled == []


# --- what is refused, before anything is moved ----------------------------------------------------


def unchanged(model: Any, attempt: Callable[[], Any], error: type[Exception]) -> Any:
    """Asserts that the attempt raises and every value of the model is the same object after it."""
    before = [variable._value for _, variable in sx.iter_variables(model)]
    with pytest.raises(error) as caught:
        attempt()
    after = [variable._value for _, variable in sx.iter_variables(model)]
    assert all(one is other for one, other in zip(before, after, strict=True))
    return caught.value


def test_shard_lists_all_unplaceable_arrays_in_one_error(mesh: Mesh) -> None:
    rngs = sx.Rngs(0)
    model = {
        "fine": kernel(rngs, (8, 8), ("embed", "mlp")),
        "odd": kernel(rngs, (7, 8), ("embed", "mlp")),
        "odder": sx.Param(jnp.ones((8, 6)), axes=("embed", "mlp")),
        "stray": kernel(rngs, (8, 8), ("heads", None)),
    }
    rules = {"embed": "data", "mlp": "model", "heads": "modle"}
    error = unchanged(model, lambda: sx.shard(model, mesh, rules), PartitionCheckError)
    assert [(finding.path, finding.code) for finding in error.findings] == [
        (("odd",), "indivisible"),
        (("odder",), "indivisible"),
        (("stray",), "unknown-mesh-axis"),
    ]
    assert "nothing was moved" in str(error)
    assert "Did you mean 'model'?" in str(error)


def test_error_policy_lists_conflicts_and_unmapped_names(mesh: Mesh) -> None:
    model = Tower(depth=1)
    rules = sx.Rules({"embed": "model", "mlp": "model"}, on_conflict="error", on_unmapped="error")
    error = unchanged(model, lambda: sx.shard(model, mesh, rules), PartitionCheckError)
    assert [(finding.path, finding.code) for finding in error.findings] == [
        (("embed",), "unmapped-name"),
        (("layers", 0, "up"), "mesh-axis-conflict"),
        (("layers", 0, "down"), "mesh-axis-conflict"),
    ]


def test_abstract_and_deleted_values_are_listed(mesh: Mesh) -> None:
    gone = jnp.ones(8)
    gone.delete()
    model = {
        "fine": kernel(sx.Rngs(0), (8, 8), ("embed", "mlp")),
        "shape": sx.Param(jax.ShapeDtypeStruct((8,), jnp.float32)),
        "gone": sx.Param(gone),
    }
    error = unchanged(model, lambda: sx.shard(model, mesh, RULES), PartitionCheckError)
    assert {(finding.path, finding.code) for finding in error.findings} == {
        (("shape",), "abstract"),
        (("gone",), "deleted"),
    }


def test_initializer_missing_its_key_fails_before_placement(mesh: Mesh) -> None:
    model = [
        kernel(sx.Rngs(0), (8, 8), ("embed", "mlp")),
        sx.Param(sx.Init(jax.nn.initializers.normal(), (4,))),
    ]
    error = unchanged(model, lambda: sx.shard(model, mesh, RULES), ModuleError)
    assert "rngs=rngs" in str(error)


def test_mesh_with_devices_is_required() -> None:
    model = Tower()
    error = unchanged(model, lambda: sx.shard(model, rules=RULES), NoMeshError)
    assert "shard needs a mesh" in str(error)
    shape_only = AbstractMesh((2, 4), ("data", "model"))
    unchanged(model, lambda: sx.shard(model, shape_only, RULES), TransformError)
    unchanged(model, lambda: sx.shard(model, ("data", "model"), RULES), TransformError)  # pyright: ignore[reportArgumentType] (on purpose)


def test_read_only_copy_cannot_be_sharded(auto_mesh: Mesh) -> None:
    @jax.jit
    def inside(model: Any) -> Any:
        return sx.shard(model, auto_mesh, RULES).count.value

    with pytest.raises(ModuleError, match=r"\.embed"):
        inside(Tower())


@pytest.mark.parametrize("transform", [jax.jit, jax.vmap])
def test_captured_model_in_plain_transforms_is_refused(transform: Any, auto_mesh: Mesh) -> None:
    model = Tower()

    def inside(x: Any) -> Any:
        sx.shard(model, auto_mesh, RULES)
        return x

    error = unchanged(model, lambda: transform(inside)(jnp.ones(2)), TraceLeakError)
    assert "Cannot write to the" in str(error) and ".embed" in str(error)


class WritingWhileComputed(LazyValue):
    """A lazy value while which is computed another thread writes its Variable."""

    def __init__(self) -> None:
        self.shape, self.dtype = (8,), jnp.dtype("float32")
        self.variable: sx.Param | None = None

    def compute(self, sharding: Any = None) -> jax.Array:
        def write() -> None:
            assert self.variable is not None
            self.variable.value = jnp.full(8, 7.0)

        thread = threading.Thread(target=write)
        thread.start()
        thread.join()
        return jax.device_put(jnp.zeros(8), sharding)


def test_shard_keeps_what_another_thread_wrote_meanwhile(auto_mesh: Mesh) -> None:
    lazy = WritingWhileComputed()
    written, other = sx.Param(lazy, axes=("embed",)), sx.Param(jnp.ones(8), axes=("embed",))
    lazy.variable = written
    with pytest.raises(ConcurrentWriteError, match=r"wrote \[0\] while the model was laid out"):
        sx.shard([written, other], auto_mesh, {"embed": "data"})
    assert written.value.tolist() == [7.0] * 8
    assert other.sharding == NamedSharding(auto_mesh, P("data"))
    sx.shard([written, other], auto_mesh, {"embed": "data"})
    assert written.sharding == other.sharding and written.value.tolist() == [7.0] * 8
