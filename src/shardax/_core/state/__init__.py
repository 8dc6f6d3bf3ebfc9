# SPDX-License-Identifier: Apache-2.0
"""State: values by path, filters, split and merge, unbind and bind."""
