# SPDX-License-Identifier: Apache-2.0
"""Derivatives of functions over Modules.

To be read in this order: ``differentiated`` (what is differentiated, and how gradients are arranged
like it), ``grad``, ``vjp`` and ``jacobian``; then ``ruled_call``, ``custom_vjp`` and ``custom_jvp``
for derivatives that users give.
"""
