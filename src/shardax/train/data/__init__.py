# SPDX-License-Identifier: Apache-2.0
"""Data for training: texts, batches with positions, and prefetching."""
