"""The table of options: everything that an option of the call is, in one entry.

From an entry of :class:`Options` follow the check of the value, its type in the operators' schemas, the axis of the
kernels that it decides about, what ``explain`` and messages say of it, its row in docs/options.md, and the values that
the fuzzer draws. An option that reaches kernels at run time is an entry here, with their kinds, and a parameter of
:func:`sage_aot._call.api.attn`: a field of its name in a kernel's struct takes its value. A kernel of these kinds whose
struct lacks the field computes the option's default, and a call that asks for another value is refused.
"""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

from sage_aot._kernels.axes import AXES
from sage_aot.errors import ArgumentError

LAYOUTS = {"HND": "[batch, heads, seq, headdim]", "NHD": "[batch, seq, heads, headdim]"}
MAX_SCALE = 1e6
"""Kernels keep scores and their scales in float32, and take no score below −1e30 for one that they saw."""


class Option(NamedTuple):
    """One option of the call."""

    default: Any
    schema: str  # type in the operators' schemas
    expected: str  # what a message says was expected
    valid: Callable[[Any], bool]
    help: str  # one sentence for docs/options.md; the docstring of attn() says more
    samples: tuple[Any, ...]  # valid values, the simplest first, which the fuzzer draws and reduces to
    refused: Any  # a value that is not valid, for tests
    kinds: tuple[str, ...] = ()  # of the kernels that take the option at run time
    axis: str = ""  # of the kernels, that the option decides about
    values: Mapping[Any, str | int] = {}  # per value of the option, that of the axis; "auto" is not among them. Of an
                                          # option with values without end (`axis_value`) one for each value of the axis
    fixed: bool = False  # a part of the problem: another value is no advice, it would be another result
    resolve: Callable[[Options], Any] | None = None  # what "auto" stands for, given the options before this one
    axis_value: Callable[[Options], str | int] | None = None  # that of the axis, given all options, not by `values`


def _is_bool(value: object) -> bool:
    return isinstance(value, bool)


def _is_bool_or_auto(value: object) -> bool:
    return isinstance(value, (bool, str)) and value in (True, False, "auto")


def _is_one_of(*choices: str) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, str) and value in choices


def _is_scale(value: object) -> bool:
    if value is None:
        return True
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= MAX_SCALE


UNBOUNDED = -1
"""Side of a window that shows every key."""


def _is_window(value: object) -> bool:
    if value is None:
        return True
    return isinstance(value, tuple) and len(value) == 2 and all(
        isinstance(side, int) and not isinstance(side, bool) and UNBOUNDED <= side < 2**31 for side in value)


def bounds_of(is_causal: bool, window: Sequence[int] | None) -> tuple[int, int]:
    """Numbers of keys that a query sees in front of its own and behind it; UNBOUNDED for every key."""
    left, right = window or (UNBOUNDED, UNBOUNDED)
    return left, 0 if is_causal else right


def _mask_of(options: Options) -> str:
    """The kernels' mask."""
    return {(UNBOUNDED, UNBOUNDED): "full", (UNBOUNDED, 0): "causal"}.get(
        bounds_of(options.is_causal, options.window), "sparse")


_OF_SYMBOL: Mapping[str, Callable[[Any], Any]] = {"SymBool": bool, "SymInt": int, "SymFloat": float}


def scalar_of(value: Any) -> Any:
    """The Python scalar within a NumPy scalar, a string too, or within an array or a tensor without dimensions; that of
    a tracer's symbol, which puts a guard on it; of a list or a tuple the tuple of these; any other value as it is. A
    tensor stays one, which no option is, where it has no value, or several, or a derivative that would be lost. A
    scalar on a GPU synchronizes with it."""
    if isinstance(value, (list, tuple)):  # dynamo of torch 2.11 cannot look up the names of their types, or of ints'
        return tuple([operator.index(item) if isinstance(item, int) and not isinstance(item, bool) else scalar_of(item)
                      for item in value])
    if of_symbol := _OF_SYMBOL.get(type(value).__name__):
        return of_symbol(value)
    if getattr(value, "ndim", None) != 0 or not hasattr(value, "item"):
        return value
    of_numpy = type(value).__module__ == "numpy"  # which dynamo cannot ask for an attribute that is not there
    return value if not of_numpy and stays_a_tensor(value) else value.item()


def stays_a_tensor(value: Any) -> bool:
    """True for a tensor that holds no value, several, or one with a derivative."""
    if not hasattr(value, "requires_grad"):  # an array of another library
        return False
    return bool(value.is_meta) or any(stays(value) for stays in STAYS_A_TENSOR)


STAYS_A_TENSOR: list[Callable[[Any], bool]] = []
"""Functions that say of a tensor that it has several scalars, or one that would lose a derivative.
sage_aot/_problem/derivatives.py adds its own, for this module does without torch."""


