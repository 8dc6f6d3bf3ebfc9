# SPDX-License-Identifier: Apache-2.0
"""Fields of a ``config.json`` for the rotary embedding."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from shardax.models import kinds
from shardax.models.config.transformer import TransformerConfig
from shardax.models.family import PUBLISHED, FieldGroup, Taker
from shardax.models.kinds import PretrainedError, brief
from shardax.nn.rope import Rope

OLDER_ROPE_FIELDS = (
    *("global_rope_theta", "local_rope_theta"),
    *("partial_rotary_factor", "rope_local_base_freq", "rope_scaling", "rope_theta"),
    *("rotary_emb_base", "rotary_pct"),
)

LAYER_TYPES = ("full_attention", "sliding_attention")

# Fields of a rotary embedding by its kind, and what ``Rope`` calls them.
_ROPE_FIELDS: Mapping[str, Mapping[str, str]] = {
    "default": {},
    "linear": {"factor": "factor"},
    "llama3": {
        "factor": "factor",
        "low_freq_factor": "low",
        "high_freq_factor": "high",
        "original_max_position_embeddings": "length",
    },
    "yarn": {
        "factor": "factor",
        "attention_factor": "attention_factor",
        "beta_fast": "high",
        "beta_slow": "low",
        "original_max_position_embeddings": "length",
        "truncate": "truncate",
    },
}


def read_rope(
    take: Taker,
    values: Mapping[str, Any] | None = None,
    *,
    base: float = 10_000.0,
    fraction: float = 1.0,
    types: Iterable[str] = tuple(_ROPE_FIELDS),
) -> Rope:
    """Reads the rotary embedding, as transformers 5 does."""
    # That takes rope_scaling or else rope_parameters, and rope_theta where the table has none.
    table = values
    if table is None:
        scaling = take("rope_scaling", None, kind=kinds.TABLE.or_null)
        parameters = take("rope_parameters", None, kind=kinds.TABLE.or_null)
        theta = take("rope_theta", None, kind=kinds.NUMBER.or_null)
        part = take("partial_rotary_factor", None, kind=kinds.NUMBER.or_null)
        base, fraction = theta if theta else base, fraction if part is None else part
        table = dict[str, Any](scaling or parameters or {})
        if theta and table.get("rope_theta") not in (None, theta):
            raise PretrainedError(
                f"rope_theta={theta!r} stands beside a table with rope_theta="
                f"{table['rope_theta']!r}, which transformers takes: leave one of them out"
            )

    left = {name: value for name, value in table.items() if value is not None}
    kind = left.pop("rope_type", left.get("type", "default"))
    left.pop("type", None)
    limits = f", only one of {', '.join(types)}"
    kinds.check_supported("rope_type", kind, kind in tuple(types), limits)

    # What the table leaves out is what it is by default in transformers.
    names = {"rope_theta": "base", "partial_rotary_factor": "fraction", **_ROPE_FIELDS[kind]}
    numbers: dict[str, Any] = {"rope_theta": base, "partial_rotary_factor": fraction}
    if kind == "yarn":
        numbers |= {"beta_slow": 1.0, "beta_fast": 32.0}
    length = "original_max_position_embeddings"
    if length in names and length not in left:
        left[length] = take("max_position_embeddings", PUBLISHED, kind=kinds.INTEGER)
    numbers |= {name: left.pop(name) for name in names if name in left}

    wrong = [f"{name}={brief(value)} is unknown" for name, value in left.items()]
    absent = {"factor", "low_freq_factor", "high_freq_factor"} & names.keys() - numbers.keys()
    wrong += [f"{name} is missing" for name in sorted(absent)]
    truncate = numbers.pop("truncate", True)
    if not isinstance(truncate, bool):
        wrong.append(f"truncate={brief(truncate)} is not true or false")
    for name, value in numbers.items():
        if type(value) not in (int, float) or not 0 < value < math.inf:
            wrong.append(f"{name}={brief(value)} is not a positive number")
    if not wrong:
        wrong = _rope_problems(kind, numbers)
    if wrong:
        raise PretrainedError(f"the rotary embedding of rope_type={kind!r}: {', '.join(wrong)}")

    options = {names[name]: number for name, number in numbers.items()}
    options |= {"base": float(options["base"]), "fraction": float(options["fraction"])}
    return Rope(kind=kind, truncate=truncate, **options)


def _rope_problems(kind: str, numbers: Mapping[str, Any]) -> list[str]:
    """Returns the fields with a division by zero."""
    problems = []
    if numbers["partial_rotary_factor"] > 1:
        problems.append(f"partial_rotary_factor={numbers['partial_rotary_factor']!r} is above 1")
    if kind == "yarn" and numbers["rope_theta"] <= 1:
        problems.append(f"rope_theta={numbers['rope_theta']!r} is not above 1")
    if kind == "llama3" and numbers["low_freq_factor"] > numbers["high_freq_factor"]:
        problems.append("low_freq_factor is above high_freq_factor")
    return problems


def rope_fields(rope: Rope) -> dict[str, Any]:
    """Returns the ``rope_parameters`` of a rotary embedding."""
    fields: dict[str, Any] = {"rope_type": rope.kind, "rope_theta": rope.base}
    if rope.fraction != 1:
        fields["partial_rotary_factor"] = rope.fraction
    values = {name: getattr(rope, key) for name, key in _ROPE_FIELDS[rope.kind].items()}
    return fields | {name: value for name, value in values.items() if value is not None}


class Rotary(FieldGroup):
    """One rotary embedding for all layers."""

    older = OLDER_ROPE_FIELDS

    def __init__(
        self,
        base: float = 10_000.0,
        fraction: float = 1.0,
        *,
        types: Iterable[str] = tuple(_ROPE_FIELDS),
        interleaved: bool = False,
        partial: bool | None = None,
    ) -> None:
        self.base, self.fraction, self.interleaved = base, fraction, interleaved
        self.partial = fraction != 1 if partial is None else partial
        self.types = tuple(types)

    def to(self, take: Taker) -> Mapping[str, Any]:
        rope = read_rope(take, base=self.base, fraction=self.fraction, types=self.types)
        if not self.partial:
            refuse_partial(rope)
        return {"attention.rope": replace(rope, interleaved=self.interleaved)}

    def back(self, config: TransformerConfig) -> Mapping[str, Any]:
        rope = config.attention.rope
        if rope is None:
            return {}
        fields = rope_fields(rope)
        if self.fraction != 1:  # what is left out is not 1
            fields["partial_rotary_factor"] = rope.fraction
        return {"rope_parameters": fields}


class RotaryByLayerType(FieldGroup):
    """Rotary embeddings of layers with a window and without."""

    older = OLDER_ROPE_FIELDS

    def __init__(
        self, full: tuple[str, float], sliding: tuple[str, float], *, is_scaled: bool = True
    ) -> None:
        # Older fields of the bases, "" for none, and what they are where the file has none.
        self.full, self.sliding = full, sliding
        self.is_scaled = is_scaled  # whether rope_scaling is read

    def to(self, take: Taker) -> Mapping[str, Any]:
        scaling = (self.is_scaled and take("rope_scaling", None, kind=kinds.TABLE.or_null)) or {}
        parameters = take("rope_parameters", None, kind=kinds.TABLE.or_null) or {}

        def base_of(name: str, default: float) -> float:
            base = take(name, None, kind=kinds.NUMBER.or_null) if name else None
            return base or default

        base, local_base = base_of(*self.full), base_of(*self.sliding)
        wrong = [name for name in parameters if name not in LAYER_TYPES]
        wrong += [n for n in LAYER_TYPES if not isinstance(parameters.get(n) or {}, dict)]
        if wrong:
            raise PretrainedError(
                f"rope_parameters with {', '.join(map(brief, wrong))} is not supported, only "
                f"tables of {' and '.join(LAYER_TYPES)}"
            )
        full, sliding = (parameters.get(name) or {} for name in LAYER_TYPES)
        rope = read_rope(take, {**full, **scaling}, base=base)
        local_rope = read_rope(take, sliding, base=local_base)
        refuse_partial(rope)
        refuse_partial(local_rope)
        return {"attention.rope": rope, "attention.local_rope": local_rope}

    def back(self, config: TransformerConfig) -> Mapping[str, Any]:
        attention = config.attention
        if attention.rope is None:
            return {}
        ropes = (attention.rope, attention.local_rope or attention.rope)
        tables = map(rope_fields, ropes)
        return {"rope_parameters": dict(zip(LAYER_TYPES, tables, strict=True))}


def refuse_partial(rope: Rope) -> None:
    """Raises if a part of a head alone is turned."""
    limits = f" for this family{kinds.UNNOTICED}"
    kinds.check_supported("partial_rotary_factor", rope.fraction, rope.fraction == 1, limits)
