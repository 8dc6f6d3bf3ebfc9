# SPDX-License-Identifier: Apache-2.0
"""Prints which tests failed, and how many passed, by the JUnit reports of all parts of CI.

python3 .ci/summary.py REPORT ...
"""

from __future__ import annotations

import sys
from pathlib import Path
from xml.etree import ElementTree


def main(reports: list[str]) -> None:
    """Prints a line for each test that failed, and the totals."""
    passed = failed = skipped = 0
    for report in filter(Path.exists, map(Path, reports)):
        for case in ElementTree.parse(report).iter("testcase"):
            ends = {outcome.tag for outcome in case}
            if ends & {"failure", "error"}:
                failed += 1
                print(f"FAILED in {report.stem}: {case.get('classname')} {case.get('name')}")
            elif "skipped" in ends:
                skipped += 1
            else:
                passed += 1
    print(f"{passed} passed, {failed} failed, {skipped} skipped")


if __name__ == "__main__":
    main(sys.argv[1:])
