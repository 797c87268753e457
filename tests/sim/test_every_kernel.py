"""Every kernel of the matrix, run on the CPU from its rendered source."""

from __future__ import annotations

import pytest
from variants_on_cpu import SPECS, cases_of, failure_of


@pytest.mark.parametrize("name", ["plain", "odd", "extreme"])
@pytest.mark.parametrize("spec", SPECS, ids=[spec.name for spec in SPECS])
def test_variant(pool, spec, name):
    """Nothing to report, and within the fuzzer's bounds: quantizers bit for bit, attention of emulation and float64."""
    results = pool.result(cases_of(spec)[name])
    assert failure_of(results) is None
    for verdict, _ in results:
        assert verdict.variant == spec.name
        assert {"bits of q", "bits of k", "bits of v", "output, emulation", "output, float64"} <= verdict.worst.keys()
