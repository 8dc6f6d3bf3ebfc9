# SPDX-License-Identifier: Apache-2.0
"""Pipelines of different stages: one executable a stage, by a table."""
