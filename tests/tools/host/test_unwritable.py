# SPDX-License-Identifier: Apache-2.0
"""Exports and published models in places that cannot be written into."""

from __future__ import annotations

from pathlib import Path

import jax.numpy as jnp
import pytest

import shardax as sx
from shardax.errors import ExportError, PretrainedError
from tests.values import with_values


def test_unwritable_places_are_named_and_left_empty(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("content")
    place = tmp_path / "file" / "new"  # as root may write into read-only folders
    layer = with_values(sx.nn.Linear(2, 2, rngs=sx.Rngs(0)))
    with pytest.raises(ExportError, match=f"The export was not written to {place}: "):
        sx.host.export(lambda layer, x: layer(x), layer, jnp.ones((1, 2)), to=place)
    config = sx.models.DecoderConfig(num_layers=1, vocab_size=8)
    model = with_values(sx.models.Decoder(config, rngs=sx.Rngs(0)))
    with pytest.raises(PretrainedError, match=f"The model was not written to {place}: "):
        sx.models.save_pretrained(model, place)
    assert [path.name for path in tmp_path.rglob("*")] == ["file"]
