# SPDX-License-Identifier: Apache-2.0
"""Gradients of data-parallel devices: computed by each, and summed."""
