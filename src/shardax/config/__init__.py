# SPDX-License-Identifier: Apache-2.0
"""Settings of a process, made in one call at the top of a script."""
