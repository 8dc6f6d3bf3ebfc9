# SPDX-License-Identifier: Apache-2.0
"""Pipelines of stages that differ: one executable a stage, by a table."""
