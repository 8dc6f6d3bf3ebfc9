# SPDX-License-Identifier: Apache-2.0
"""Names of ``lift.prefixes`` and the files beside it, for files that import them from here."""

from __future__ import annotations

from shardax._transforms.lift.alias_paths import alias_paths as alias_paths
from shardax._transforms.lift.alias_paths import objects_in as objects_in
from shardax._transforms.lift.entries import AssignedPrefixes as AssignedPrefixes
from shardax._transforms.lift.entries import EntryAssignment as EntryAssignment
from shardax._transforms.lift.entries import OutputEntries as OutputEntries
from shardax._transforms.lift.entries import add_written as add_written
from shardax._transforms.lift.entries import appended as appended
from shardax._transforms.lift.entries import assign as assign
from shardax._transforms.lift.entries import assign_by_name as assign_by_name
from shardax._transforms.lift.entries import drop_written as drop_written
from shardax._transforms.lift.entries import entries_by_name as entries_by_name
from shardax._transforms.lift.entries import is_one_entry as is_one_entry
from shardax._transforms.lift.entries import per_argument as per_argument
from shardax._transforms.lift.entries import refuse_foreign as refuse_foreign
from shardax._transforms.lift.filter_mappings import Carry as Carry
from shardax._transforms.lift.filter_mappings import ExactPath as ExactPath
from shardax._transforms.lift.filter_mappings import FilterMapping as FilterMapping
from shardax._transforms.lift.filter_mappings import StateAxes as StateAxes
from shardax._transforms.lift.filter_mappings import StateSharding as StateSharding
from shardax._transforms.lift.filter_mappings import check_axes_only as check_axes_only
from shardax._transforms.lift.filter_mappings import check_shardings_only as check_shardings_only
from shardax._transforms.lift.filter_mappings import entries_in as entries_in
from shardax._transforms.lift.filter_mappings import is_axis as is_axis
from shardax._transforms.lift.placement import mesh_in_scope as mesh_in_scope
from shardax._transforms.lift.placement import place_variables as place_variables
from shardax._transforms.lift.placement import require_mesh_in_scope as require_mesh_in_scope
from shardax._transforms.lift.placement import specs_in as specs_in
from shardax._transforms.lift.prefixes import check_plain as check_plain
from shardax._transforms.lift.prefixes import consistent as consistent
from shardax._transforms.lift.prefixes import expand as expand
from shardax._transforms.lift.prefixes import one_level as one_level
from shardax._transforms.lift.prefixes import prefix as prefix
