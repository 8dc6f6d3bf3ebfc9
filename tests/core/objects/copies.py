# SPDX-License-Identifier: Apache-2.0
"""Every way to copy a model, in whichever form it is: what laws of copies are tested with."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import jax

import shardax as sx


def through_split(model: Any) -> Any:
    """Taken apart into structure and state, and put together."""
    return sx.merge(*sx.split(model))


def through_jax(model: Any) -> Any:
    """Taken apart and put together by JAX."""
    leaves, treedef = jax.tree.flatten(model)
    return jax.tree.unflatten(treedef, leaves)


def through_pickle(model: Any) -> Any:
    """Written and read."""
    return pickle.loads(pickle.dumps(model))


COPIES: dict[str, Callable[[Any], Any]] = {
    "split and merge": through_split,
    "clone": sx.clone,
    "jax.tree": through_jax,
    "pickle": through_pickle,
    "deepcopy": copy.deepcopy,
}
