"""The table of options: its entries agree with each other, with the operators' schemas and with the kernels' axes."""

from __future__ import annotations

import inspect
import math
from itertools import product

import pytest
import torch

import sage_aot
from sage_aot._call import ops
from sage_aot._kernels.axes import AXES
from sage_aot._problem import tensors
from sage_aot._problem.options import OPTION_OF_AXIS, OPTIONS, Options, for_schema, for_tracer, schema, spelt
from sage_aot.errors import ArgumentError

NAMES = list(OPTIONS)
CHOICES = [dict(zip(NAMES, values)) for values in product(*(option.samples[:2] for option in OPTIONS.values()))]
"""Every way to choose between two values of each option."""
SAMPLES = [(name, value) for name, option in OPTIONS.items() for value in option.samples]


def values_of(options):
    return tuple(getattr(options, name) for name in NAMES)


def call(**options):
    return sage_aot.attn(*torch.zeros(3, 1, 1, 4, 64, dtype=torch.bfloat16), **options)


# --- entries ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "value"), SAMPLES, ids=str)
def test_samples_are_valid(name, value):
    assert getattr(Options(**{name: value}), name) == value


@pytest.mark.parametrize("name", NAMES)
def test_the_default_is_the_simplest_sample(name):
    assert OPTIONS[name].samples[0] == OPTIONS[name].default


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("refuse", [lambda **options: Options(**options), call,
                                    lambda **options: sage_aot.explain(capability=(8, 9), headdim=64, **options)],
                         ids=["Options", "attn", "explain"])
def test_the_refused_value_is_refused_by_name(name, refuse):
    with pytest.raises(ArgumentError) as refused:
        refuse(**{name: OPTIONS[name].refused})
    assert str(refused.value) == f"{name}: expected {OPTIONS[name].expected}, got {OPTIONS[name].refused!r}"


@pytest.mark.parametrize(("options", "message"), [
    ({"layout": "hnd"}, r"layout: expected 'HND' \[batch, heads, seq, headdim\] or 'NHD' .*, got 'hnd'"),
    ({"layout": None}, "layout: expected 'HND'"),
    ({"is_causal": 1}, "is_causal: expected True or False, got 1"),
    ({"is_causal": None}, "is_causal: expected True or False, got None"),
    ({"smooth_k": None}, "smooth_k: expected True or False, got None"),
    ({"smooth_k": 0}, "smooth_k: expected True or False, got 0"),
    ({"scale": "1"}, "scale: expected a finite number from -1e"),
    ({"scale": math.nan}, "scale: expected a finite number"),
    ({"scale": math.inf}, "scale: expected a finite number"),
    ({"scale": 1e39}, "scale: expected a finite number"),
    ({"scale": True}, "scale: expected a finite number"),
    ({"qk": "int16"}, "qk: expected 'auto', 'int8', 'int4' or 'nvfp4', got 'int16'"),
    ({"qk": 8}, "qk: expected 'auto', 'int8', 'int4' or 'nvfp4', got 8"),
    ({"qk": None}, "qk: expected 'auto', 'int8', 'int4' or 'nvfp4', got None"),
    ({"smooth_q": 1}, "smooth_q: expected 'auto', True or False, got 1"),
    ({"smooth_q": None}, "smooth_q: expected 'auto', True or False, got None"),
    ({"rotate": 1}, "rotate: expected 'auto', True or False, got 1"),
    ({"rotate": None}, "rotate: expected 'auto', True or False, got None"),
    ({"clip": "auto"}, "clip: expected True or False, got 'auto'"),
    ({"clip": 1}, "clip: expected True or False, got 1"),
    ({"smooth_v": "yes"}, "smooth_v: expected True or False, got 'yes'"),
    ({"smooth_v": "auto"}, "smooth_v: expected True or False, got 'auto'"),
    ({"pv_accum": "f16"}, "pv_accum: expected 'auto' or one of 'f32', 'two_level_f32', 'two_level_f16', got 'f16'"),
    ({"pv_accum": None}, "pv_accum: expected 'auto' or one of .*, got None"),
    ({"p": "line"}, "p: expected 'auto', 'linear' or 'exp2', got 'line'"),
    ({"p": None}, "p: expected 'auto', 'linear' or 'exp2', got None"),
])
@pytest.mark.parametrize("refuse", [lambda **options: Options(**options), call], ids=["Options", "attn"])
def test_what_is_refused(options, message, refuse):
    with pytest.raises(ArgumentError, match=message):
        refuse(**options)


@pytest.mark.parametrize("value", [[1], {}, {1}, torch.zeros(2).tolist(), bytearray(b"HND")], ids=repr)
@pytest.mark.parametrize("name", NAMES)
def test_values_that_cannot_be_hashed_are_refused_like_any_other(name, value):
    with pytest.raises(ArgumentError, match=f"^{name}: expected .*, got "):
        call(**{name: value})


def test_an_unknown_option_is_refused():
    with pytest.raises(TypeError, match="qk_bits"):
        call(qk_bits=8)
    with pytest.raises(TypeError, match="qk_bits"):
        sage_aot.explain(capability=(8, 9), headdim=64, qk_bits=8)


def test_the_call_and_explain_take_every_option_with_its_default():
    for function in (sage_aot.attn, sage_aot.explain):
        parameters = inspect.signature(function).parameters
        found = [name for name in parameters if name in OPTIONS]
        assert found == NAMES
        assert {name: parameters[name].default for name in NAMES} == {
            name: option.default for name, option in OPTIONS.items()}


# --- what "auto" stands for -------------------------------------------------------------------------------------------


