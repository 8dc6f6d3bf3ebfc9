# SPDX-License-Identifier: Apache-2.0
"""Configs of transformers: of the whole, and of each part."""
