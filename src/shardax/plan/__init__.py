# SPDX-License-Identifier: Apache-2.0
"""The layout planner: which layout of a model fits on hardware, and what each one costs."""

from shardax.plan.inputs import NamedShape as NamedShape
from shardax.plan.records import ArrayLayout as ArrayLayout
from shardax.plan.records import Layout as Layout
from shardax.plan.records import LayoutReport as LayoutReport
from shardax.plan.records import Provenance as Provenance
from shardax.plan.records import TimeBand as TimeBand
from shardax.plan.result import Plan as Plan
