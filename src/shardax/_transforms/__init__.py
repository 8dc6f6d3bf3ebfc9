# SPDX-License-Identifier: Apache-2.0
"""JAX transforms of functions over Modules."""
