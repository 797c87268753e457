"""Every kernel of the matrix, run on the CPU from its rendered source."""

from __future__ import annotations

import pytest
from variants_on_cpu import (
    FIRST_OF_EACH,
    OF_QUANTIZATION_AND_EPILOGUE,
    OF_SPARSE_MASKS,
    SIMULATED,
    SPECS,
    cases_of,
    check_variant,
    epilogue_of,
    failure_of,
    may_be_simulated,
    quantization_of,
    settings_of,
    source_of,
)

from sage_aot._kernels.spec import is_ptx


def test_every_source_and_every_chip_is_simulated():
    assert {source_of(spec) for spec in SIMULATED} == {source_of(spec) for spec in SPECS if may_be_simulated(spec)}
    assert {spec.arch for spec in SIMULATED} == {spec.arch for spec in SPECS if not is_ptx(spec.arch)}
    assert len(SIMULATED) < len(SPECS)


@pytest.mark.parametrize("part", [quantization_of, epilogue_of, settings_of])
def test_every_quantization_and_every_epilogue_reads_and_stores_odd_rows(part):
    assert set(FIRST_OF_EACH) < set(SIMULATED)
    assert set(map(part, FIRST_OF_EACH)) == set(map(part, filter(may_be_simulated, SPECS)))
    for spec in SIMULATED:
        own = OF_QUANTIZATION_AND_EPILOGUE & OF_SPARSE_MASKS if spec.mask == "sparse" else OF_QUANTIZATION_AND_EPILOGUE
        own = own if spec.qk == "int8" else own - {"heavy", "heavy, few keys"}
        own = own if spec.v == "vsmooth" else own - {"alike"}
        assert OF_QUANTIZATION_AND_EPILOGUE.intersection(cases_of(spec)) == (own if spec in FIRST_OF_EACH else set())


@pytest.mark.by_workers(does=check_variant)
@pytest.mark.parametrize(("spec", "name"), [pytest.param(spec, name, id=f"{spec.name}-{name}")
                                            for spec in SIMULATED for name in cases_of(spec)])
def test_variant(outcome, spec, name):
    """Nothing to report, and within the fuzzer's bounds: quantizers bit for bit, attention of emulation and float64;
    gradients of emulation."""
    expected = {"output, emulation"}
    expected |= ({f"grad_{x}, emulation" for x in "qkv"} if cases_of(spec)[name].trained
                 else {"bits of q", "bits of k", "bits of v", "output, float64"})
    assert failure_of(outcome) is None
    for verdict, _ in outcome:
        assert verdict.variant == spec.name
        assert expected <= verdict.worst.keys()
