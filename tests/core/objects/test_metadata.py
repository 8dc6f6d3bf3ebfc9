# SPDX-License-Identifier: Apache-2.0
"""Metadata: axis names and entries, immutable, hashable, type-exact."""

from __future__ import annotations

import pickle
from typing import Any

import jax.numpy as jnp
import pytest

import shardax as sx
from shardax._core.graph.static import Metadata, check_axes
from shardax.errors import MetadataError


def test_metadata_equality_ignores_order() -> None:
    one = Metadata(("embed", None), {"a": 1, "b": (2,)})
    other = Metadata(("embed", None), {"b": (2,), "a": 1})
    assert one == other and hash(one) == hash(other)
    assert one != Metadata((None, "embed"), {"a": 1, "b": (2,)})
    assert one != Metadata(None, {"a": 1, "b": (2,)})


def test_entries_of_different_type_differ() -> None:
    assert Metadata(None, {"a": 1}) != Metadata(None, {"a": True})
    assert Metadata(None, {"a": (1.0,)}) != Metadata(None, {"a": (1,)})
    assert Metadata((1,), {}) != Metadata((True,), {})


def test_metadata_survives_pickling() -> None:
    metadata = Metadata(("embed",), {"a": (1, True)})
    assert pickle.loads(pickle.dumps(metadata)) == metadata


def test_entries_cannot_be_written_in_place() -> None:
    metadata = Metadata(None, {"a": 1})
    with pytest.raises(TypeError):
        metadata.entries["a"] = 2  # pyright: ignore[reportIndexIssue] (that is the point)


def test_replace_changes_given_entries_only() -> None:
    metadata = Metadata(("embed",), {"a": 1, "b": 2})
    changed = metadata.replace(a=3, axes=["mlp"])
    assert (changed.axes, dict(changed.entries)) == (("mlp",), {"a": 3, "b": 2})
    assert (metadata.axes, dict(metadata.entries)) == (("embed",), {"a": 1, "b": 2})


@pytest.mark.parametrize("axes", [["a", None], ("a", None), iter(["a", None])])
def test_axes_may_be_any_iterable_of_names(axes: Any) -> None:
    assert check_axes(axes) == ("a", None)


def test_string_is_not_axes() -> None:
    with pytest.raises(MetadataError, match=r"one string.*axes=\('embed',\)"):
        sx.Param(jnp.ones(5), axes="embed")


def test_unhashable_axis_name_is_named() -> None:
    with pytest.raises(MetadataError, match=r"axes\[1\] = \['b'\]"):
        sx.Param(jnp.ones((1, 1)), axes=("a", ["b"]))


def test_metadata_error_names_all_unhashable_entries_with_fix() -> None:
    with pytest.raises(MetadataError, match=r"\['one', 'two'\].*tuples instead of lists"):
        sx.Param(1.0, one=[1], fine=1, two={"a": 1})


def test_metadata_shows_axes_and_entries() -> None:
    assert repr(Metadata(("a",), {"tag": "x"})) == "axes=('a',), tag='x'"
    assert repr(Metadata(None, {})) == ""
