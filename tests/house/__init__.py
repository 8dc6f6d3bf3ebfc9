# SPDX-License-Identifier: Apache-2.0
"""Tests that keep the house: what may import what, sizes, public names, docstrings, pages."""
