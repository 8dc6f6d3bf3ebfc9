# SPDX-License-Identifier: Apache-2.0
"""The core: Variables, Modules, structure, state, random streams, errors."""
