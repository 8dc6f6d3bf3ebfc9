# SPDX-License-Identifier: Apache-2.0
"""The layout table says what ``shard`` really allocates, before anything is allocated."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import shardax as sx
from shardax.errors import PartitionCheckError
from shardax.view.parameter_table import ParameterRow, format_bytes, format_count

RULES = sx.models.DECODER_RULES


def decoder() -> sx.models.Decoder:
    config = sx.models.DecoderConfig(num_kv_heads=4, tied_head=True)
    return sx.models.Decoder(config, rngs=sx.Rngs(0))


def bytes_by_device(tree: Any) -> dict[int, int]:
    """What the Variables' shards take on each device."""
    taken: dict[int, int] = {}
    for _, variable in sx.iter_variables(tree):
        for shard in variable.value.addressable_shards:
            taken[shard.device.id] = taken.get(shard.device.id, 0) + shard.data.nbytes
    return taken


def test_bytes_per_device_are_those_that_sharding_allocates(mesh: Mesh) -> None:
    model = decoder()
    table = sx.view.table(model, mesh=mesh, rules=RULES)
    sx.shard(model, mesh, RULES)
    assert set(bytes_by_device(model).values()) == {table.bytes_per_device}
    assert table.nbytes == sum(v.value.nbytes for _, v in sx.iter_variables(model))
    assert table.devices == mesh.size == len(bytes_by_device(model))
    leaves = jax.tree_util.tree_leaves_with_path(model)
    held = {jax.tree_util.keystr(path): x.addressable_shards[0].data.nbytes for path, x in leaves}
    assert {row.path: row.bytes_per_device for row in table.rows} == held


def test_row_describes_parameter_and_its_placement(auto_mesh: Mesh) -> None:
    rows = {row.path: row for row in sx.view.table(decoder(), mesh=auto_mesh, rules=RULES).rows}
    assert rows[".layers[0].attn.q.kernel"] == ParameterRow(
        path=".layers[0].attn.q.kernel",
        type="Param",
        shape=(64, 4, 16),
        dtype="float32",
        axes="embed, heads, head_dim",
        spec="-, model, -",
        size=64 * 4 * 16,
        nbytes=64 * 4 * 16 * 4,
        bytes_per_device=64 * 16 * 4,
    )


def test_text_has_line_per_row_and_totals(auto_mesh: Mesh) -> None:
    table = sx.view.table(decoder(), mesh=auto_mesh, rules=RULES)
    lines = str(table).splitlines()
    assert lines[0].split() == [
        *("path", "type", "shape", "dtype", "axes", "spec", "elements", "bytes/device")
    ]
    assert [line.split()[0] for line in lines[1:-1]] == [row.path for row in table.rows]
    assert lines[-1] == (
        f"{table.size:,} elements, {table.nbytes / 1024:.1f} KiB; "
        f"{table.bytes_per_device / 1024:.1f} KiB per device on 8 devices"
    )
    assert len({len(line) for line in lines[:-1]}) == 1


@pytest.mark.usefixtures("without_collections")
def test_lazy_model_is_shown_without_allocating_anything(auto_mesh: Mesh) -> None:
    model = decoder()
    before = len(jax.live_arrays())
    table = sx.view.table(model, mesh=auto_mesh, rules=RULES)
    assert len(jax.live_arrays()) == before
    assert all(variable.is_lazy for _, variable in sx.iter_variables(model))
    assert table.size == sum(v.size for _, v in sx.iter_variables(model))


def test_mesh_and_rules_in_scope_count(auto_mesh: Mesh) -> None:
    with jax.set_mesh(auto_mesh), sx.axis_rules(RULES):
        assert sx.view.table(decoder()) == sx.view.table(decoder(), mesh=auto_mesh, rules=RULES)


def test_table_without_mesh_shows_specs_for_one_device() -> None:
    table = sx.view.table(decoder(), rules=RULES)
    assert {row.path: row.spec for row in table.rows}[".embed.embedding"] == "model, -"
    assert (table.devices, table.bytes_per_device) == (1, table.nbytes)


