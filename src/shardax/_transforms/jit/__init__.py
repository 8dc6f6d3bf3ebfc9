# SPDX-License-Identifier: Apache-2.0
"""``jit``: compiled functions over Modules."""
