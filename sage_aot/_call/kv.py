"""K and V that are quantized once: :func:`quantize_kv`, and what it returns, which :func:`sage_aot.attn` takes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NoReturn

import torch

from sage_aot._call import ops
from sage_aot._call.backends import backend_of
from sage_aot._call.pipeline import plan_of, quantizer_of
from sage_aot._call.pooling import PooledBlocks, pooled_of
from sage_aot._kernels.axes import least_headdim
from sage_aot._problem.arguments import check_device, check_optional_are, check_tensors_are
from sage_aot._problem.check import check
from sage_aot._problem.derivatives import check_no_derivative, is_transformed
from sage_aot._problem.given import Given
from sage_aot._problem.options import OPTIONS, Asked, Options, for_schema, for_tracer
from sage_aot._problem.problem import heads_first
from sage_aot.errors import ArgumentError

OF_CALL = ("is_causal", "scale", "layout", "window")
"""The options that each call of attn with a QuantizedKV has of its own; all others are those of quantize_kv."""


@dataclass(frozen=True, eq=False, repr=False)
class QuantizedKV:
    """K and V as the kernels of one arch quantized them, made by :func:`quantize_kv`. Frozen; bound to its device."""

    shape: tuple[int, int, int, int]
    """Batch, kv heads, keys and head dim of k and v."""
    dtype: torch.dtype
    """Dtype of k and v, and thus of every q."""
    arch: str
    """Arch whose kernels quantized k and v, and compute attention to them."""
    quantizer: str
    """The kernel that quantized k and v."""
    has_key_mask: bool
    options: Options
    """Options of quantize_kv, "auto" resolved."""
    _data: torch.Tensor
    _k: torch.Tensor | None
    pooled: PooledBlocks | None = None
    """The means of the blocks of k, where quantize_kv was asked for them."""
    pooled_v: PooledBlocks | None = None
    """The means of the blocks of v, where quantize_kv was asked for a tail."""

    @property
    def device(self) -> torch.device:
        return self._data.device

    @property
    def nbytes(self) -> int:
        """Bytes of device memory that this object holds."""
        return sum(tensor.nbytes for tensor in self._tensors)

    @property
    def _tensors(self) -> list[torch.Tensor]:
        pooled = [tensor for part in (self.pooled, self.pooled_v) if part is not None for tensor in part.tensors]
        return [self._data, *pooled] if self._k is None else [self._data, self._k, *pooled]

    def arguments(self, q: torch.Tensor) -> tuple[Any, ...]:
        """The arguments of the operators of attn with q and this object, in front of the options."""
        return q, self._data, self._k, self.shape, self.dtype, self.has_key_mask, self.quantizer

    def __repr__(self) -> str:
        return (f"QuantizedKV({list(self.shape)} {self.dtype} on {self.device}, {self.arch}, {self.nbytes} bytes"
                f"{', key mask' if self.has_key_mask else ''})")

    def record_stream(self, stream: torch.Stream) -> None:
        """Do as torch.Tensor.record_stream: the memory is not reused before the work queued on `stream` is done. Call
        it for each other stream than that of quantize_kv on which attn takes this object."""
        for tensor in self._tensors:
            tensor.record_stream(stream)

    def to(self, *args: object, **kwargs: object) -> NoReturn:
        """Raises ArgumentError: the layout of the quantized tensors is that of one arch's kernels."""
        raise ArgumentError(f"a QuantizedKV stays on its device, {self.device}: its layout is that of the kernels of "
                            f"{self.arch}; move k and v, and quantize them there")

    def __reduce__(self) -> NoReturn:
        raise ArgumentError(f"a QuantizedKV cannot be pickled or copied: its layout is that of these kernels of "
                            f"{self.arch}, which another version may change; keep k and v, and quantize them again")


