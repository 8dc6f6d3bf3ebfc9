# SPDX-License-Identifier: Apache-2.0
"""Texts for users: errors about Variables and attributes, and drawings of models."""
