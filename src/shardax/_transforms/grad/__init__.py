# SPDX-License-Identifier: Apache-2.0
"""Derivatives: ``grad``, ``vjp``, ``jvp``, ``custom_vjp``, ``remat``."""