def integer_of(value: Any) -> int | None:
    """The integer that a value is to Python (``__index__``), those of NumPy among them; None where it is none, or a
    bool."""
    if isinstance(value, bool):
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None


def _may_change(value: Any) -> bool:
    """True where a value is equal to itself while the scalar within it differs."""
    return type(value).__name__ in _OF_SYMBOL or hasattr(value, "item") and not isinstance(value, float)


def _option(default: Any, **entry: Any) -> Any:
    """A field with its entry; what is said is checked where :data:`OPTIONS` is made."""
    return dataclasses.field(default=default, metadata=entry)


def _flag(default: bool, *, false: str, true: str, axis: str, **entry: Any) -> Any:
    return _option(default, schema="bool", expected="True or False", valid=_is_bool, samples=(False, True), refused=1,
                   axis=axis, values={False: false, True: true}, **entry)


@dataclass(frozen=True)
class Options:
    """The options of a call, in the order of the operators' schemas. ArgumentError for a value that an option refuses;
    scalars of NumPy, and of arrays and tensors without dimensions, become Python's."""

    is_causal: bool = _flag(
        False, axis="mask", false="full", true="causal", fixed=True,
        help="query i sees the keys `j <= i + keys - queries`: aligned bottom-right")
    scale: float | None = _option(
        None, schema="float?", valid=_is_scale, samples=(None, 0.0, -0.1, 1e-3, 0.7, 20.0), refused=math.nan,
        expected=f"a finite number from -{MAX_SCALE:g} to {MAX_SCALE:g}, or None for 1 / sqrt(headdim); multiply q "
                 f"by a tensor that vmap maps, of a tensor that is differentiated pass scale.item()",
        help="factor on q·kᵀ before the softmax; None is `1 / sqrt(headdim)`")
    layout: str = _option(
        "HND", schema="str", valid=_is_one_of(*LAYOUTS), samples=tuple(LAYOUTS), refused="BSHD",
        expected=" or ".join(f"{name!r} {axes}" for name, axes in LAYOUTS.items()),
        help="order of the dimensions of q, k, v and the output: " + " or ".join(
            f'`"{name}"` {axes}' for name, axes in LAYOUTS.items()))
    qk: str = _option(
        "auto", schema="str", valid=_is_one_of("auto", *map(str, AXES["qk"])),
        samples=("auto", "int8", "int4", "nvfp4"),
        refused="int5", expected="'auto', 'int8', 'int4' or 'nvfp4'",
        axis="qk", values={value: value for value in AXES["qk"]},
        resolve=lambda options: "int8",  # 4 bits visibly hurt some models
        help="type of the quantized q and k; int4 is for GPUs before sm90, nvfp4 (of p and v too: SageAttention3) for "
             "sm120")
    smooth_q: bool | str = _option(
        "auto", schema="bool?", valid=_is_bool_or_auto, samples=("auto", False, True), refused="yes",
        expected="'auto', True or False", axis="q", values={False: "qraw", True: "qsmooth"},
        resolve=lambda options: options.qk != "int8",  # at 8 bits smoothing Q gains less than it costs
        help="subtract the mean of each tile of q before quantizing; `\"auto\"` does so for int4 and nvfp4")
    smooth_k: bool = _option(
        True, schema="bool", expected="True or False", valid=_is_bool, samples=(True, False), refused=1,
        kinds=("quant",),
        help="subtract the mean of k over a sample of 64 keys before quantizing; for int8 without `rotate`, also "
             "divide channels of k that are far larger than most by powers of two, and multiply those of q")
    smooth_v: bool = _flag(
        False, axis="v", false="vraw", true="vsmooth",
        help="subtract the mean of v over a sample of 64 keys before quantizing, and add it to the output")
    rotate: bool | str = _option(
        "auto", schema="bool?", valid=_is_bool_or_auto, samples=("auto", False, True), refused="no",
        expected="'auto', True or False", kinds=("quant",),
        resolve=lambda options: options.qk == "int4",  # at 8 bits few models need it, and quantizers take longer
        help="multiply q and k by the Hadamard matrix before quantizing, so that no channel sets the scale of its row; "
             "`\"auto\"` does so for int4")
    clip: bool = _option(
        True, schema="bool", expected="True or False", valid=_is_bool, samples=(True, False), refused="no",
        kinds=("quant",),
        help="for int4, cut off the largest values of a scale group of q or k where that lowers the group's error")
    pv_accum: str = _option(
        "auto", schema="str", valid=_is_one_of("auto", *map(str, AXES["pv_accum"])),
        samples=("auto", "two_level_f32", "two_level_f16"), refused="f16",
        expected="'auto' or one of " + ", ".join(repr(value) for value in AXES["pv_accum"]),
        axis="pv_accum", values={value: value for value in AXES["pv_accum"]},
        help="how P·V adds up over the keys; `\"auto\"` is the best of the GPU's kernels")
    p: str = _option(
        "auto", schema="str", valid=_is_one_of("auto", *map(str, AXES["p"])), samples=("auto", "linear", "exp2"),
        refused="exact", expected="'auto', 'linear' or 'exp2'",
        axis="p", values={value: value for value in AXES["p"]},
        help="how P follows from a score: `\"exp2\"` by an exponential; `\"linear\"`, for FP8 P of INT8 scores on "
             "sm90 up to head dim 128, and on sm89 and sm120 (there with f32 sums) where neither q nor v is smoothed, "
             f"by a line between the powers of two; `\"auto\"` is `\"{AXES['p'][0]}\"` where the GPU has such a kernel")
    window: tuple[int, int] | None = _option(
        None, schema="int[]?", valid=_is_window, fixed=True, axis="mask", values={(47, 20): "sparse"},
        samples=(None, (47, 20), (-1, 0), (0, 0), (-1, 30), (100, -1), (300, 0), (-1, -1)), refused=(-2, 0),
        expected=f"None, or (left, right): two integers, how many keys a query sees on each side of its own, or "
                 f"{UNBOUNDED} for no bound",
        axis_value=_mask_of,
        help="`(left, right)`: query i sees the keys from `i + keys - queries - left` to `i + keys - queries + right`; "
             f"`{UNBOUNDED}` is no bound. As in FlashAttention")

    def __post_init__(self) -> None:
        for name, option in OPTIONS.items():
            given = getattr(self, name)
            if not option.valid(given) or isinstance(given, str) and hasattr(given, "ndim"):  # NumPy's str is one too
                if not option.valid(value := scalar_of(given)):
                    raise ArgumentError(f"{name}: expected {option.expected}, got {given!r}")
                object.__setattr__(self, name, value)

    @staticmethod
    @lru_cache(maxsize=256, typed=True)
    def from_schema(*values: Any) -> Options:
        """The options of an operator's arguments: those that torch hands over, in order; None stands for "auto"."""
        given = {name: option.default if value is None else value
                 for (name, option), value in zip(OPTIONS.items(), values)}
        return Options(**given)

    @classmethod
    def of_axes(cls, axes: Mapping[str, int | str], **others: Any) -> Options:
        """The options that ask for a kernel with these values on its axes; and other options."""
        chosen = {name: value for name, option in OPTIONS.items() for value, of_axis in option.values.items()
                  if axes.get(option.axis) == of_axis}
        return cls(**chosen, **others)

    @cached_property
    def resolved(self) -> Options:
        """The options with the value instead of every "auto" that does not depend on the GPU."""
        options = self
        for name, option in OPTIONS.items():
            if option.resolve and getattr(options, name) == option.default:
                options = dataclasses.replace(options, **{name: option.resolve(options)})
        return options

    @cached_property
    def axes(self) -> dict[str, str | int]:
        """The values of the kernels' axes that the options ask for; an axis that they leave open is missing."""
        found = {option.axis: option.values[getattr(self, name)] for name, option in OPTIONS.items()
                 if option.axis and getattr(self, name) in option.values}
        return found | {option.axis: option.axis_value(self) for option in OPTIONS.values() if option.axis_value}


