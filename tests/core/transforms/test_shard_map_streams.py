# SPDX-License-Identifier: Apache-2.0
"""Random streams under shard_map."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

import shardax as sx
from shardax.errors import TransformError
from tests.advice import run_advice
from tests.core.transforms.sharded import P

GRID = P(("data", "model"))


def _draw_two(rngs: sx.Rngs) -> Any:
    return jnp.stack([jax.random.bits(rngs.dropout(), ()) for _ in range(2)])[None]


def test_stream_is_split_over_mesh_axes(mesh: Mesh) -> None:
    rngs = sx.Rngs(dropout=0, noise=1)
    run = sx.jit(sx.shard_map(_draw_two, mesh=mesh, in_specs=GRID, out_specs=GRID))
    first, second = run(rngs), run(rngs)
    assert len({*np.ravel(first).tolist(), *np.ravel(second).tolist()}) == 2 * 8 * 2
    assert (int(rngs.dropout.count), int(rngs.noise.count)) == (2, 0)
    again = run(sx.Rngs(dropout=0, noise=1))
    assert again.tolist() == first.tolist()


def test_eager_and_compiled_draws_are_equal(auto_mesh: Mesh) -> None:
    eager, compiled = sx.Rngs(dropout=0), sx.Rngs(dropout=0)
    run = sx.shard_map(sx.jit(_draw_two), mesh=auto_mesh, in_specs=GRID, out_specs=GRID)
    assert run(eager).tolist() == sx.jit(run)(compiled).tolist()
    assert int(eager.dropout.count) == int(compiled.dropout.count) == 1


def test_split_stream_differs_only_along_its_spec(auto_mesh: Mesh) -> None:
    run = sx.shard_map(
        lambda rngs: jax.random.normal(rngs.params(), (1,)),
        mesh=auto_mesh,
        in_specs=P("data"),
        out_specs=P("data"),
    )
    rows = sx.jit(run)(sx.Rngs(0))
    assert len(set(rows.tolist())) == 2
    draw = jax.random.fold_in(sx.Rngs(0).default.key.value, 0)
    expected = [
        jax.random.normal(jax.random.fold_in(jax.random.fold_in(draw, shard), 0), (1,))[0]
        for shard in range(2)
    ]
    np.testing.assert_allclose(rows, expected, rtol=1e-6)


def test_replicated_stream_draws_the_same_everywhere(auto_mesh: Mesh) -> None:
    rngs, alone = sx.Rngs(0), sx.Rngs(0)
    run = sx.shard_map(
        lambda rngs: jax.random.normal(rngs.params(), (2,)),
        mesh=auto_mesh,
        in_specs=P(),
        out_specs=P(),
    )
    drawn = jax.random.normal(alone.params(), (2,))
    np.testing.assert_allclose(sx.jit(run)(rngs), drawn, rtol=1e-6)
    assert int(rngs.default.count) == 1


def test_dropout_drops_other_elements_in_every_shard(auto_mesh: Mesh) -> None:
    dropout = sx.nn.Dropout(0.5, rngs=sx.Rngs(dropout=0))
    split = sx.StateSharding({sx.RngState: P("data"), ...: P()})
    run = sx.shard_map(
        lambda dropout, x: dropout(x),
        mesh=auto_mesh,
        in_specs=(split, P("data")),
        out_specs=P("data"),
    )
    upper, lower = np.split(np.asarray(sx.jit(run)(dropout, jnp.ones(64))), 2)
    assert upper.tolist() != lower.tolist()
    assert set(upper.tolist()) == set(lower.tolist()) == {0.0, 2.0}


def test_split_stream_cannot_be_given_another_key(auto_mesh: Mesh) -> None:
    def reseed(rngs: sx.Rngs) -> None:
        rngs.default.key.value = jax.random.key(1)

    with pytest.raises(TransformError, match=r"\.rngs\.default\.key"):
        sx.shard_map(reseed, mesh=auto_mesh, in_specs=P("data"), out_specs=None)(sx.Rngs(0))


def test_new_layer_with_split_stream_is_refused(auto_mesh: Mesh) -> None:
    rngs = sx.Rngs(0)
    make = sx.shard_map(
        lambda rngs: sx.nn.Dropout(0.5, rngs=rngs),
        mesh=auto_mesh,
        in_specs=P("data"),
        out_specs=P(),
    )
    with pytest.raises(TransformError, match=r"RngState at \.result\.stream\.key") as caught:
        make(rngs)
    assert int(rngs.default.count) == 0
    code = "sx.StateSharding([(sx.RngState, P()), (..., spec)])"
    specs = run_advice(caught.value, code, {"sx": sx, "P": P, "spec": P("data")})
    whole = sx.shard_map(
        lambda rngs: sx.nn.Dropout(0.5, rngs=rngs), mesh=auto_mesh, in_specs=specs, out_specs=P()
    )
    assert whole(rngs).stream is rngs.default
