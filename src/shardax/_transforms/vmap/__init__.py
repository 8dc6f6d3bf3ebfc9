# SPDX-License-Identifier: Apache-2.0
"""``vmap`` and mapped axes."""
