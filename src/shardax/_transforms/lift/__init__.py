# SPDX-License-Identifier: Apache-2.0
"""The lift: what every transform shares."""
