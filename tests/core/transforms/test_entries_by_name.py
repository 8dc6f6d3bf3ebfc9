# SPDX-License-Identifier: Apache-2.0
"""Axes and specs by name of argument, and texts in results of compiled functions."""

from __future__ import annotations

import enum
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import Mesh, PartitionSpec

import shardax as sx
from shardax.errors import PrefixError, TransformError
from tests.advice import run_advice
from tests.strategies import Node


def _model() -> Node:
    model = Node()
    model.w, model.count = sx.Param(jnp.arange(4.0)), sx.Variable(jnp.zeros(4))
    return model


def _scaled(model: Any, x: Any, *, scale: Any = 1.0) -> Any:
    model.count.value = model.count + 1
    return (model.w * x * scale).sum()


XS = jnp.arange(4.0)


def test_vmap_takes_axes_by_name() -> None:
    by_name, by_position = _model(), _model()
    axes: dict[str, Any] = {"scale": None, "x": 0, "model": 0}
    result = sx.vmap(_scaled, in_axes=axes)(by_name, x=XS, scale=jnp.float32(2))
    expected = sx.vmap(lambda m, x: _scaled(m, x, scale=2.0))(by_position, XS)
    assert result.tolist() == expected.tolist() == [0.0, 2.0, 8.0, 18.0]
    assert by_name.count.tolist() == [1.0] * 4
    of_states = {"model": sx.StateAxes({sx.Param: None, ...: 0}), "x": 0}
    assert sx.vmap(_scaled, in_axes=of_states)(by_name, XS).shape == (4,)


def test_scan_takes_axes_by_name() -> None:
    model = _model()

    def body(total: Any, model: Any, x: Any, *, shift: Any) -> Any:
        return total + _scaled(model, x) + shift, x

    axes = {"total": sx.Carry, "model": None, "x": 0, "shift": None}
    total, rows = sx.scan(body, in_axes=axes)(0.0, model, XS, shift=1.0)
    assert (float(total), rows.tolist(), model.count.tolist()) == (40.0, XS.tolist(), [4.0] * 4)


def test_shard_map_takes_specs_by_name(auto_mesh: Mesh) -> None:
    split, whole = PartitionSpec("model"), PartitionSpec()
    run = sx.shard_map(
        lambda x, *, scale: x * scale,
        mesh=auto_mesh,
        in_specs={"x": split, "scale": whole},
        out_specs=split,
    )
    assert run(XS, scale=jnp.float32(2)).tolist() == [0.0, 2.0, 4.0, 6.0]


def test_shard_map_shows_arguments_by_name_alone_whole_to_every_shard(auto_mesh: Mesh) -> None:
    split, whole = PartitionSpec("model"), PartitionSpec()
    shapes: list[Any] = []

    def scaled(x: Any, shift: Any = 0.0, mask: Any = 1.0, *, scale: Any, **others: Any) -> Any:
        shapes.append([jnp.shape(item) for item in (x, shift, mask, scale, *others.values())])
        return x * jnp.sum(scale) * mask + shift

    for specs in ((split, whole, split), (split, whole), (split,)):
        run = sx.shard_map(scaled, mesh=auto_mesh, in_specs=specs, out_specs=split)
        assert run(XS, scale=2.0).tolist() == [0.0, 2.0, 4.0, 6.0]
        assert run(x=XS, scale=jnp.ones(4), more=XS).tolist() == [0.0, 4.0, 8.0, 12.0]
        assert shapes[-1] == [(1,), (), (), (4,), (4,)]
    run = sx.shard_map(scaled, mesh=auto_mesh, in_specs=(split, whole, split), out_specs=split)
    assert run(XS, mask=XS, scale=1.0).tolist() == [0.0, 1.0, 4.0, 9.0]
    assert shapes[-1] == [(1,), (), (1,), ()]

    model = sx.Param(jnp.full(4, 3.0))
    run = sx.shard_map(
        lambda x, *, model: x * model[:1], mesh=auto_mesh, in_specs=(split,), out_specs=split
    )
    assert run(XS, model=model).tolist() == [0.0, 3.0, 6.0, 9.0]


