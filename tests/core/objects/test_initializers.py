# SPDX-License-Identifier: Apache-2.0
"""Programs of initializers: compiled once, together, and cut only where that changes no bit."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import shardax as sx
from shardax._core.graph.static import Static
from shardax._core.init.programs import compile_together, initializer_program

SHAPE = (256, 256)
INIT = jax.nn.initializers


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


def unit_norm(key: Any, shape: tuple[int, ...], dtype: Any) -> Any:
    drawn = jax.random.normal(key, shape, dtype)
    return drawn / jnp.sqrt((drawn**2).sum())


def nested(key: Any, shape: tuple[int, ...], dtype: Any) -> Any:
    return jax.jit(unit_norm, static_argnums=(1, 2))(key, shape, dtype)


@pytest.mark.parametrize(
    ("initializer", "impl", "in_parts"),
    [
        (INIT.lecun_normal(), "threefry2x32", True),
        (INIT.normal(), "threefry2x32", True),
        (INIT.uniform(), "threefry2x32", True),
        (INIT.zeros, "threefry2x32", True),
        (INIT.zeros, "rbg", True),
        (INIT.normal(), "rbg", False),
        (INIT.orthogonal(), "threefry2x32", False),
        (unit_norm, "threefry2x32", False),
        (nested, "threefry2x32", False),
    ],
    ids=lambda value: getattr(value, "__qualname__", str(value)),  # workers compare ids
)
def test_initializer_program_computes_only_elementwise_in_parts(
    initializer: Any, impl: str, in_parts: bool, auto_mesh: Mesh
) -> None:
    sharding = NamedSharding(auto_mesh, P("data", "model"))
    program = initializer_program(Static(initializer), SHAPE, np.dtype("float32"), impl, sharding)
    memory = program.lower().compile().memory_analysis()
    whole = 4 * SHAPE[0] * SHAPE[1]
    assert memory.output_size_in_bytes == whole // 8
    assert (memory.temp_size_in_bytes < whole) == in_parts


def test_programs_are_found_again_by_what_they_do(auto_mesh: Mesh) -> None:
    def program(initializer: Any, spec: P) -> Any:
        sharding = NamedSharding(auto_mesh, spec)
        return initializer_program(
            Static(initializer), (8, 8), np.dtype("float32"), "threefry2x32", sharding
        )

    assert program(INIT.normal(0.1), P("data")) is program(INIT.normal(0.1), P("data"))
    assert program(INIT.normal(0.1), P("data")) is not program(INIT.normal(0.2), P("data"))
    assert program(INIT.normal(0.1), P("data")) is not program(INIT.normal(0.1), P("model"))


def test_compile_together_compiles_each_program_once(programs_compiled: list[str]) -> None:
    programs = [
        initializer_program(Static(INIT.normal(scale)), (3, 5), np.dtype("float32"), impl, None)
        for scale in (0.125, 0.25)
        for impl in ("threefry2x32", "rbg")
    ]
    compile_together([*programs, *programs])
    assert len(programs_compiled) == 4
    compile_together(programs)
    words = {"threefry2x32": np.zeros(2, np.uint32), "rbg": np.zeros(4, np.uint32)}
    for program, impl in zip(programs, ["threefry2x32", "rbg"] * 2, strict=True):
        program(words[impl])
    assert len(programs_compiled) == 4


def test_initializer_programs_are_compiled_for_drawn_values_only(
    programs_compiled: list[str],
) -> None:
    sx.nn.Linear(2, 2, rngs=sx.Rngs(0)).kernel.value.block_until_ready()  # the seed, once for all
    programs_compiled.clear()
    layer = sx.nn.Linear(3, 29, rngs=sx.Rngs(0))
    layer.kernel.value.block_until_ready()
    assert len(programs_compiled) == 1
    layer.kernel.value = np.ones((3, 29), np.float32)
    read = np.asarray(layer.kernel.value), np.asarray(layer.bias.value)
    copy = sx.clone(layer)
    assert len(programs_compiled) == 1
    np.testing.assert_array_equal(read[0] + read[1], np.ones((3, 29)))
    layer.kernel.value.delete()
    np.testing.assert_array_equal(copy.kernel, np.ones((3, 29)))


def test_unsharded_model_materializes_as_if_read_individually() -> None:
    def make() -> list[sx.Param[Any]]:
        rngs = sx.Rngs(0)
        makers = [INIT.normal(), INIT.lecun_normal(), INIT.zeros]
        return [sx.Param(sx.Init(maker, (4, 6), rngs=rngs)) for maker in makers]

    one_by_one = [np.asarray(parameter.value) for parameter in make()]
    model = make()
    leaves = jax.tree.leaves(sx.state(model))  # reads all of them at once
    assert not any(parameter.is_lazy for parameter in model)
    assert [leaf.tobytes() for leaf in map(np.asarray, leaves)] == [
        value.tobytes() for value in one_by_one
    ]


@pytest.mark.parametrize("spec", [P(), P("data"), P(None, "model"), P("data", "model")])
def test_array_without_elements_is_laid_out_and_read(mesh: Mesh, spec: P) -> None:
    place = NamedSharding(mesh, spec)
    for initializer in (INIT.ones, INIT.normal()):
        lazy = sx.Init(initializer, (2, 0), rngs=sx.Rngs(0))
        array = lazy.compute(place)
        assert array.sharding == place
        assert np.asarray(array).shape == (2, 0)
    rows = NamedSharding(mesh, P("data"))
    stacked = lazy.run(lazy.program(rows, (2,)), [np.zeros((2, 2), np.uint32)])
    assert (stacked.sharding, np.asarray(stacked).shape) == (rows, (2, 2, 0))
