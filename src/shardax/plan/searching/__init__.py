# SPDX-License-Identifier: Apache-2.0
"""The search for layouts: candidates, their order, and the dimensions they split."""
