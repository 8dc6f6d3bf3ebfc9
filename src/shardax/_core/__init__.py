# SPDX-License-Identifier: Apache-2.0
"""Model objects: Variables, Modules, structure, state."""
