# SPDX-License-Identifier: Apache-2.0
"""Tables of names: what they name is there, in Flax and here."""

from __future__ import annotations

import functools
import importlib
import inspect
import re
from typing import Any

import jax
import pytest
from flax import linen, nnx
from flax.core import meta

import shardax as sx
from shardax._migrate.rules import ANY, LAYER_ATTRIBUTES, LEFT, LIBRARIES, NAMES, SETS, NameRule

CALLED = {name: entry for name, entry in NAMES.items() if not entry.is_form}
CALLS = sorted(name for name, entry in CALLED.items() if not entry.takes_all)


def named(path: str, root: Any) -> Any:
    return functools.reduce(getattr, path.split("."), root)


def target_of(entry: NameRule) -> Any:
    module, _, path = entry.target.partition(".")
    roots = {"sx": sx, "jax": jax}
    return named(path, roots.get(module) or importlib.import_module(module))


def parameters(of: Any) -> set[str]:
    """Names of parameters; of a class, those of its constructor and of what that passes on."""
    owners = of.__mro__ if isinstance(of, type) else (of,)
    found = [vars(owner).get("__init__") for owner in owners] if isinstance(of, type) else [of]
    return {name for call in found if call for name in inspect.signature(call).parameters}


@pytest.mark.parametrize("name", sorted(NAMES))
def test_translated_name_is_in_both_libraries(name: str) -> None:
    assert named(name, nnx) is not None
    assert name not in CALLED or target_of(NAMES[name]) is not None


@pytest.mark.parametrize("name", CALLS)
def test_arguments_are_those_of_both_libraries(name: str) -> None:
    entry = NAMES[name]
    theirs, ours = parameters(named(name, nnx)), parameters(target_of(entry))
    written = {entry.renamed.get(word, word) for word in entry.written}
    carried = {entry.renamed.get(word, word) for word in entry.arguments or ()}
    assert set(entry.arguments or ()) - {"head_dim"} <= theirs
    dropped = set(entry.dropped) - {"promote_dtype", "kernel_metadata", "bias_metadata", "graph"}
    assert dropped - {"graph_updates", "rng_collection"} <= theirs | {
        "axis_name",
        "embedding_metadata",
    }
    # A cell's options are passed on by **options.
    assert carried - ours - {entry.renamed.get(word, word) for word in entry.dropped} == set()
    assert written <= ours


def _is_open(default: Any) -> bool:
    """Whether a default is none: a missing argument, or a function."""
    return default is inspect.Parameter.empty or callable(default) or "Missing" in repr(default)


def test_defaults_that_differ_are_written_out() -> None:
    differing: dict[str, tuple[str, str]] = {}
    for name in CALLS:
        entry = NAMES[name]
        theirs = inspect.signature(named(name, nnx)).parameters
        if isinstance(named(name, nnx), type):
            theirs = inspect.signature(named(name, nnx).__init__).parameters
        ours = inspect.signature(target_of(entry)).parameters
        for word in set(entry.arguments or ()) - set(entry.written):
            here = ours.get(entry.renamed.get(word, word))
            there = theirs.get(word)
            if here is None or there is None or word in entry.dropped:
                continue
            pair = there.default, here.default
            if any(_is_open(default) for default in pair):
                continue
            if pair[0] != pair[1]:
                differing[f"{name}({word}=)"] = (_text(there.default), _text(here.default))
    assert differing == EQUIVALENT


EQUIVALENT = {
    "ConvTranspose(strides=)": ("None", "1"),
    "ConvTranspose(kernel_dilation=)": ("None", "1"),
    "with_rngs(only=)": ("True", "Ellipsis"),
    "scan(in_axes=)": ("(Carry, 0)", "(Carry, 0)"),
    "scan(out_axes=)": ("(Carry, 0)", "(Carry, 0)"),
    "scan(transform_metadata=)": ("FrozenDict({})", "None"),
    "vmap(transform_metadata=)": ("FrozenDict({})", "None"),
}
"""Defaults that are written otherwise in both libraries and mean the same."""


def _text(default: Any) -> str:
    return re.sub(r"<class '[\w.]*\.(\w+)'>", r"\1", repr(default))


def test_names_of_linen_are_in_both_libraries() -> None:
    for name, entry in LIBRARIES["flax.linen"].items():
        assert hasattr(linen, name) or hasattr(meta, name), name
        assert target_of(entry) is not None


def test_name_is_translated_or_left() -> None:
    assert NAMES.keys() & LEFT.keys() == set()
    assert [name for name in LEFT if named(name, nnx) is None] == []
    assert ANY not in {value for entry in NAMES.values() for value in entry.written.values()}


def test_classes_with_other_subclasses_are_the_families() -> None:
    pairs = {
        name: (named(name, nnx), target_of(entry))
        for name, entry in CALLED.items()
        if isinstance(named(name, nnx), type) and isinstance(target_of(entry), type)
    }
    differing = {
        name
        for name, (theirs, ours) in pairs.items()
        for other_theirs, other_ours in pairs.values()
        if issubclass(other_theirs, theirs) != issubclass(other_ours, ours)
    }
    # A Perturbation is told of where it is made.
    assert differing - {"Intermediate"} == SETS["families"]


LAYERS: dict[str, tuple[Any, ...]] = {
    "BatchNorm": (4,),
    "Conv": (4, 3, (2,)),
    "ConvTranspose": (4, 3, (2,)),
    "Einsum": ("ab,bc->ac", (2, 3)),
    "Embed": (4, 3),
    "GroupNorm": (4, 2),
    "InstanceNorm": (4,),
    "LSTMCell": (4, 3),
    "LayerNorm": (4,),
    "Linear": (4, 3),
    "RMSNorm": (4,),
    "SimpleCell": (4, 3),
}


@pytest.mark.parametrize("name", LAYERS)
def test_attributes_of_layer_are_those_of_both_libraries(name: str) -> None:
    theirs = getattr(nnx, name)(*LAYERS[name], rngs=nnx.Rngs(0))
    ours = target_of(NAMES[name])(*LAYERS[name], rngs=sx.Rngs(0))
    pairs = LAYER_ATTRIBUTES[name]
    # A norm without a bias has none in both.
    for there, here in pairs.items():
        assert hasattr(theirs, there) == hasattr(ours, here or there) or there == "bias"
    assert {word for word in SETS["unread"] if hasattr(ours, word)} <= {"group_size"}