@pytest.mark.parametrize("count", [0, 1, 3, 4])
def test_shard_map_entries_that_do_not_fit_name_those_that_do(count: int, auto_mesh: Mesh) -> None:
    def scaled(x: Any, shift: Any, *, scale: Any) -> Any:
        return x * scale + shift

    split = PartitionSpec("model")
    options: dict[str, Any] = {"mesh": auto_mesh, "out_specs": split}
    run = sx.shard_map(scaled, in_specs=(PartitionSpec(),) * count, **options)
    with pytest.raises(PrefixError, match=r"the function takes x, shift, and the call") as caught:
        run(XS, XS, scale=2.0)
    names: dict[str, Any] = {"jax": jax}
    run_advice(caught.value, "in_specs={'x': jax.P(), 'shift': jax.P(), 'scale': jax.P()}", names)
    specs = {**names["in_specs"], "x": split, "shift": split}
    again = sx.shard_map(scaled, in_specs=specs, **options)(XS, XS, scale=2.0)
    assert again.tolist() == [0.0, 3.0, 6.0, 9.0]


def test_argument_without_an_entry_is_refused() -> None:
    with pytest.raises(PrefixError, match="by name of argument, model, and none for x, scale"):
        sx.vmap(_scaled, in_axes={"model": 0})(_model(), XS, scale=XS)


def test_in_axes_of_other_dicts_are_entries_of_containers() -> None:
    add = sx.vmap(lambda pair: pair["a"] + pair["b"], in_axes={"a": 0, "b": None})
    assert add({"a": XS, "b": 1.0}).tolist() == [1.0, 2.0, 3.0, 4.0]


# --- texts in results ---


class Mode(enum.Enum):
    """A mode."""

    TRAIN = 1


def test_compiled_functions_return_texts_of_their_trace() -> None:
    traces: list[int] = []

    @sx.jit
    def step(model: Any, x: Any) -> Any:
        traces.append(1)
        model.count.value = model.count + x
        return {"name": f"{x.dtype}", "y": [x, Mode.TRAIN, model], "raw": b"a", "new": sx.Param(x)}

    model = _model()
    for count in (1, 2):
        result = step(model, jnp.float32(1))
        assert (result["name"], result["y"][1], result["raw"]) == ("float32", Mode.TRAIN, b"a")
        assert result["y"][2] is model and float(result["y"][0]) == float(result["new"]) == 1.0
        assert model.count.tolist() == [float(count)] * 4
    assert step(model, jnp.int32(1))["name"] == "int32" and len(traces) == 2
    outer = sx.jit(lambda model, x: (step(model, x)["name"], x))
    assert outer(model, jnp.float32(1))[0] == "float32"
    assert step.lower(model, jnp.float32(1)).compile()(model, jnp.float32(1))["name"] == "float32"
    with pytest.raises(TransformError, match=r"returned .* of type .* at the result itself"):
        sx.jit(lambda: jax.nn.relu)()
    with pytest.raises(TransformError, match="returned 'text' of type str"):
        sx.vmap(lambda x: "text")(XS)


# --- arguments of scan that are no arrays ---


@pytest.mark.parametrize("around", [lambda f: f, sx.jit], ids=["eager", "jit"])
def test_scan_takes_configuration_with_none(around: Any) -> None:
    def run(model: Any) -> Any:
        def body(total: Any, model: Any, x: Any, mode: str, how: Any) -> Any:
            scale = how["scale"] if mode == "scaled" else 1.0
            return total + how["function"](_scaled(model, x, scale=scale)), x

        axes = (sx.Carry, None, 0, None, None)
        how = {"scale": jnp.float32(2), "function": jnp.negative}
        return sx.scan(body, in_axes=axes)(0.0, model, XS, "scaled", how)[0]

    model = _model()
    assert (float(around(run)(model)), model.count.tolist()) == (-72.0, [4.0] * 4)


def test_configuration_is_neither_carried_nor_mapped() -> None:
    def body(carry: Any, x: Any) -> Any:
        return (carry[0] + x, carry[1]), x

    with pytest.raises(TransformError, match=r"\.carry\[1\] of sx\.scan is a str") as caught:
        sx.scan(body)((0.0, "add"), XS)
    assert "with None in in_axes" in str(caught.value)
    with pytest.raises(TransformError, match=r"axis 0 of what stands at \.x"):
        sx.scan(lambda carry, x: (carry, x))(0.0, "add")
