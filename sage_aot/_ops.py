"""The torch operators behind the public call: schemas, what runs them, what they look like to a tracer.

`sage_aot::attn` and its three forms (with the log-sum-exp, into a given tensor, both) run the kernels for CUDA tensors
and the emulation for CPU tensors. Everything that a tracer cannot follow (the environment, the manifest, caches,
addresses) happens inside them. All forms take the same options, OPTIONS, by position.
Source: torch.library.Library, whose dispatch costs a third of that of torch.library.custom_op.
"""

from __future__ import annotations

import os
from functools import lru_cache

import torch

from sage_aot import _cuda, _emulate
from sage_aot._loader import Library, default_library
from sage_aot._manifest import Manifest
from sage_aot._plan import Plan, plan
from sage_aot._problem import Problem, check, check_out, heads_first
from sage_aot._select import all_archs, kernels_of
from sage_aot.errors import ArgumentError, UnsupportedError

OPTIONS = {"is_causal": "bool", "scale": "float?", "layout": "str", "qk_bits": "int?", "smooth_q": "bool?",
           "smooth_k": "bool", "smooth_v": "bool", "pv_accum": "str"}
"""Every option of every operator with its type in a schema, in order: those of :func:`sage_aot._problem.check`."""

AUTO = {"qk_bits", "smooth_q"}
"""Options for which None in an operator stands for "auto" in the call."""

_LIBRARY = torch.library.Library("sage_aot", "DEF")  # operators live as long as this object


def emulated_arch(manifest: Manifest) -> str:
    """The arch whose kernels CPU tensors emulate: ``SAGE_AOT_EMULATE`` where set, else sm89, else the newest built."""
    archs = all_archs(manifest)
    asked = os.environ.get("SAGE_AOT_EMULATE")
    if asked is not None and asked not in archs:
        raise UnsupportedError(f"SAGE_AOT_EMULATE: expected one of the archs that are built, {', '.join(archs)}; got "
                               f"{asked!r}")
    return asked or ("sm89" if "sm89" in archs else archs[-1])


# --- what runs --------------------------------------------------------------------------------------------------------


def _attn(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *options: object) -> torch.Tensor:
    problem, layout = _problem(q, k, v, options)
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    _run(problem, layout, q, k, v, out, None)
    return out


def _attn_lse(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
              *options: object) -> tuple[torch.Tensor, torch.Tensor]:
    problem, layout = _problem(q, k, v, options)
    out, lse = torch.empty_like(q, memory_format=torch.contiguous_format), _empty_lse(problem, q)
    _run(problem, layout, q, k, v, out, lse)
    return out, lse


def _attn_out(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, *options: object) -> None:
    problem, layout = _problem(q, k, v, options)
    _check_written(out, q)
    _run(problem, layout, q, k, v, out, None)
    _count_write(out)


def _attn_lse_out(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor,
                  *options: object) -> torch.Tensor:
    problem, layout = _problem(q, k, v, options)
    _check_written(out, q)
    lse = _empty_lse(problem, q)
    _run(problem, layout, q, k, v, out, lse)
    _count_write(out)
    return lse


def _problem(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: tuple[object, ...]) -> tuple[Problem, str]:
    """The problem, checked, and the layout."""
    named = dict(zip(OPTIONS, options))
    for name in AUTO:
        if named[name] is None:
            named[name] = "auto"
    return check(q, k, v, **named), named["layout"]


def _empty_lse(problem: Problem, q: torch.Tensor) -> torch.Tensor:
    return q.new_empty((problem.batch, problem.num_q_heads, problem.seqlen_q), dtype=torch.float32)


def _check_written(out: torch.Tensor, q: torch.Tensor) -> None:
    check_out(out, q)
    if out.requires_grad and torch.is_grad_enabled():
        raise ArgumentError("out requires grad, and attn has no backward pass; call it under torch.no_grad() or "
                            "torch.inference_mode(), or pass out.detach()")


def _count_write(out: torch.Tensor) -> None:
    """Let autograd notice where it had saved the old values for a backward pass."""
    if not out.is_inference():
        torch.autograd.graph.increment_version(out)


