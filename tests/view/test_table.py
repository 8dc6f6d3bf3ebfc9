# SPDX-License-Identifier: Apache-2.0
"""The layout table says what `shard` really allocates; pictures and reports show it."""

from __future__ import annotations

import html.parser
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import shardax as sx


def decoder() -> sx.models.Decoder:
    config = sx.models.DecoderConfig(num_kv_heads=4, tied_head=True)
    return sx.models.Decoder(config, rngs=sx.Rngs(0))


def test_bytes_per_device_are_those_that_sharding_allocates(auto_mesh: Mesh) -> None:
    model = decoder()
    table = sx.view.table(model, mesh=auto_mesh, rules=sx.models.DECODER_RULES)
    sx.shard(model, auto_mesh, sx.models.DECODER_RULES)
    on_first = sum(
        variable.value.addressable_shards[0].data.nbytes for _, variable in sx.iter_variables(model)
    )
    assert table.bytes_per_device == on_first
    assert table.nbytes == sum(v.value.nbytes for _, v in sx.iter_variables(model))
    assert table.devices == 8


def test_a_lazy_model_is_shown_without_allocating_anything(auto_mesh: Mesh) -> None:
    model = decoder()
    before = len(jax.live_arrays())
    table = sx.view.table(model, mesh=auto_mesh, rules=sx.models.DECODER_RULES)
    assert len(jax.live_arrays()) == before
    assert table.size == sum(v.size for _, v in sx.iter_variables(model))


def test_a_shared_variable_has_one_row() -> None:
    class Tied(sx.Module):
        def __init__(self) -> None:
            self.embed = sx.Param(jnp.zeros((4, 2)))
            self.head = self.embed

    assert [row.path for row in sx.view.table(Tied()).rows] == [".embed"]


def test_filters_choose_rows() -> None:
    rows = sx.view.table(decoder(), sx.PathContains("embed")).rows
    assert [row.path for row in rows] == [".embed.embedding"]


def test_a_picture_has_one_rectangle_per_distinct_shard(auto_mesh: Mesh) -> None:
    expected = {PartitionSpec(): 1, PartitionSpec("model"): 4, PartitionSpec("data", "model"): 8}
    for spec, count in expected.items():
        array = jax.device_put(np.zeros((8, 8)), NamedSharding(auto_mesh, spec))
        assert sx.view.sharding_svg(array).count("<rect") == count


class Tags(html.parser.HTMLParser):
    """Collects the tags of a page and checks that they close."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_a_report_is_one_whole_page_with_curve_table_and_escaped_text(tmp_path: Path) -> None:
    path = sx.view.write_report(
        tmp_path / "report.html",
        title="a <run>",
        summary={"steps": 2},
        parameters=sx.view.table(decoder()),
        pictures={"kernel": sx.view.sharding_svg(jnp.zeros((2, 2)))},
        records=[{"step": 1, "loss": 3.0}, {"step": 2, "loss": 2.0}, {"step": 2, "eval_loss": 2.5}],
        references={"bigram": 2.3},
        sample="if a < b: <script>",
    )
    text = path.read_text(encoding="utf-8")
    page = Tags()
    page.feed(text)
    assert page.open in ([], ["html"])
    assert page.seen.count("polyline") == 2
    assert "script" not in page.seen
    assert "a &lt;run&gt;" in text
    assert ".layers[1].mlp.down.kernel" in text
    assert list(tmp_path.iterdir()) == [path]
