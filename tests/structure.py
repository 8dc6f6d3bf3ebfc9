# SPDX-License-Identifier: Apache-2.0
"""The structure epoch, by which remembered flattenings of models become out of date.

A structural change of a model that was flattened advances the epoch; a written value does not.
"""

from __future__ import annotations

from shardax._core.object import epoch


def structure_epoch() -> int:
    """Returns the number of structural changes of flattened models so far."""
    return epoch.current


def advance_structure_epoch() -> None:
    """Makes every remembered flattening out of date, as a structural change does."""
    epoch.advance()
