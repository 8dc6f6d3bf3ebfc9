# SPDX-License-Identifier: Apache-2.0
"""Attention: its arithmetic, and its layers with their caches."""
