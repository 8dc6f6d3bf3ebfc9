# SPDX-License-Identifier: Apache-2.0
"""Model graphs: definitions, flattening, paths, static keys, stacking."""
