# SPDX-License-Identifier: Apache-2.0
"""Measurements of the suite itself: what tests cost, and which mutants they kill."""
