# SPDX-License-Identifier: Apache-2.0
"""``sx.tabulate``: a model's Modules in one call."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import shardax as sx
from shardax import nn
from shardax.errors import ViewError


class Net(sx.Module):
    """A compiled block, a norm and a dropout."""

    def __init__(self) -> None:
        rngs = sx.Rngs(0)
        self.block = nn.Linear(2, 4, rngs=rngs)
        self.norm = nn.BatchNorm(4)
        self.dropout = nn.Dropout(0.5, rngs=rngs)
        self.unused = nn.Linear(4, 4, rngs=rngs)

    def __call__(self, x: Any, *, scale: float = 1.0) -> Any:
        y = sx.jit(lambda block, x: block(x))(self.block, scale * x)
        return {"y": self.dropout(self.norm(y)), "n": x.sum()}

    def encode(self, x: Any) -> Any:
        return self.block(x)


X = jax.ShapeDtypeStruct((8, 2), jnp.float32)


def test_rows_have_shapes_sizes_and_operations() -> None:
    model = Net()
    table = sx.tabulate(model, X, scale=2.0)
    assert [(row.path, row.type, row.inputs, row.outputs) for row in table.rows] == [
        ("(root)", "Net", "float32[8,2], scale=2.0", "float32[], float32[8,4]"),
        (".block", "Linear", "float32[8,2]", "float32[8,4]"),
        (".norm", "BatchNorm", "float32[8,4]", "float32[8,4]"),
        (".dropout", "Dropout", "float32[8,4]", "float32[8,4]"),
        (".unused", "Linear", "", ""),
    ]
    sizes = [{kind: size for kind, size, _ in row.sizes} for row in table.rows]
    assert sizes[0] == {"Param": 40, "BatchStat": 8, "RngState": 2}
    assert sizes[1:3] == [{"Param": 12}, {"Param": 8, "BatchStat": 8}]
    flops = [row.flops or 0 for row in table.rows]
    assert flops[1] >= 2 * 8 * 2 * 4 and flops[0] > sum(flops[1:3]) and flops[4] == 0
    assert type(model.block) is nn.Linear and model.block.kernel.is_lazy


def test_options_choose_method_depth_and_variables() -> None:
    table = sx.tabulate(Net(), X, method="encode", depth=0, filter=sx.Param, flops=False)
    assert table.cells() == [
        ("module", "type", "inputs", "outputs", "Param"),
        ("(root)", "Net", "float32[8,2]", "float32[8,4]", "40 (160 B)"),
    ]


def test_table_is_written_as_a_page(tmp_path: Path) -> None:
    table = sx.tabulate(Net(), X, flops=False)
    table.write_page(tmp_path / "net.html")
    page = (tmp_path / "net.html").read_text()
    assert table.html() in page and ">BatchStat</th>" in page
    assert table._repr_html_() == table.html()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"method": "decode"}, "method='decode' must be a method's name"),
        ({"depth": -1}, "depth=-1 must be None or an integer of at least 0"),
    ],
)
def test_misuse_of_tabulate_is_refused(options: Any, message: str) -> None:
    with pytest.raises(ViewError, match=message):
        sx.tabulate(Net(), X, **options)


def test_tabulate_takes_modules_alone() -> None:
    models: Any = {}
    with pytest.raises(ViewError, match="model is a dict, not a Module"):
        sx.tabulate(models, X)


class Doubled(sx.Module):
    """A call that runs another public method of the same Module."""

    def __init__(self) -> None:
        self.linear = nn.Linear(2, 4, rngs=sx.Rngs(0))

    def project(self, x: Any) -> Any:
        return self.linear(x)

    def __call__(self, x: Any) -> Any:
        return self.project(2 * x).sum(-1)


def test_shapes_are_of_the_outermost_call() -> None:
    rows = sx.tabulate(Doubled(), X, flops=False).rows
    assert [(row.inputs, row.outputs) for row in rows] == [
        ("float32[8,2]", "float32[8]"),
        ("float32[8,2]", "float32[8,4]"),
    ]


class Padding(Doubled):
    """A call that tries its layer, and pads an input which that refuses."""

    def project(self, x: Any) -> Any:
        if x.shape[-1] != 2:
            raise ValueError("two features")
        return super().project(x)

    def __call__(self, x: Any) -> Any:
        try:
            return self.linear(x)
        except sx.errors.LayerInputError:
            with contextlib.suppress(ValueError):
                self.project(x)
            return self.project(jnp.pad(x, ((0, 0), (0, 1))))


def test_calls_that_failed_leave_no_shapes() -> None:
    narrow = jax.ShapeDtypeStruct((8, 1), jnp.float32)
    rows = sx.tabulate(Padding(), narrow, flops=False).rows
    assert [(row.inputs, row.outputs) for row in rows] == [
        ("float32[8,1]", "float32[8,4]"),
        ("float32[8,2]", "float32[8,4]"),
    ]


@pytest.mark.parametrize("scanned", [False, True])
def test_kernels_are_named_with_reasons(scanned: bool) -> None:
    config = sx.models.DecoderConfig(num_layers=2, scan_layers=scanned)
    model, tokens = sx.models.Decoder(config, rngs=sx.Rngs(0)), jnp.zeros((1, 8), int)
    assert not any(row.kernels for row in sx.tabulate(model, tokens, flops=False).rows)
    with sx.kernels(attention="auto"):
        table = sx.tabulate(model, tokens, flops=False)
    rows = {row.path: row.kernels for row in table.rows if row.kernels}
    layers = [".layers.stacked"] if scanned else [".layers[0]", ".layers[1]"]
    assert list(rows) == [f"{layer}.attn" for layer in layers]
    for (text,) in rows.values():
        assert text.startswith("xla (not splash: it runs on TPUs, and this is cpu")
        assert "; not cudnn: it runs on NVIDIA GPUs, and this is cpu; not tokamax: " in text

    # The reason stands once, with all layers.
    line = f"{', '.join(rows)} {'runs' if scanned else 'run'} by xla (not splash: "
    assert str(table).count("\n\n" + line) == str(table).count("not splash") == 1
    assert table.html().count("<p>" + line) == table.html().count("not splash") == 1


def test_kernel_that_a_layer_names_is_shown() -> None:
    layer = nn.MultiHeadAttention(
        256, 2, head_dim=128, causal=True, implementation="splash", rngs=sx.Rngs(0)
    )
    with sx.kernels(interpret=True):
        (row, *_) = sx.tabulate(layer, jnp.zeros((1, 128, 256)), flops=False).rows
    assert row.kernels == ("splash",)
