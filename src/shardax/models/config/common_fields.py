# SPDX-License-Identifier: Apache-2.0
"""Fields that ``transformers`` writes into the ``config.json`` of any model.

The table ``common_fields.json`` holds them with the defaults that they have had since version 2,
and of each known type of models the defaults of its own fields; it is written by
``tests/models/common_fields.py``. Nearly all are of training loops, of generation, of
other frameworks and of what a call returns beside its numbers, and change nothing in what a model
computes, whatever they are. The others must have one of their defaults.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_TABLE = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))

# Parts that a model is made with or without, or a dtype that it is to compute in.
_EFFECTIVE = (
    "add_cross_attention",
    "chunk_size_feed_forward",
    "is_decoder",
    "is_encoder_decoder",
    "pruned_heads",
    "tie_encoder_decoder",
    "use_bfloat16",
)
# Of families: whether a head is tied follows from their own default.
_OF_FAMILIES = ("tie_word_embeddings",)

HARMLESS = frozenset([*_TABLE["generation"], *({*_TABLE["fields"]} - {*_EFFECTIVE, *_OF_FAMILIES})])
"""Those that change nothing in what a model computes."""

NEUTRAL: dict[str, tuple[Any, ...]] = {name: tuple(_TABLE["fields"][name]) for name in _EFFECTIVE}
"""Those that change nothing at these values."""

DEFAULTS: Mapping[str, Mapping[str, Any]] = _TABLE["types"]
"""By type of models the defaults of its fields, but for those that are null."""
