# SPDX-License-Identifier: Apache-2.0
"""Selections: parts of a model, read and edited like data."""
