# SPDX-License-Identifier: Apache-2.0
"""The layout planner: which layout of a model fits on hardware, and what each one costs."""

from shardax.plan.hardware import Hardware as Hardware
from shardax.plan.hardware_file import load_hardware as load_hardware
from shardax.plan.hardware_table import find_hardware as find_hardware
from shardax.plan.hardware_table import register_hardware as register_hardware
from shardax.plan.inputs import NamedShape as NamedShape
from shardax.plan.records import ArrayLayout as ArrayLayout
from shardax.plan.records import Layout as Layout
from shardax.plan.records import LayoutReport as LayoutReport
from shardax.plan.records import Provenance as Provenance
from shardax.plan.records import TimeBand as TimeBand
from shardax.plan.result import Plan as Plan
from shardax.plan.targets import Target as Target
