# SPDX-License-Identifier: Apache-2.0
"""Host functions over meshes, and large arrays on a machine with few processors."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import shardax as sx
from tests.tools.host.ways import Seen, doubling, same
from tests.tools.host.ways import way as way

host_function = sx.host.host_function


def squared(**options: Any) -> sx.host.HostFunction:
    return host_function(
        np.square, out=same, vjp=lambda args, result, ct: (2 * args[0] * ct,), **options
    )


def sharded(mesh: Mesh) -> jax.Array:
    return jax.device_put(jnp.arange(8.0), NamedSharding(mesh, P("data")))


@pytest.mark.usefixtures("way")
def test_shards_call_the_function_on_their_own_part(mesh: Mesh) -> None:
    seen = Seen()
    over = jax.shard_map(doubling(seen), mesh=mesh, in_specs=P("data"), out_specs=P("data"))
    assert jax.jit(over)(sharded(mesh)).tolist() == (2 * np.arange(8.0)).tolist()
    assert {shape for shape, _, _ in seen.calls} == {(4,)}


def test_results_vary_over_the_axes_of_arguments(mesh: Mesh) -> None:
    """By itself ``jax.pure_callback`` passes here, and one shard's part stands for all."""
    over = jax.shard_map(doubling(), mesh=mesh, in_specs=P("data"), out_specs=P())
    with pytest.raises(ValueError, match="replication"):
        jax.jit(over)(sharded(mesh))
    summed = jax.shard_map(
        lambda x: jax.lax.psum(doubling()(x), "data"), mesh=mesh, in_specs=P("data"), out_specs=P()
    )
    assert jax.jit(summed)(sharded(mesh)).tolist() == [8.0, 12.0, 16.0, 20.0]


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("transform", [jax.shard_map, sx.shard_map])
def test_gradients_by_shards_are_those_of_the_whole(mesh: Mesh, transform: Any) -> None:
    square = squared()

    def by_shard(x: Any, scale: Any) -> Any:
        return jax.lax.psum((scale * square(x)).sum(), "data")

    total = transform(by_shard, mesh=mesh, in_specs=(P("data"), P()), out_specs=P())
    of_x, of_scale = jax.jit(jax.grad(total, argnums=(0, 1)))(sharded(mesh), jnp.float32(3))
    assert of_x.tolist() == (6 * np.arange(8.0)).tolist()
    assert float(of_scale) == float((np.arange(8.0) ** 2).sum())


def test_replicated_argument_gets_summed_gradient_over_shards(mesh: Mesh) -> None:
    product = host_function(
        np.multiply, out=lambda x, s: x, vjp=lambda a, r, ct: (ct * a[1], (ct * a[0]).sum())
    )
    total = jax.shard_map(
        lambda x, s: jax.lax.psum(product(x, s).sum(), "data"),
        mesh=mesh,
        in_specs=(P("data"), P()),
        out_specs=P(),
    )
    assert float(jax.jit(jax.grad(total, argnums=1))(sharded(mesh), jnp.float32(3))) == 28.0


def test_axes_may_be_manual_in_part(auto_mesh: Mesh) -> None:
    """``jax.pure_callback`` has no way to do this."""
    over = jax.shard_map(
        squared(), mesh=auto_mesh, in_specs=P("data"), out_specs=P("data"), axis_names={"data"}
    )
    assert jax.jit(over)(sharded(auto_mesh)).tolist() == (np.arange(8.0) ** 2).tolist()


def test_programs_over_sharded_arrays_see_whole_arrays(mesh: Mesh) -> None:
    seen = Seen()
    double = doubling(seen, vmap="vectorized", nondiff=True)
    with jax.set_mesh(mesh):
        result = jax.jit(lambda x: double(x) + x)(sharded(mesh))
        of_x = jax.jit(jax.grad(lambda x: (squared()(x) * x).sum()))(sharded(mesh))
    assert result.tolist() == (3 * np.arange(8.0)).tolist()
    assert of_x.tolist() == (3 * np.arange(8.0) ** 2).tolist()
    assert {shape for shape, _, _ in seen.calls} == {(8,)}


def test_outside_of_programs_sharded_arrays_arrive_whole(mesh: Mesh) -> None:
    assert doubling()(sharded(mesh)).tolist() == (2 * np.arange(8.0)).tolist()


LARGE = """
    import faulthandler, os
    faulthandler.dump_traceback_later(1000, exit=True)
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    import jax, jax.numpy as jnp, numpy as np
    from jax.sharding import PartitionSpec as P
    import shardax as sx

    jax.config.update("jax_num_cpu_devices", 2)
    double = sx.host.host_function(lambda x: 2 * x, out=lambda x: x)
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))

    def by_shard(x):
        return jax.lax.psum(double(x @ x.T).sum(), "data")

    over = jax.jit(jax.shard_map(by_shard, mesh=mesh, in_specs=P("data"), out_specs=P()))
    x = jnp.ones((1600, 200))
    print([float(over(x + i)) for i in range(4)][0] > 0)
"""


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="needs Linux")
def test_large_arrays_do_not_deadlock_sending_program() -> None:
    """JAX's callbacks do, with as many shards as threads: the copy never gets its turn."""
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(LARGE)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "True\n"), done.stderr
