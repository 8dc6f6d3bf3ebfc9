# SPDX-License-Identifier: Apache-2.0
"""Layers of transformers, chosen by a config."""
