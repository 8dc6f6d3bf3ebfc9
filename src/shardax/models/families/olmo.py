# SPDX-License-Identifier: Apache-2.0
"""OLMo after the second: OLMo 3 and the experts of OLMoE.

Sources: ``models/{olmo3,olmoe}`` of transformers 5, ``configuration_*.py`` for fields and defaults,
``modeling_*.py`` for tensors.
"""

from __future__ import annotations

from shardax.models.families import llama, shared
from shardax.models.families.rope import RotaryByLayerType
from shardax.models.family import Family

# The layers of OLMo 2, all but each fourth with a window. An older file's ``rope_theta`` is of the
# layers without one: transformers takes the default for the others.
OLMO3 = Family(
    fields=llama.OLMO2.fields,
    fixed=llama.OLMO2.fixed,
    groups=[
        RotaryByLayerType(500_000.0, 500_000.0),
        shared.WindowsByLayer(4096, lambda layer: (layer + 1) % 4 > 0, needs_size=True),
    ],
    architectures=shared.causal_lm("Olmo3"),
    tensors=llama.OLMO2.tensors,
)
