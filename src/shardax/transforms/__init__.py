# SPDX-License-Identifier: Apache-2.0
"""Transforms: JAX's transforms of pure functions, lifted to functions over Modules."""
