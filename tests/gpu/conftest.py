"""The head of the tests' report: the variants that the tests of this folder leave out."""

from __future__ import annotations

from variants import LEFT_OUT


def pytest_report_header() -> str | None:
    if not LEFT_OUT:
        return None
    return (f"without a source tree to build them for this GPU, or without their instructions here, left out: kernels "
            f"of {', '.join(LEFT_OUT)}")
