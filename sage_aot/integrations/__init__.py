"""sage_aot in the libraries that people run models with. Nothing is registered by an import.

    sage_aot.integrations.torch          scaled_dot_product_attention
    sage_aot.integrations.transformers   attn_implementation="sage_aot"
    sage_aot.integrations.distributed    the rings of yunchang and torch
    sage_aot.integrations.diffusers      models and pipelines, the backend "sage_aot", context parallelism
    sage_aot.integrations.comfyui        a node that serves one model

One policy decides for all of them which calls sage_aot serves; :func:`report` says what it decided and why, and
:func:`audit` how far the served calls' outputs are from the hosts'.
"""

from __future__ import annotations

from sage_aot.integrations._audit import Audited, audit
from sage_aot.integrations._policy import Policy, use
from sage_aot.integrations._report import report, reset_report

__all__ = ["Audited", "Policy", "audit", "report", "reset_report", "use"]