def quantize_kv(k: torch.Tensor, v: torch.Tensor, *, key_mask: torch.Tensor | None = None, layout: str = "HND",
                qk: str = "auto", smooth_q: bool | str = "auto", smooth_k: bool = True, smooth_v: bool = False,
                rotate: bool | str = "auto", clip: bool = True, pv_accum: str = "auto", p: str = "auto",
                pool: int | None = None, tail: bool = False) -> QuantizedKV:
    """Quantize k and v once for any number of calls ``attn(q, kv)``: cross-attention, cached conditioning, several
    steps of a sampler.

    ``attn(q, quantize_kv(k, v, ...), ...)`` gives the bits of ``attn(q, k, v, ...)`` with the same options, but for an
    `attn_mask` of keys alone, ``[batch, 1, 1, keys]``, which `attn` takes for a `key_mask`: pass it here as one; and
    but for int8 where channels of k are far larger than most: what `attn` divides them by depends on q, which is not
    known here, so that such a k costs more accuracy. The
    result holds, per key, kv head and channel: 2 bytes with FP8 P·V and 8-bit K (sm89, sm90, sm120), 3 bytes with f16
    P·V, half a byte less with 4-bit K. Keys are padded to whole tiles, channels to 64, 128 or 256. Each tile has 128
    bytes more, each channel of a kv head 16 and the head 4, and each key 8 where there is a key mask. Where q is
    smoothed, as at 4 bits by default, the result also keeps a copy of k. With `pool` each channel of a block of keys
    has one byte more, with `tail` ten. Later writes to k, v and key_mask do not reach it.

    CPU tensors are kept in float32: the emulation quantizes them in every call.

    Args:
        k, v: as :func:`sage_aot.attn` takes them. The q of a call must have their dtype and device.
        key_mask: likewise; calls with the result have none of their own. Calls with a result that has one take no
            `attn_mask`, `block_mask` and `sparse`.
        layout: of k and v alone; a call has a layout for its q.
        qk, smooth_q, smooth_k, smooth_v, rotate, clip, pv_accum, p: as :func:`sage_aot.attn`, for all calls with the
            result.
        pool: keep the means of blocks of so many keys too, a multiple of 64, for calls that choose among them
            (``attn(q, kv, sparse=...)``, whose blocks have as many keys). Not with `key_mask`. None: no such
            calls.
        tail: with `pool`, keep the means of the values, too, for calls with ``Sparse(..., tail=True)``.

    Raises:
        ArgumentError, UnsupportedError, CubinError, LaunchError: as :func:`sage_aot.attn`.

    >>> import torch, sage_aot
    >>> q, k, v = torch.randn(3, 1, 2, 100, 64)
    >>> kv = sage_aot.quantize_kv(k, v)
    >>> torch.equal(sage_aot.attn(q, kv), sage_aot.attn(q, k, v))
    True
    """
    if isinstance(k, QuantizedKV):
        raise ArgumentError("k: expected a torch.Tensor, got a QuantizedKV, which is quantized already; pass it to "
                            "attn")
    check_tensors_are(k=k, v=v)
    check_device(k=k)
    check_optional_are(key_mask=key_mask)
    if pool is not None and key_mask is not None:
        raise ArgumentError("pool: expected None with a key_mask, since calls with a QuantizedKV that has one choose "
                            f"no blocks, got {pool!r}; leave the key mask out, and pass attn_mask=key_mask[:, None, "
                            f"None] to attn")
    if not isinstance(tail, bool):
        raise ArgumentError(f"tail: expected True or False, got {tail!r}")
    if tail and pool is None:
        raise ArgumentError("tail: expected False without pool, got True; pass pool, the keys of a block")
    if is_transformed():
        check_no_derivative(k=k, v=v)
    asked = Asked(False, None, layout, qk, smooth_q, smooth_k, smooth_v, rotate, clip, pv_accum, p)
    given = for_tracer(*asked) if torch.compiler.is_dynamo_compiling() else for_schema(*asked)
    data, copied = ops.quantize_kv(k, v, key_mask, *given)
    batch, heads, keys, headdim = heads_first(k, layout).shape
    arch, quantizer, *resolved = kernels_for_kv(data.device, least_headdim(headdim), *given)
    return QuantizedKV((batch, heads, keys, headdim), copied.dtype, arch, quantizer, key_mask is not None,
                       Options(*resolved), data, copied if copied.dim() == 4 else None,
                       None if pool is None else pooled_of("k", k, pool, True, tail, layout, "pool"),
                       pooled_of("v", v, pool, False, True, layout, "pool") if tail else None)


def check_not_with_sequences(k: object) -> None:
    """Raise ArgumentError for a QuantizedKV in a call with sequences."""
    if isinstance(k, QuantizedKV):
        raise ArgumentError("k: expected a tensor with sequences, got a QuantizedKV; call attn_varlen with k and v")


def asked_with(kv: QuantizedKV, v: object, asked: Asked) -> Asked:
    """The options of a call of attn with a QuantizedKV and these arguments. Raises ArgumentError for an argument that
    quantize_kv takes and that has another value than it got; a default stands for that value."""
    if v is not None:
        raise ArgumentError(f"v: expected None with a QuantizedKV, got {type(v).__name__}; pass it to quantize_kv")
    found = []
    for (name, option), given in zip(OPTIONS.items(), asked):
        if not option.valid(given):
            given = getattr(Options(**{name: given}), name)  # may raise
        value = given if name in OF_CALL else getattr(kv.options, name)
        if given != value and given != option.default:
            raise ArgumentError(f"{name}: k and v were quantized with {value!r}, got {given!r}; pass it to quantize_kv")
        found.append(value)
    return Asked(*found)


def kernels_for_kv(device: torch.device, headdim: int, *options: Any) -> tuple[Any, ...]:
    """Facts of the kernels that quantize k and v on a device now, given an operator's options: the arch,
    quantizer_of(), and the values of all options with "auto" resolved."""
    asked = Options.from_schema(*options)
    like = torch.empty(1, 1, 1, headdim, device=device, dtype=torch.float16)
    backend = backend_of(like)
    kernels = plan_of(backend, check(Given("kv", None, like, like), asked), like.get_device()).kernels
    chosen = kernels.attn.spec
    resolved = replace(asked.resolved, pv_accum=chosen.pv_accum, p=chosen.p)
    return chosen.arch, quantizer_of(kernels), *(getattr(resolved, name) for name in OPTIONS)


# A tracer takes the answer for a constant, as the fake implementations take the kernels for given.
kernels_for_kv._dynamo_marked_constant = True  # type: ignore[attr-defined]
