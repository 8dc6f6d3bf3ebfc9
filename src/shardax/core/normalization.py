# SPDX-License-Identifier: Apache-2.0
"""What layers that normalise check alike, by position and by name.

*Epsilon* is what such a layer adds to a variance, or to a mean square, against division by zero.
"""

from __future__ import annotations

from shardax.core.errors import LayerConfigError


def check_epsilon(layer: str, epsilon: float) -> float:
    """Returns what is added to a variance.

    Raises:
        LayerConfigError: If it is negative.
    """
    if not epsilon >= 0:
        raise LayerConfigError(f"{layer} needs epsilon to be at least 0, but epsilon={epsilon!r}.")
    return float(epsilon)