OPTIONS: dict[str, Option] = {field.name: Option(field.default, **field.metadata)
                              for field in dataclasses.fields(Options)}
"""Every option by name, in the order of the operators' schemas."""

class Asked(NamedTuple):
    """The options of a call as the caller gave them, in the order of OPTIONS, not checked yet."""

    is_causal: Any = False
    scale: Any = None
    layout: Any = "HND"
    qk: Any = "auto"
    smooth_q: Any = "auto"
    smooth_k: Any = True
    smooth_v: Any = False
    rotate: Any = "auto"
    clip: Any = True
    pv_accum: Any = "auto"
    p: Any = "auto"
    window: Any = None

    def heads_first(self) -> Asked:
        """Return the options for tensors that are [batch, heads, seq, headdim] by now."""
        return self._replace(layout="HND")


_NUMBERS = {index: option for index, option in enumerate(OPTIONS.values())
            if option.schema.rstrip("?") in ("int", "float")}
"""Options, by index, whose value may be a number that a tracer does not know."""

_FLAGS = {index for index, option in enumerate(OPTIONS.values()) if option.schema.rstrip("?") == "bool"}

OPTION_OF_AXIS = {axis: next(name for name, option in OPTIONS.items() if option.axis == axis)
                  for axis in dict.fromkeys(option.axis for option in OPTIONS.values() if option.axis)}