def test_smooth_q_is_on_for_4_bits_unless_set():
    assert Options().resolved.smooth_q is False
    assert Options(qk="int8").resolved.smooth_q is False
    assert Options(qk="int4").resolved.smooth_q is True
    assert Options(qk="int4", smooth_q=False).resolved.smooth_q is False
    assert Options(smooth_q=True).resolved.smooth_q is True


def test_qk_is_8_bits_unless_set():
    assert Options().resolved.qk == "int8" and Options(qk="int4").resolved.qk == "int4"


@pytest.mark.parametrize(("name", "value"), [
    (name, value) for name in ("pv_accum", "p") for value in OPTIONS[name].samples])
def test_what_the_kernels_decide_stays_as_it_was_asked_for(name, value):
    assert getattr(Options(**{name: value}).resolved, name) == value


def test_resolving_changes_nothing_but_auto_and_is_done_once():
    for given in CHOICES:
        resolved = Options(**given).resolved
        assert resolved.resolved == resolved
        assert all(getattr(resolved, name) == value for name, value in given.items() if value != "auto")


# --- the kernels' axes ------------------------------------------------------------------------------------------------


def test_every_axis_but_the_type_of_p_is_an_options_or_the_head_dims():
    assert set(AXES) - set(OPTION_OF_AXIS) == {"headdim", "pv"}
    for axis, name in OPTION_OF_AXIS.items():
        values = [value for option in OPTIONS.values() if option.axis == axis for value in option.values.values()]
        assert sorted(map(str, values)) == sorted(map(str, AXES[axis])), name
        assert {OPTIONS[name].default, *OPTIONS[name].samples} <= {*OPTIONS[name].values, "auto"}


@pytest.mark.parametrize("values", list(product(*(AXES[axis] for axis in OPTION_OF_AXIS))), ids=str)
def test_options_of_axes_ask_for_just_these(values):
    axes = dict(zip(OPTION_OF_AXIS, values))
    assert Options.of_axes(axes).axes == Options.of_axes(axes).resolved.axes == axes
    assert Options.of_axes({"headdim": 64, "pv": "f16", **axes}, scale=0.5, layout="NHD").axes == axes


def test_an_axis_that_is_left_open_is_missing():
    assert set(Options().axes) == {"mask", "v"}
    assert set(Options().resolved.axes) == {"mask", "v", "qk", "q"}
    assert Options.of_axes({"mask": "causal"}) == Options(is_causal=True)


def test_axes_are_spelt_as_the_call_takes_them():
    assert spelt("v", "vsmooth") == "smooth_v=True" and spelt("mask", "full") == "is_causal=False"
    assert spelt("qk", "int4") == "qk='int4'" and spelt("headdim", 64) == "headdim=64"


# --- the operators' schemas -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", [*ops.attn], ids=str)
def test_schemas_are_the_table(op):
    out = "Tensor(a!) out, " if "out" in str(op) else ""
    assert f"Tensor v, {tensors.schema('dense')}{out}{schema()})" in str(op._schema)
    assert [argument.name for argument in op._schema.arguments][-len(NAMES):] == NAMES


def test_what_the_operators_get_says_the_options():
    for given in CHOICES:
        options = Options(**given)
        assert Options.from_schema(*for_schema(*values_of(options))) == options


@pytest.mark.parametrize(("name", "value"), SAMPLES, ids=str)
def test_each_sample_survives_the_schema(name, value):
    options = Options(**{name: value})
    assert values_of(Options.from_schema(*for_schema(*values_of(options)))) == values_of(options)


def test_defaults_at_the_end_are_left_out():
    defaults = values_of(Options())
    assert for_schema(*defaults) == ()
    for i, (name, option) in enumerate(OPTIONS.items()):
        given = for_schema(*values_of(Options(**{name: option.samples[1]})))
        assert len(given) == i + 1 and given[-1] == option.samples[1]
        trimmed = tuple(None if OPTIONS[other].schema.endswith("?") else OPTIONS[other].default for other in NAMES[:i])
        assert given[:-1] == trimmed


@pytest.mark.parametrize("name", [name for name, option in OPTIONS.items() if isinstance(option.samples[1], bool)])
@pytest.mark.parametrize("first", [True, False])
def test_a_flag_is_told_from_the_number_that_equals_it(name, first):
    """The flag and the number are told apart whichever of them the cache of for_schema has seen first."""
    flag = values_of(Options(**{name: True}))
    for look_alike in (1, 1.0, "1"):
        number = tuple(look_alike if other == name else value for other, value in zip(NAMES, flag))
        if first:
            for_schema(*flag)
        with pytest.raises(ArgumentError, match=f"^{name}: expected .*, got {look_alike!r}$"):
            for_schema(*number)
        assert Options.from_schema(*for_schema(*flag)) == Options(**{name: True})


def test_a_number_is_told_from_the_flag_that_equals_it():
    for value in (1, 1.0):
        assert for_schema(*values_of(Options(scale=value)))[1] == value
    with pytest.raises(ArgumentError, match="^scale: expected a finite number"):
        for_schema(False, True, *values_of(Options())[2:])


def test_what_a_tracer_takes_says_the_same_options():
    for given in CHOICES + [dict(zip(NAMES, values_of(Options(scale=scale)))) for scale in (0, 1, 2.5, -3)]:
        options = Options(**given)
        assert Options.from_schema(*for_tracer(*values_of(options))) == options


def test_one_option_is_a_float():
    """for_tracer() lets `scale` alone be a number that the tracer does not know."""
    assert [name for name, option in OPTIONS.items() if option.schema.startswith("float")] == ["scale"]
