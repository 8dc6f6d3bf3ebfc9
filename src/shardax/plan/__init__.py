# SPDX-License-Identifier: Apache-2.0
"""The layout planner: layouts that fit on hardware, with costs."""

from shardax.plan.comparison import assert_layout as assert_layout
from shardax.plan.comparison import compare as compare
from shardax.plan.comparison import plan as plan
from shardax.plan.compile.compilers import compiler_for as compiler_for
from shardax.plan.compile.compilers import known_compilers as known_compilers
from shardax.plan.hardware.calibration import calibrate_cpu as calibrate_cpu
from shardax.plan.hardware.calibration import calibrate_gpu as calibrate_gpu
from shardax.plan.hardware.cost import Efficiency as Efficiency
from shardax.plan.hardware.cost import ties as ties
from shardax.plan.hardware.cost import time_band as time_band
from shardax.plan.hardware.hardware import Hardware as Hardware
from shardax.plan.hardware.hardware import find_hardware as find_hardware
from shardax.plan.hardware.hardware import load_hardware as load_hardware
from shardax.plan.hardware.hardware import register_hardware as register_hardware
from shardax.plan.hardware.targets import Target as Target
from shardax.plan.inputs import NamedShape as NamedShape
from shardax.plan.records import ArrayLayout as ArrayLayout
from shardax.plan.records import Layout as Layout
from shardax.plan.records import LayoutReport as LayoutReport
from shardax.plan.records import Plan as Plan
from shardax.plan.records import Provenance as Provenance
from shardax.plan.records import TimeBand as TimeBand
from shardax.plan.report.explanation import diff as diff
from shardax.plan.report.explanation import explain as explain
from shardax.plan.rules_file import NamedRules as NamedRules
from shardax.plan.rules_file import named_rules as named_rules
from shardax.plan.rules_file import read_rules as read_rules
from shardax.plan.rules_file import write_rules as write_rules
from shardax.plan.searching.search import explore as explore
from shardax.plan.searching.search import search as search