"""Per axis the option that decides about it; of several the first, which has a value for each call."""


def for_schema(*values: Any) -> tuple[Any, ...]:
    """The values of all options, checked, as an operator takes them: less those at the end that have their default.

    Remembers the last ones. A tracer takes the answer for a constant, which it is: the values are constants to it.
    """
    if _is_window(values[_WINDOW]):  # else a key that is equal may be remembered: (3.0, 0) is to (3, 0)
        try:
            return _for_schema(*values)
        except TypeError:  # a scalar within another object, or a value that no option takes, for which Options raises
            pass
    return _for_schema(*vars(Options(*values)).values())


_WINDOW = list(OPTIONS).index("window")

# What torch.compiler.assume_constant_result does, without importing the compiler.
for_schema._dynamo_marked_constant = True  # type: ignore[attr-defined]


def for_tracer(*values: Any) -> tuple[Any, ...]:
    """The answer of :func:`for_schema` for a tracer to which an option may be a number that it does not know yet, as a
    float argument of compiled code is from its second value on. Such a number is no constant: it is checked here. On a
    flag that it does not know yet, such as ``q.size(2) > 1``, the tracer puts a guard."""
    given: list[Any] = [value if value is None or isinstance(value, (bool, int, float, str)) else scalar_of(value)
                        for value in values]
    numbers = {i: option for i, option in _NUMBERS.items() if given[i] != option.default and option.valid(given[i])}
    known = [_guarded(value) if i in _FLAGS else value for i, value in enumerate(given)]
    if not numbers:
        return for_schema(*known)
    for i in numbers:
        known[i] = 1  # a number that is known, and valid, and no default, which for_schema() may leave out
    known = list(for_schema(*known))
    for i, option in numbers.items():
        known[i] = float(given[i]) if option.schema.startswith("float") else given[i]
    return tuple(known)


def _guarded(flag: Any) -> Any:
    """A flag, or "auto", as a constant."""
    if isinstance(flag, bool):
        return True if flag else False  # noqa: SIM210  # bool() would be unknown as well
    return flag


def smooths_q(qk: str, smooth_q: bool | str) -> bool:
    """True where q is smoothed, given these options; constant to a tracer as :func:`for_schema` is."""
    return _smooths_q(qk, scalar_of(smooth_q))


smooths_q._dynamo_marked_constant = True  # type: ignore[attr-defined]


@lru_cache
def _smooths_q(qk: str, smooth_q: bool | str) -> bool:
    return bool(Options(qk=qk, smooth_q=smooth_q).resolved.smooth_q)


@lru_cache(maxsize=256, typed=True)  # typed: True is not 1
def _for_schema(*values: Any) -> tuple[Any, ...]:
    if any(map(_may_change, values)):
        raise TypeError("an array, a tensor or a symbol may hold another value in the next call")
    options = Options(*values)
    given: list[Any] = []
    for name, option in OPTIONS.items():
        value = getattr(options, name)
        given.append(_schema_default(option) if value == option.default else value)
    while given and given[-1] == _schema_default(list(OPTIONS.values())[len(given) - 1]):
        given.pop()
    return tuple(given)


def schema() -> str:
    """The options in an operator's schema, with their defaults, which torch does not hand over again."""
    return ", ".join(f"{option.schema} {name}={_spelt_default(option)}" for name, option in OPTIONS.items())


_SPARSE = "a window, sinks, attn_mask or block_mask"
"""Arguments that ask for kernels of sparse masks: the option `window`, and tensors whose `axes` say so."""


def spelt(axis: str, value: object) -> str:
    """An axis's value as the call takes it: ``smooth_v=True``."""
    for name, option in OPTIONS.items():
        for of_option, of_axis in option.values.items():
            if (option.axis, of_axis) == (axis, value):
                return _SPARSE if option.axis_value else f"{name}={of_option!r}"
    return f"{axis}={value!r}"


def markdown_table() -> str:
    """The table of docs/options.md."""
    rows = [f"| `{name}` | `{option.default!r}` | {_in_docs(option)} | {option.help} |"
            for name, option in OPTIONS.items()]
    return "\n".join(["| option | default | values | meaning |", "|---|---|---|---|", *rows]) + "\n"


def _schema_default(option: Option) -> Any:
    """None stands for the default of an option whose type in a schema has no room for it."""
    return None if option.schema.endswith("?") else option.default


def _spelt_default(option: Option) -> str:
    default = _schema_default(option)
    return f'"{default}"' if isinstance(default, str) else repr(default)


def _in_docs(option: Option) -> str:
    return option.expected.replace("'", "`").split("; ")[0]
