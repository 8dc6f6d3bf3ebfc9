# SPDX-License-Identifier: Apache-2.0
"""Layouts of published weights in few bits."""
