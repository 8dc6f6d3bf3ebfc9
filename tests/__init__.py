# SPDX-License-Identifier: Apache-2.0
"""The tests; a package so that they can share helpers whatever else is installed."""
