# SPDX-License-Identifier: Apache-2.0
"""Configs by the paths of their fields, such as "attention.num_heads", for tests with many."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
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


def with_layers(config: models.TransformerConfig, order: Sequence[int]) -> Any:
    """Returns the config of a model with these layers of another, by index."""
    fields: dict[str, Any] = {"num_layers": len(order)}
    for path in ("attention.local_layers", "attention.rope_layers", "recurrence.layers"):
        chosen = field_of(config, path)
        if chosen is not None:
            fields[path] = tuple(chosen[index] for index in order)
    if config.experts is not None:
        dense = config.experts.dense_layers
        places = (place for place, index in enumerate(order) if index in dense)
        fields["experts.dense_layers"] = tuple(places)
    return with_fields(config, fields)


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
