# SPDX-License-Identifier: Apache-2.0
"""Layers as plain code."""
