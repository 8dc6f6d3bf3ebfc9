# SPDX-License-Identifier: Apache-2.0
"""Boxes: values of any pytree with names of their dimensions."""
