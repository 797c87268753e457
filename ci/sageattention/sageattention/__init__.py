"""The functions of SageAttention, computed by sage_aot's precompiled kernels: the distribution sage-aot-sageattention.

ImportError where the distribution sageattention is installed too. Both own this package, and their files overwrite each
other, so that nothing says which code a host runs.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version


def _refuse_a_second_owner() -> None:
    try:
        found = version("sageattention")
    except PackageNotFoundError:
        return
    raise ImportError(f"expected one distribution with the package sageattention, got two: sageattention {found} and "
                      f"sage-aot-sageattention, whose files overwrite each other; run 'pip uninstall sageattention "
                      f"sage-aot-sageattention', then install the one to use")


_refuse_a_second_owner()

from sageattention.core import (  # noqa: E402  # not before the check
    sageattn,
    sageattn_qk_int8_pv_fp8_cuda,
    sageattn_qk_int8_pv_fp8_cuda_sm90,
    sageattn_qk_int8_pv_fp16_cuda,
    sageattn_qk_int8_pv_fp16_triton,
    sageattn_varlen,
)

__all__ = [
    "sageattn",
    "sageattn_qk_int8_pv_fp16_cuda",
    "sageattn_qk_int8_pv_fp16_triton",
    "sageattn_qk_int8_pv_fp8_cuda",
    "sageattn_qk_int8_pv_fp8_cuda_sm90",
    "sageattn_varlen",
]
