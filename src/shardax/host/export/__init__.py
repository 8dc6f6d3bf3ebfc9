# SPDX-License-Identifier: Apache-2.0
"""Functions as artifacts on disk, without their source."""
