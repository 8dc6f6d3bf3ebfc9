# SPDX-License-Identifier: Apache-2.0
"""Flat names of fields, deprecated: gone with the next version.

``TransformerConfig(num_heads=8)``, ``dataclasses.replace(config, num_heads=8)`` and
``config.num_heads`` are translated here, and warn.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any, TypeVar

from shardax.extend import warn_user
from shardax.models.config.paths import (
    absent_value,
    changed_part,
    default_part,
    grouped,
    is_off,
    parts_of,
    paths_of,
    read_field,
    switch_of,
)
from shardax.nn.errors import LayerConfigError

_Config = TypeVar("_Config")

# By part, fields as flat names, with their names in the part behind "=" where these are others.
_NAMES = {
    "attention": (
        "num_heads num_kv_heads head_dim qkv_bias key_bias out_bias qk_norm attention_scale=scale "
        "attention_softcap=softcap attention_sinks=sinks attention_gate=gate rope local_rope "
        "rope_layers query_growth window chunked local_layers cross_attention "
        "attention_in_scale=in_scale attention_out_scale=out_scale attention_dropout=dropout"
    ),
    "attention.latent": "latent_dim=dim query_latent_dim=query_dim rope_dim value_dim",
    "mlp": ("mlp_dim=dim gated mlp_bias=bias mlp_gate_scale=gate_scale mlp_out_scale=out_scale"),
    "experts": (
        "num_experts expert_dim=dim experts_per_token=top_k normalise_experts=normalise "
        "expert_scores=scores expert_groups=num_groups groups_per_token=top_groups "
        "expert_scale=scale expert_bias=bias expert_limit=limit shared_expert_dim=shared_dim "
        "shared_expert_gate=shared_gate expert_dispatch=dispatch load_balance_weight dense_layers"
    ),
    "recurrence": (
        "recurrent=mixer recurrent_layers=layers recurrent_beside=beside "
        "recurrent_in_scale=in_scale recurrent_out_scale=out_scale"
    ),
    "norms": (
        "norm=kind norm_placement=placement norm_epsilon=epsilon first_norm=first "
        "shared_norm=shared"
    ),
    "embedding": (
        "token_dim=dim embed_scale=scale embed_norm=norm token_types embed_dropout=dropout"
    ),
    "positions": (
        "max_positions position_offset=offset pad_token relative_buckets farthest_distance"
    ),
    "image": "image_size=size patch_size channels patch_bias first_vector mask_patch",
    "features": "feature_size=size",
    "output": (
        "tied_head=tied head_bias=bias logit_scale=scale final_softcap=softcap num_classes "
        "projection_dim head_transform=transform head_transform_norm=transform_norm "
        "head_transform_bias=transform_bias head_activation=activation"
    ),
    "pool": (
        "pooling=kind end_token pooled_norm=norm pooler=dense pooler_dim=dim "
        "pooler_activation=activation"
    ),
}
PATHS = {
    flat: f"{part}.{name or flat}"
    for part, text in _NAMES.items()
    for flat, _, name in (entry.partition("=") for entry in text.split())
}
"""The path of each field by its flat name."""
_METHODS = {"has_rope": "attention.has_rope"}


def with_flat_names(kind: type[_Config]) -> type[_Config]:
    """Makes a config accept flat names, and give fields by them."""
    assert is_dataclass(kind)
    initialize: Any = kind.__init__
    names = [field.name for field in fields(kind)]

    @functools.wraps(initialize)
    def initialize_by_flat_names(self: Any, *args: Any, **options: Any) -> None:
        flat = {name: options.pop(name) for name in [*options] if name in PATHS}
        if unknown := sorted(options.keys() - set(names)):
            raise TypeError(f"{kind.__name__} has no {', '.join(unknown)}. {_listed(kind)}")
        if flat:
            own = dict(zip(names, args, strict=False)) | options
            options |= _translated(kind, own, flat)
        initialize(self, *args, **options)

    def read_flat_name(self: Any, name: str) -> Any:
        if path := PATHS.get(name) or _METHODS.get(name):
            text = f"config.{name} is deprecated: read config.{path}. The flat name goes"
            warn_user(f"{text} with the next version.", DeprecationWarning)
            return read_field(self, path)
        text = f"{kind.__name__} has no {name}."
        raise AttributeError(text if name[:1] == "_" else f"{text} {_listed(kind)}")

    made: Any = kind
    made.__init__, made.__getattr__ = initialize_by_flat_names, read_flat_name
    made.recorded_fields = flat_fields
    return kind


def flat_fields(config: Any) -> Iterator[tuple[str, Any]]:
    """Yields the fields of a config as version 0.1 recorded them."""
    parts = parts_of(type(config))
    yield from ((f.name, getattr(config, f.name)) for f in fields(config) if f.name not in parts)
    yield from ((name, read_field(config, path)) for name, path in PATHS.items())


def as_paths(values: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Returns values by path, with a warning where names are flat."""
    if flat := [name for name in values if name in PATHS]:
        listed = ", ".join(f"{PATHS[name]!r} for {name!r}" for name in flat)
        warn_user(
            f"{where} has flat names, which are deprecated: give {listed}.", DeprecationWarning
        )
    return {PATHS.get(name, name): value for name, value in values.items()}


