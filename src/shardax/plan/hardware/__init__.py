# SPDX-License-Identifier: Apache-2.0
"""Hardware, targets, and the time model of programs."""
