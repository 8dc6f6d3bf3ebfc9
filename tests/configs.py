# SPDX-License-Identifier: Apache-2.0
"""Configs by the paths of their fields, such as "attention.num_heads", for tests with many."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from shardax import models

# Of parts that a config may lack.
PARTS: dict[str, Any] = {
    "experts": models.ExpertsConfig,
    "features": models.FeaturesConfig,
    "image": models.ImageConfig,
    "latent": models.LatentConfig,
    "mlp": models.MLPConfig,
    "recurrence": models.RecurrenceConfig,
}


def with_fields(config: Any, fields: Mapping[str, Any]) -> Any:
    """Returns a config with other values of fields."""
    return dataclasses.replace(config, **_nested(config, fields))


def make_config(fields: Mapping[str, Any]) -> models.TransformerConfig:
    """Makes a config of fields, the others at their defaults."""
    return with_fields(models.TransformerConfig(), fields)


def field_of(config: Any, path: str) -> Any:
    """Returns a field, None if its part is absent."""
    for name in path.split("."):
        config = getattr(config, name, None)
    return config


def _nested(config: Any, fields: Mapping[str, Any]) -> dict[str, Any]:
    own = {path: value for path, value in fields.items() if "." not in path}
    for name in {path.partition(".")[0] for path in fields if "." in path}:
        part = own.get(name, getattr(config, name, None))
        start = f"{name}."
        changes = {p.removeprefix(start): v for p, v in fields.items() if p.startswith(start)}
        nested = _nested(part, changes)
        own[name] = PARTS[name](**nested) if part is None else dataclasses.replace(part, **nested)
    return own
