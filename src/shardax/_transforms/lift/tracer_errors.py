# SPDX-License-Identifier: Apache-2.0
"""Names of ``explain.tracer_errors``, for files that still import them from here."""

from __future__ import annotations

from shardax._transforms.explain.tracer_errors import TRACER_ERRORS as TRACER_ERRORS
from shardax._transforms.explain.tracer_errors import add_advice as add_advice
from shardax._transforms.explain.tracer_errors import rewrite as rewrite