def test_placed_model_is_shown_as_placed(auto_mesh: Mesh) -> None:
    model = sx.shard(decoder(), auto_mesh, RULES)
    shown = sx.view.table(model)
    assert shown.devices == 8
    assert set(bytes_by_device(model).values()) == {shown.bytes_per_device}
    assert {row.path: row.spec for row in shown.rows}[".layers[0].mlp.down.kernel"] == "model, -"


def test_shared_variable_has_one_row() -> None:
    class Tied(sx.Module):
        def __init__(self) -> None:
            self.embed = sx.Param(jnp.zeros((4, 2)))
            self.head = self.embed

    assert [row.path for row in sx.view.table(Tied()).rows] == [".embed"]


def test_filters_choose_rows_and_totals_follow() -> None:
    table = sx.view.table(decoder(), sx.PathContains("embed"))
    assert [row.path for row in table.rows] == [".embed.embedding"]
    assert table.size == 256 * 64
    assert sx.view.table(decoder(), sx.BatchStat).rows == ()


def test_variable_of_several_arrays_has_several_rows(auto_mesh: Mesh) -> None:
    state = sx.Variable({"sum": jnp.zeros((2, 3)), "count": jnp.int32(0)})
    rows = sx.view.table({"metric": state}, mesh=auto_mesh, rules=RULES).rows
    assert [(row.path, row.shape, row.nbytes) for row in rows] == [
        (".metric['count']", (), 4),
        (".metric['sum']", (2, 3), 24),
    ]


def test_named_array_in_variable_shows_own_names(auto_mesh: Mesh) -> None:
    weight = sx.Param(sx.named.zeros({"mlp": 16, "embed": 8}))
    (row,) = sx.view.table(weight, mesh=auto_mesh, rules={"mlp": "model", "embed": "data"}).rows
    assert (row.axes, row.spec, row.bytes_per_device) == ("embed, mlp", "data, model", 64)
    (row,) = sx.view.table(weight, rules={"mlp": "model"}).rows
    assert (row.axes, row.spec) == ("embed, mlp", "-, model")


@pytest.mark.parametrize(("implementation", "size"), [("threefry2x32", 8), ("rbg", 16)])
def test_random_keys_count_their_words(implementation: str, size: int) -> None:
    key = sx.RngState(jax.random.key(0, impl=implementation))
    assert sx.view.table({"key": key}).nbytes == size


def test_model_and_optimizer_are_shown_together(auto_mesh: Mesh) -> None:
    import optax

    model = decoder()
    both = (model, sx.train.Optimizer(model, optax.adam(1e-3)))
    table = sx.view.table(both, mesh=auto_mesh, rules=RULES)
    sx.shard(both, auto_mesh, RULES)
    assert set(bytes_by_device(both).values()) == {table.bytes_per_device}
    assert sum(row.type == "OptState" for row in table.rows) > sum(
        row.type == "Param" for row in table.rows
    )


def test_unplaceable_variable_is_reported_by_path() -> None:
    mesh = jax.make_mesh((1, 8), ("data", "model"))
    with pytest.raises(PartitionCheckError, match=r"\.layers\[1\]\.attn\.k\.kernel"):
        sx.view.table(decoder(), mesh=mesh, rules=RULES)


def test_dimensions_over_two_mesh_axes_show_both(auto_mesh: Mesh) -> None:
    place = NamedSharding(auto_mesh, PartitionSpec(None, ("data", "model")))
    array = jax.device_put(np.zeros((3, 8), np.float32), place)
    (row,) = sx.view.table(sx.Param(array)).rows
    assert (row.spec, row.bytes_per_device) == ("-, data+model", 12)


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (3 * 2**20, "3.0 MiB"),
        (5 * 2**30, "5.0 GiB"),
        (2**50, "1024.0 TiB"),
    ],
)
def test_bytes_are_written_in_binary_units(count: int, text: str) -> None:
    assert format_bytes(count) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0"), (9999, "9,999"), (1_773_280, "1.77 M"), (2.5e13, "25 T"), (3e21, "3e+03 E")],
)
def test_counts_are_written_in_steps_of_a_thousand(count: float, text: str) -> None:
    assert format_count(count) == text
