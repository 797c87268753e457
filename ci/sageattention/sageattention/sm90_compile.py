"""Module that SGLang imports on Hopper before it uses SageAttention. SageAttention has the function below since its
kernels for sm90 are operators that torch.compile traces. Those of sage_aot are.

ImportError where the installed sage_aot has no kernels for sm90.
"""

from __future__ import annotations

from typing import Any, NoReturn

from sage_aot.errors import UnsupportedError
from sageattention import core

if not core.SM90_ENABLED:
    raise ImportError("expected kernels for sm90, got none in the installed sage_aot; 'sage-aot info' lists them")


def qk_int8_sv_f8_accum_f32_fuse_v_scale_attn_inst_buf_fake_impl(*args: Any, **kwargs: Any) -> NoReturn:
    """Raises UnsupportedError: SGLang imports this name, and calls :func:`sageattention.sageattn`."""
    raise UnsupportedError("expected a call of sageattention.sageattn, got one of an operator of SageAttention, which "
                           "sage_aot does not have; torch.compile traces sageattn as it is")
