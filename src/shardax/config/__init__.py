# SPDX-License-Identifier: Apache-2.0
"""Settings of the process."""
