# SPDX-License-Identifier: Apache-2.0
"""Initialization: lazy values, initializer programs, random streams."""
