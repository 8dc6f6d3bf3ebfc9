# SPDX-License-Identifier: Apache-2.0
"""Views of models: text, foldable drawings, tables, and pictures of shardings."""

from shardax.view.display import show as show
from shardax.view.display import to_html as to_html
from shardax.view.display import to_text as to_text
from shardax.view.page import write_report as write_report
from shardax.view.parameter_table import ModuleRow as ModuleRow
from shardax.view.parameter_table import ParameterRow as ParameterRow
from shardax.view.parameter_table import ParameterTable as ParameterTable
from shardax.view.parameter_table import table as table
from shardax.view.shardings import ShardingRow as ShardingRow
from shardax.view.shardings import ShardingView as ShardingView
from shardax.view.shardings import sharding as sharding
from shardax.view.shardings import sharding_html as sharding_html
from shardax.view.shardings import show_sharding as show_sharding
from shardax.view.tabulation import Tabulation as Tabulation
from shardax.view.tabulation import TabulationRow as TabulationRow