def _run(problem: Problem, layout: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor,
         lse: torch.Tensor | None) -> None:
    if layout != "HND":
        q, k, v, out = (heads_first(tensor, layout) for tensor in (q, k, v, out))
    library = default_library()
    device = q.get_device()  # -1 for the CPU
    arch = _cuda.arch_of(library, device) if device >= 0 else emulated_arch(library.manifest)
    prepared = prepare(library, arch, problem)
    if q.numel() == 0 or k.numel() == 0:
        _nothing_to_see(out, lse)
    elif device >= 0:
        _cuda.attention(prepared, library, q, k, v, out, lse)
    else:
        _emulate.attention(problem, prepared.kernels, q, k, v, out, lse)


@lru_cache(maxsize=1024)
def prepare(library: Library, arch: str, problem: Problem) -> Plan:
    """Kernels and sizes of a problem; a model asks for the same few again and again."""
    return plan(problem, kernels_of(arch, problem, library.manifest))


def _nothing_to_see(out: torch.Tensor, lse: torch.Tensor | None) -> None:
    """No queries, or none that sees a key."""
    out.zero_()
    if lse is not None:
        lse.fill_(float("-inf"))


# --- what a tracer sees: shapes, and the same errors ------------------------------------------------------------------


def _fake_attn(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *options: object) -> torch.Tensor:
    _problem(q, k, v, options)
    return torch.empty_like(q, memory_format=torch.contiguous_format)


def _fake_attn_lse(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
                   *options: object) -> tuple[torch.Tensor, torch.Tensor]:
    problem, _ = _problem(q, k, v, options)
    return torch.empty_like(q, memory_format=torch.contiguous_format), _empty_lse(problem, q)


def _fake_attn_out(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, *options: object) -> None:
    _problem(q, k, v, options)
    _check_written(out, q)


def _fake_attn_lse_out(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor,
                       *options: object) -> torch.Tensor:
    problem, _ = _problem(q, k, v, options)
    _check_written(out, q)
    return _empty_lse(problem, q)


# --- registration -----------------------------------------------------------------------------------------------------


def _register(name: str, written: str, returns: str, run: object, fake: object) -> torch._ops.OpOverload:
    options = ", ".join(f"{kind} {option}" for option, kind in OPTIONS.items())
    # The stride order is fixed, so that a compiler keeps the last dimension contiguous.
    _LIBRARY.define(f"{name}(Tensor q, Tensor k, Tensor v, {written}{options}) -> {returns}",
                    tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_fixed_stride_order))
    op = getattr(torch.ops.sage_aot, name).default
    for device in ("CUDA", "CPU"):
        _LIBRARY.impl(name, run, device)
        _LIBRARY.impl(name, _autocasting(op, device), f"Autocast{device}")
    torch.library.register_fake(f"sage_aot::{name}", fake, lib=_LIBRARY)
    return op


def _autocasting(op: torch._ops.OpOverload, device: str) -> object:
    """Under torch.autocast q, k and v take its dtype, as those of scaled_dot_product_attention do."""
    kind = device.lower()
    autocast = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, f"Autocast{device}"))

    def cast(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        castable = tensor.is_floating_point() and tensor.dtype != torch.float64 and tensor.device.type == kind
        return tensor.to(dtype) if castable else tensor

    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *others: object) -> object:
        dtype = torch.get_autocast_dtype(kind)
        with torch._C._ExcludeDispatchKeyGuard(autocast):
            return op(cast(q, dtype), cast(k, dtype), cast(v, dtype), *others)

    return run


attn = _register("attn", "", "Tensor", _attn, _fake_attn)
attn_lse = _register("attn_lse", "", "(Tensor, Tensor)", _attn_lse, _fake_attn_lse)
attn_out = _register("attn_out", "Tensor(a!) out, ", "()", _attn_out, _fake_attn_out)
attn_lse_out = _register("attn_lse_out", "Tensor(a!) out, ", "Tensor", _attn_lse_out, _fake_attn_lse_out)
