# SPDX-License-Identifier: Apache-2.0
"""Compilers of hardware that may not be there, and the pool that runs them."""
