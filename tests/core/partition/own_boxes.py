# SPDX-License-Identifier: Apache-2.0
"""A box as a user writes one, for the tests of boxes."""

from __future__ import annotations

import dataclasses
from typing import Any

from jax.sharding import PartitionSpec as P

from shardax.partition import AxisMetadata


@dataclasses.dataclass(frozen=True)
class Split(AxisMetadata[Any]):
    """A box of a user's own: where the first dimension goes."""

    value: Any
    over: Any

    def add_axis(self, index: int, params: Any) -> Split:
        """See the base."""
        return self

    def remove_axis(self, index: int, params: Any) -> Split:
        """See the base."""
        return self

    def get_partition_spec(self) -> P:
        """The first dimension is split."""
        return P(self.over)