def _translated(kind: Any, options: Mapping[str, Any], flat: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the parts of a config with flat names on top."""
    parts, nested = dict[str, Any](), parts_of(kind)
    texts, changes = list[str](), list[str]()
    for name, values in grouped({PATHS[name]: value for name, value in flat.items()}):
        part = options[name] if name in options else default_part(kind, name)
        _check_absent(nested[name], part, values, name)
        parts[name] = changed_part(nested[name], part, values)
        texts.append(f"{name}={_call(nested[name], values)}")
        changes.append(texts[-1] if part is None else f"{name}={_replace(name, part, values)}")
    warn_user(
        f"{', '.join(flat)} of {kind.__name__} is deprecated: give {kind.__name__}"
        f"({', '.join(texts)}), and of a config dataclasses.replace(config, {', '.join(changes)}). "
        f"The flat names go with the next version.",
        DeprecationWarning,
    )
    return parts


def _check_absent(kind: Any, part: Any, values: Mapping[str, Any], path: str) -> None:
    """Raises for fields of an absent part."""
    for name, fields_of_part in grouped(values):
        _check_absent(
            parts_of(kind)[name], getattr(part, name, None), fields_of_part, f"{path}.{name}"
        )
    switch = switch_of(kind)
    if part is not None or switch is None or switch in values:
        return
    for name, value in values.items():
        if "." not in name and value != absent_value(kind, name):
            raise LayerConfigError(
                f"TransformerConfig has {path}=None, so there is no {name} of it to be {value!r}. "
                f"Give {path}={kind.__name__}({switch}=..., {name}={value!r})."
            )


def _call(kind: Any, values: Mapping[str, Any]) -> str:
    """Returns the code of a part of fields by path."""
    if is_off(kind, values):
        return "None"
    texts = [f"{name}={value!r}" for name, value in values.items() if "." not in name]
    texts += [f"{name}={_call(parts_of(kind)[name], more)}" for name, more in grouped(values)]
    return f"{kind.__name__}({', '.join(texts)})"


def _replace(path: str, part: Any, values: Mapping[str, Any]) -> str:
    """Returns the code of a changed part of a config."""
    texts = [f"{name}={value!r}" for name, value in values.items() if "." not in name]
    for name, more in grouped(values):
        inner = getattr(part, name)
        is_whole = inner is None or is_off(type(inner), more)
        code = _call(parts_of(type(part))[name], more)
        texts.append(f"{name}={code if is_whole else _replace(f'{path}.{name}', inner, more)}")
    if is_off(type(part), values):
        return "None"
    return f"dataclasses.replace(config.{path}, {', '.join(texts)})"


def _listed(kind: type) -> str:
    """Returns the names of all fields, by part."""
    own = [path for path in paths_of(kind) if "." not in path]
    texts = [f"Its fields are {', '.join(own)}"]
    for name, values in grouped(dict.fromkeys(paths_of(kind), "")):
        texts.append(f"those of {name} are {', '.join(values)}")
    return "; ".join(texts) + "."
