# SPDX-License-Identifier: Apache-2.0
"""Families of published models, a file for each group of architectures."""
