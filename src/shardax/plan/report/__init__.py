# SPDX-License-Identifier: Apache-2.0
"""Plans as tables, pages and text."""
