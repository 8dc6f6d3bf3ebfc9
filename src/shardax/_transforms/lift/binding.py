# SPDX-License-Identifier: Apache-2.0
"""Names of ``lift.input_graph`` and ``lift.effects``, for files that import them from here."""

from __future__ import annotations

from shardax._transforms.errors import absent_error as absent_error
from shardax._transforms.lift.effects import TEXTS as TEXTS
from shardax._transforms.lift.effects import Effects as Effects
from shardax._transforms.lift.effects import LiftedOutputs as LiftedOutputs
from shardax._transforms.lift.effects import MissingInputs as MissingInputs
from shardax._transforms.lift.effects import apply_effects as apply_effects
from shardax._transforms.lift.effects import check_no_leak as check_no_leak
from shardax._transforms.lift.effects import check_result as check_result
from shardax._transforms.lift.effects import continue_walk as continue_walk
from shardax._transforms.lift.effects import holds_as_built as holds_as_built
from shardax._transforms.lift.effects import holds_same_arrays as same_value  # noqa: F401
from shardax._transforms.lift.effects import record_effects as record_effects
from shardax._transforms.lift.effects import returned_pair as returned_pair
from shardax._transforms.lift.input_graph import InputGraph as InputGraph
from shardax._transforms.lift.input_graph import abstract as abstract
from shardax._transforms.lift.input_graph import bind as bind
from shardax._transforms.lift.input_graph import read as read
