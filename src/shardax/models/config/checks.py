# SPDX-License-Identifier: Apache-2.0
"""Checks of configs of several parts and models, and their dtypes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypedDict

import jax.numpy as jnp

from shardax.extend import Options
from shardax.models.config.paths import parts_of, read_field
from shardax.nn.errors import LayerConfigError
from shardax.nn.stack import check_policy


class Dtypes(TypedDict):
    """The dtypes of a model's config, as arguments of layers."""

    dtype: str
    param_dtype: str


def check_parts(options: Options, config: Any) -> None:
    """Refuses parts of other classes."""
    for name, kind in parts_of(type(config)).items():
        kinds = (kind, type(None)) if kind.absent else kind
        need = f"an object of sx.models.{kind.__name__}" + ", or None" * bool(kind.absent)
        options.instance(name, getattr(config, name), kinds, need)


def require_values(options: Options, config: Any, values: Mapping[str, object], part: str) -> None:
    """Refuses other values of fields, by path, beside a part."""
    for path, value in values.items():
        own = read_field(config, path)
        options.check(path, own, own == value, f"{value!r}, with {part}")


def check_rate(options: Options, name: str, rate: float) -> None:
    """Refuses a rate of dropout outside of 0 to 1."""
    options.check(name, rate, 0 <= rate < 1, "from 0 up to, but not, 1")


def use_names(config: Any) -> None:
    """Normalises policy and dtypes of a model's config to names."""
    where = type(config).__name__
    options = Options(LayerConfigError, where)
    options.check("remat", config.remat, not callable(config.remat), "no function but its name")
    names = ("layer_input", "attention", "mlp")
    object.__setattr__(config, "remat", check_policy(where, config.remat, names))
    for name in ("dtype", "param_dtype"):
        object.__setattr__(config, name, dtype_name(where, name, getattr(config, name)))


def dtype_name(where: str, name: str, dtype: Any) -> str:
    """Returns the name of a floating dtype, or raises."""
    try:
        normal_dtype = jnp.dtype(dtype)
    except TypeError as error:
        raise LayerConfigError(f"{where} has {name}={dtype!r}, not a dtype.") from error
    if not jnp.issubdtype(normal_dtype, jnp.floating):
        raise LayerConfigError(
            f"{where} has {name}={dtype!r}, but a model computes with floating dtypes, such as "
            f"'float32' or 'bfloat16'."
        )
    return normal_dtype.name


def dtypes(config: Any) -> Dtypes:
    """Returns the dtypes of a model's config, as layers take them."""
    return {"dtype": config.dtype, "param_dtype": config.param_dtype}
