"""ComfyUI's calls in sage_aot's hands: on a stand-in of its attention, and where COMFYUI_PATH names a checkout, on its
own code."""

from __future__ import annotations

import copy
import importlib.util
import inspect
import json
import os
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from blocks import chosen_by, clear
from comfyui_stand_in import KEY, Container, ModelPatcher, host_attention
from exact import served_calls

from sage_aot import Sparse
from sage_aot.errors import ArgumentError, UnsupportedError
from sage_aot.integrations import Policy, report, use
from sage_aot.integrations.comfyui import NODE_CLASS_MAPPINGS, NODE_DISPLAY_NAME_MAPPINGS, override, patch
from sage_aot.integrations.torch import replace_sdpa

ROOT = Path(__file__).parents[2]
HEADS, HEADDIM = 4, 32


def tensors(queries=24, keys=40, skip_reshape=False, kv_heads=HEADS, batch=2):
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(batch, heads, rows, HEADDIM, generator=generator)
               for heads, rows in ((HEADS, queries), (kv_heads, keys), (kv_heads, keys)))
    return [x if skip_reshape else x.transpose(1, 2).flatten(2) for x in (q, k, v)]


def patched(**options):
    return patch(ModelPatcher(), policy=Policy("possible"), **options)


def close(found, expected):
    assert found.shape == expected.shape
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


# --- its calls --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("skip_output_reshape", [False, True])
@pytest.mark.parametrize("skip_reshape", [False, True])
def test_all_layouts(exact, skip_reshape, skip_output_reshape):
    q, k, v = tensors(skip_reshape=skip_reshape)
    layout = {"skip_reshape": skip_reshape, "skip_output_reshape": skip_output_reshape}
    out = patched().attend(q, k, v, HEADS, **layout)
    close(out, host_attention(q, k, v, HEADS, **layout))
    assert report() == {"sage_aot": 1}
    assert (out if not skip_output_reshape or skip_reshape else out.transpose(1, 2)).is_contiguous(), "no copy was made"


def test_views_of_a_fused_projection(exact):
    fused = torch.randn(2, 24, 3 * HEADS * HEADDIM, generator=torch.Generator().manual_seed(0))
    q, k, v = fused.chunk(3, dim=2)
    close(patched().attend(q, k, v, heads=HEADS), host_attention(q, k, v, HEADS))
    q, k, v = (x.unflatten(2, (HEADS, HEADDIM)).transpose(1, 2) for x in (q, k, v))
    close(patched().attend(q, k, v, HEADS, skip_reshape=True), host_attention(q, k, v, HEADS, skip_reshape=True))
    assert served_calls() == 2


def bools(*shape):
    return torch.rand(shape, generator=torch.Generator().manual_seed(1)) < 0.7


@pytest.mark.parametrize(("mask", "reason"), [
    (bools(2, 1, 1, 40), None), (bools(2, 1, 40), None), (bools(1, 40), None), (bools(1, 1, 40), None),
    (bools(2, 1, 1, 40).expand(2, 4, 24, 40), None),
    (bools(24, 40), None), (bools(2, 24, 40), None), (bools(2, 1, 24, 40), None), (bools(2, 4, 24, 40), None),
    (torch.where(bools(24, 40), 0.0, -10000.0), "a mask of numbers"),
    (torch.randn(24, 40), "a mask of numbers"), (torch.randn(2, 1, 40), "a mask of numbers")], ids=lambda x: str(
        tuple(x.shape) if isinstance(x, torch.Tensor) else x))
@pytest.mark.parametrize("by_position", [False, True])
def test_masks(exact, mask, reason, by_position):
    q, k, v = tensors()
    more, named = ((mask,), {}) if by_position else ((), {"mask": mask})
    close(patched().attend(q, k, v, HEADS, *more, **named), host_attention(q, k, v, HEADS, mask))
    assert report() == {reason or "sage_aot": 1}


def test_three_dimensions_of_a_mask_are_batch_queries_keys(exact):
    """Heads are as many as samples: a dimension for heads in the wrong place would fit."""
    q, k, v = tensors(batch=HEADS)
    mask = bools(HEADS, 1, 40)
    close(patched().attend(q, k, v, HEADS, mask), host_attention(q, k, v, HEADS, mask))
    assert served_calls() == 1


@pytest.mark.parametrize("skip_reshape", [False, True])
def test_scale_and_grouped_heads(exact, skip_reshape):
    q, k, v = tensors(skip_reshape=skip_reshape, kv_heads=2)
    options = {"scale": 0.5, "enable_gqa": True, "skip_reshape": skip_reshape}
    close(patched().attend(q, k, v, HEADS, **options), host_attention(q, k, v, HEADS, **options))
    assert served_calls() == 1


def test_the_precision_that_a_model_asks_for_changes_nothing(exact):
    q, k, v = tensors()
    close(patched().attend(q, k, v, HEADS, None, torch.float32), host_attention(q, k, v, HEADS))
    assert served_calls() == 1


def test_more_channels_of_v(exact):
    q, k, _ = tensors(skip_reshape=True)
    v = torch.randn(2, HEADS, 40, 48, generator=torch.Generator().manual_seed(2))
    close(patched().attend(q, k, v, HEADS, skip_reshape=True), host_attention(q, k, v, HEADS, skip_reshape=True))
    assert served_calls() == 1


def test_by_the_emulation():
    q, k, v = tensors()
    expected = host_attention(q, k, v, HEADS)
    assert 0 < (patched().attend(q, k, v, HEADS) - expected).norm() / expected.norm() < 0.05


def test_containers_of_newer_versions_arrive_as_tensors(exact):
    q, k, v = tensors()
    expected = host_attention(q, k, v, HEADS)
    close(patched().attend(*map(Container, (q, k, v)), HEADS), expected)
    assert not hasattr(override(), "container_function"), "ComfyUI would hand over the containers"
    with pytest.raises(ArgumentError, match="q, k, v: expected tensors, got Container, Container, Container; "):
        override()(host_attention, *map(Container, (q, k, v)), HEADS)


# --- calls that stay with the host ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("said", "obeyed"), [(False, True), (True, False), (None, False)])
@pytest.mark.parametrize("replaced", [nullcontext, replace_sdpa.globally])
def test_low_precision_attention_is_obeyed(said, obeyed, replaced):
    q, k, v = tensors()
    expected = host_attention(q, k, v, HEADS)
    with replaced():  # the host calls torch's function, which must not get the call again
        out = patched().attend(q, k, v, HEADS, low_precision_attention=said)
    assert torch.equal(out, expected) == obeyed
    assert report() == {"low_precision_attention=False" if obeyed else "sage_aot": 1}


def test_what_an_unknown_argument_means_is_the_hosts():
    q, k, v = tensors()
    model = patched()
    assert torch.equal(model.attend(q, k, v, HEADS, window=3, a_sink=None), host_attention(q, k, v, HEADS))
    model.attend(q, k, v, HEADS, window=None)
    assert report() == {"the argument window": 1, "sage_aot": 1}
    with pytest.raises(UnsupportedError, match="got: the argument window; let the host"):
        patch(ModelPatcher(), policy=Policy("possible", "raise")).attend(q, k, v, HEADS, window=3)


def test_shapes_that_do_not_fit_are_the_hosts():
    rows, heads = tensors(queries=40), tensors(queries=40, skip_reshape=True)
    calls = [(rows, 3, False), (rows, 200, False), ([*rows[:2], rows[2][..., :-1]], HEADS, False),
             (heads, HEADS, False), (rows, HEADS, True), (heads, 2, True), ([heads[0], *rows[1:]], HEADS, True)]
    serving = override(policy=Policy("possible"))
    for qkv, number, skip_reshape in calls:
        assert serving(lambda *args, **kwargs: torch.ones(3, 3, 3), *qkv, number, skip_reshape=skip_reshape).sum() == 27
    assert report() == {"shapes that do not fit heads and skip_reshape": len(calls)}


def test_grouped_heads_that_nobody_announced_are_the_hosts():
    q, k, v = tensors(skip_reshape=True, kv_heads=2)
    with pytest.raises(RuntimeError, match="must match"):
        patched().attend(q, k, v, HEADS, skip_reshape=True)
    assert report() == {"heads that are broadcast": 1}


def test_declined_calls_go_to_the_override_of_before(exact):
    q, k, v = tensors()
    seen = []

    def before(func, *args, **kwargs):
        seen.append((func, args, kwargs))
        return func(*args, **kwargs)

    model = patch(ModelPatcher(**{KEY: before}), policy=Policy("possible"))
    close(model.attend(q, k, v, HEADS), host_attention(q, k, v, HEADS))
    assert seen == [], "a call that is served"
    numbers = torch.randn(24, 40)
    assert torch.equal(model.attend(q, k, v, HEADS, numbers, scale=0.5),
                       host_attention(q, k, v, HEADS, numbers, scale=0.5))
    model.attend(q, k, v, HEADS, low_precision_attention=False)
    (func, args, kwargs), (_, _, second) = seen
    assert func is host_attention.__wrapped__ and args == (q, k, v, HEADS, numbers)
    assert kwargs.keys() == {"scale", "transformer_options", "_inside_attn_wrapper"}
    assert second["low_precision_attention"] is False
    assert served_calls() == 1


def test_two_nodes_in_a_row(monkeypatch):
    """Each serves its part of the schedule, by its own policy."""
    asked = []
    monkeypatch.setattr("sage_aot.integrations._serve.attn", lambda q, *_, **more: asked.append(more) or q)
    q, k, v = tensors()
    first = patched(end_percent=0.5)
    both = patch(first, policy=Policy("possible", options={"smooth_k": False}), start_percent=0.75)
    for sigma, smooth_k in ((8.0, [None]), (4.0, []), (2.0, [False])):
        both.attend(q, k, v, HEADS, options={"sigmas": torch.tensor([sigma])})
        assert [more.get("smooth_k") for more in asked] == smooth_k
        asked.clear()


# --- the schedule -----------------------------------------------------------------------------------------------------


def test_a_part_of_the_schedule(exact):
    q, k, v = tensors()
    model = patched(start_percent=0.25, end_percent=0.75)  # sigmas 7.5 to 2.5
    for sigma, served in ((7.6, False), (7.5, True), (5.0, True), (2.5, True), (2.4, False)):
        before = served_calls()
        model.attend(q, k, v, HEADS, options={"sigmas": torch.tensor([sigma, 0.0])})
        assert served_calls() - before == served, sigma
    assert report()["a sigma outside of the part of the schedule that is served"] == 2


def test_a_sigma_is_read_once_a_step(exact, monkeypatch):
    q, k, v = tensors()
    read = []
    item = torch.Tensor.item
    monkeypatch.setattr(torch.Tensor, "item", lambda tensor: read.append(item(tensor)) or read[-1])
    parted, whole = patched(end_percent=0.5), patched()
    for sigma in (8.0, 2.0, 8.0):
        options = {"sigmas": torch.tensor([sigma])}
        for model in (parted, whole, parted):
            model.attend(q, k, v, HEADS, options=options)
    assert read == [8.0, 2.0, 8.0]
    assert report() == {"sage_aot": 7, "a sigma outside of the part of the schedule that is served": 2}


def test_a_step_is_not_known_by_the_address_of_its_tensor(exact):
    """A new tensor may lie where that of the last step has lain."""
    q, k, v = tensors()
    model = patched(end_percent=0.5)
    for step in range(50):
        model.attend(q, k, v, HEADS, options={"sigmas": torch.tensor([8.0 if step % 2 else 2.0])})
    assert served_calls() == 25


def test_a_call_without_a_sigma_stays_where_a_part_is_set():
    q, k, v = tensors()
    patched(end_percent=0.5).attend(q, k, v, HEADS)
    patched().attend(q, k, v, HEADS)
    assert report() == {"a part of the schedule is set, and the call has no sigma": 1, "sage_aot": 1}


# --- dense blocks -----------------------------------------------------------------------------------------------------


def told(kind=None, index=0, of_unet=False):
    if of_unet:
        return {"block": (kind, index), "block_index": 0}
    return {"block_index": index, **({} if kind is None else {"block_type": kind})}


@pytest.mark.parametrize(("dense_blocks", "block", "dense"), [
    ("0, 2-3", told("double", 0), True), ("0, 2-3", told("double", 1), False), ("0 2-3", told("single", 3), True),
    ("0,2-3", told(None, 4), False), (" 2-3 ,0,", told(None, 2), True),
    ("single:3", told("single", 3), True), ("single:3", told("double", 3), False), ("single:3", told(None, 3), True),
    ("double:1-2", told("double", 2), True), ("double:12", told("double", 1), False),
    ("4", told("input", 4, True), True), ("input:4", told("output", 4, True), False),
    ("middle:0", told("middle", 0, True), True), ("0", told("input", 4, True), False), ("", told("double", 0), False),
])
def test_dense_blocks_stay_with_the_host(dense_blocks, block, dense):
    q, k, v = tensors()
    out = patched(dense_blocks=dense_blocks).attend(q, k, v, HEADS, options=block)
    assert torch.equal(out, host_attention(q, k, v, HEADS)) == dense
    assert report() == {"a dense block" if dense else "sage_aot": 1}


def test_a_call_of_an_unknown_block_is_dense_for_all_one_knows():
    q, k, v = tensors()
    patched(dense_blocks="0").attend(q, k, v, HEADS)
    assert report() == {"dense blocks are set, and the model does not say which block calls": 1}


# --- sparse attention -------------------------------------------------------------------------------------------------

SPARSE = Sparse(keep=0.25)
LONG = clear()  # 16 blocks of 2 heads


def seen_by(model, **options):
    """The mask of a call of a patched model, 16 blocks, by its output."""
    out = model.attend(*LONG, 2, skip_reshape=True, skip_output_reshape=True, options=options)
    for name, sparse in (("sparse", SPARSE), ("dense", None), ("text", Sparse(keep=0.25, dense_keys=(0, 300),
                                                                              dense_queries=(0, 300)))):
        mask = None if sparse is None else chosen_by(sparse, *LONG[:2])
        expected = host_attention(*LONG, 2, mask, skip_reshape=True, skip_output_reshape=True)
        if torch.allclose(out, expected, rtol=0, atol=1e-4):
            return name
    return "another"


def test_a_sparse_call_sees_the_blocks_that_it_chooses(exact):
    assert seen_by(patched()) == "dense"
    assert seen_by(patched(sparse=SPARSE)) == "sparse"
    assert seen_by(patched(sparse=SPARSE, text_tokens=(0, 300))) == "text"
    assert report() == {"sage_aot": 3, "sage_aot, sparse": 2}
    q = LONG[0][:, :, :100]
    close(patched(sparse=SPARSE).attend(q, *LONG[1:], 2, skip_reshape=True),
          host_attention(q, *LONG[1:], 2, skip_reshape=True))
    assert report() == {"sage_aot": 4, "sage_aot, sparse": 2}, "attention to another sequence is dense"


def test_by_the_emulation_of_sparse_calls():
    expected, dense = (host_attention(*LONG, 2, mask, skip_reshape=True)
                       for mask in (chosen_by(SPARSE, *LONG[:2]), None))
    found = patched(sparse=SPARSE).attend(*LONG, 2, skip_reshape=True)
    assert (found - expected).norm() / expected.norm() < 0.06 < 0.3 < (dense - expected).norm() / expected.norm()


def test_what_is_left_out_of_sparse_calls_is_dense_by_sage_aot(exact):
    model = patched(sparse=SPARSE, start_percent=0.25, end_percent=0.75, dense_blocks="0, single:2")
    sigmas, early = ({"sigmas": torch.tensor([sigma])} for sigma in (5.0, 8.0))
    assert seen_by(model, **sigmas, **told("double", 1)) == "sparse"
    assert seen_by(model, **early, **told("double", 1)) == "dense"
    assert seen_by(model, **sigmas, **told("double", 0)) == "dense"
    assert seen_by(model, **sigmas, **told("single", 2)) == "dense"
    assert seen_by(model, **sigmas) == "dense", "a model that does not say which block calls"
    assert report() == {"sage_aot": 5, "sage_aot, sparse": 1}
    model.attend(*tensors(), HEADS, low_precision_attention=False, options=sigmas)
    assert report()["low_precision_attention=False"] == 1


def test_the_nodes_share_of_blocks(exact):
    node = NODE_CLASS_MAPPINGS["SageAOTAttention"]()
    settings = "possible", "host", 0.0, 1.0, ""
    for more, seen in (((), "dense"), ((1.0,), "dense"), ((0.25,), "sparse"), ((0.25, 0, 300), "text")):
        assert seen_by(node.patch(ModelPatcher(), *settings, *more)[0]) == seen
    outside = node.patch(ModelPatcher(), "possible", "host", 0.0, 0.5, "")[0], {"sigmas": torch.tensor([2.0])}
    seen_by(outside[0], **outside[1])
    assert report()["a sigma outside of the part of the schedule that is served"] == 1, "without keep, as before"


@pytest.mark.parametrize(("wrong", "message"), [
    ({"sparse": 0.25}, "sparse: expected a sage_aot.Sparse, .*, got 0.25"),
    ({"sparse": {"0": SPARSE}}, "sparse: expected a sage_aot.Sparse or None, got "),
    ({"sparse": SPARSE, "text_tokens": -1}, "text_tokens: expected how many first ones"),
    ({"text_tokens": 77}, "text_tokens: expected 0 without sparse, got 77")])
def test_wrong_sparse_arguments(wrong, message):
    with pytest.raises(ArgumentError, match=message):
        patch(ModelPatcher(), **wrong)


def test_sparse_calls_compiled_whole():
    options = patched(sparse=SPARSE, dense_blocks="1").model_options["transformer_options"]

    def layer(q, k, v, options):
        return host_attention(q, k, v, 2, skip_reshape=True, transformer_options=options).cos()

    compiled = torch.compile(layer, backend="eager", fullgraph=True)
    for index in (0, 1, 0):
        given = {**options, "block_index": index}
        close(compiled(*LONG, given), layer(*LONG, given))
    assert report() == {"sage_aot": 3, "sage_aot, sparse": 2}, "compiled code counts nothing"


# --- models -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("copying", [copy.deepcopy, lambda options: options], ids=["deep", "shared"])
def test_a_model_is_not_changed(copying):
    def before(func, *args, **kwargs):
        return func(*args, **kwargs)

    for options in ({}, {KEY: before, "patches": {}}):
        model = ModelPatcher(copying, **options)
        whole, transformer = model.model_options, model.model_options["transformer_options"]
        made = patch(model, dense_blocks="0")
        assert made is not model and model.model_options is whole and whole["transformer_options"] is transformer
        assert whole == {"transformer_options": options, "other": [1]} and transformer == options
        changed = made.model_options
        assert callable(changed["transformer_options"].pop(KEY)) and changed["other"] == [1]
        assert changed["transformer_options"] == {key: value for key, value in options.items() if key != KEY}


def test_clones_of_a_patched_model_are_served(exact):
    q, k, v = tensors()
    model = patched(end_percent=0.5)
    options = {"sigmas": torch.tensor([8.0])}
    model.attend(q, k, v, HEADS, options=options)  # from here on the override holds something of the step
    model.clone().clone().attend(q, k, v, HEADS, options=options)
    assert report() == {"sage_aot": 2}


def test_models_with_settings_of_their_own(exact):
    q, k, v = tensors()
    node = NODE_CLASS_MAPPINGS["SageAOTAttention"]()
    settings = ("possible", "raise", 0.0, 1.0, "1"), ("possible", "host", 0.0, 1.0, ""), ("faster", "raise", 0, 1, "")
    strict, lenient, faster = (node.patch(ModelPatcher(), *each)[0] for each in settings)
    numbers = torch.randn(24, 40)
    with use(Policy("faster", "host")):  # that of the process, which they do not take
        strict.attend(q, k, v, HEADS, options=told(index=0))
        strict.attend(q, k, v, HEADS, numbers, options=told(index=1))
        with pytest.raises(UnsupportedError, match="got: a mask of numbers"):
            strict.attend(q, k, v, HEADS, numbers, options=told(index=0))
        lenient.attend(q, k, v, HEADS, numbers)
        lenient.attend(q, k, v, HEADS)
        faster.attend(q, k, v, HEADS, numbers)
    assert report() == {"sage_aot": 2, "a dense block": 1, "a mask of numbers": 2, "tensors on the CPU": 1}


def test_without_a_policy_that_of_the_process_decides(exact):
    q, k, v = tensors()
    model = patch(ModelPatcher())
    model.attend(q, k, v, HEADS)
    with use(Policy()):
        model.attend(q, k, v, HEADS)
    assert report() == {"sage_aot": 1, "tensors on the CPU": 1}


@pytest.mark.parametrize(("wrong", "message"), [
    ({"start_percent": -0.1}, "expected 0 <= start_percent <= end_percent <= 1, got -0.1 and 1.0"),
    ({"end_percent": 1.5}, "got 0.0 and 1.5"), ({"start_percent": 0.6, "end_percent": 0.5}, "got 0.6 and 0.5"),
    ({"start_percent": float("nan")}, "got nan and 1.0"),
    *(({"dense_blocks": text}, f"dense_blocks: expected indices and ranges such as .*, got '{part}'") for text, part in
      (("0, one", "one"), ("-1", "-1"), ("3-2", "3-2"), ("singel:1", "singel:1"), ("1;2", "1;2"), ("1.5", "1.5"))),
    ({"dense_blocks": [0, 1]}, r"dense_blocks: expected a text such as '0, 1, 36-39', got \[0, 1\]"),
    ({"policy": "possible"}, "policy: expected a Policy or None, got 'possible'"),
])
def test_wrong_arguments(wrong, message):
    with pytest.raises(ArgumentError, match=message):
        patch(ModelPatcher(), **wrong)


def test_what_is_no_model():
    with pytest.raises(ArgumentError, match="model: expected a ModelPatcher of ComfyUI, got Linear without clone, "
                                            "model_options, get_model_object; pass what a node gets as MODEL"):
        patch(torch.nn.Linear(1, 1))
    with pytest.raises(ArgumentError, match="previous: expected a function or None, got str"):
        patch(ModelPatcher(**{KEY: "sage"}))


def test_a_gpu_without_kernels_is_an_error_at_once(monkeypatch):
    def check():
        raise UnsupportedError("no kernel for this GPU")

    monkeypatch.setattr("sage_aot.integrations.comfyui.check_gpu", check)
    with pytest.raises(UnsupportedError, match="no kernel for this GPU"):
        patch(ModelPatcher())


# --- compiled ---------------------------------------------------------------------------------------------------------


def test_compiled_whole(exact):
    q, k, v = tensors()
    options = {**patched(dense_blocks="1").model_options["transformer_options"], "block_index": 0}

    def layer(q, k, v, options):
        return host_attention(q.sin(), k, v, HEADS, transformer_options=options).cos()

    compiled = torch.compile(layer, backend="eager", fullgraph=True)
    for index, expected in ((0, layer(q, k, v, options)), (1, layer(q, k, v, {}))):
        close(compiled(q, k, v, {**options, "block_index": index}), expected)
    assert served_calls() == 1, "compiled code counts nothing"


def test_compiled_with_a_part_of_the_schedule():
    q, k, v = tensors()
    options = patched(end_percent=0.5).model_options["transformer_options"]

    def layer(q, k, v, options):
        return host_attention(q.sin(), k, v, HEADS, transformer_options=options).cos()

    graphs = []

    def backend(graph, inputs):
        graphs.append([x.shape for x in inputs])
        return graph

    compiled = torch.compile(layer, backend=backend)
    for step, sigma in enumerate((8.0, 2.0, 8.0, 2.0)):
        given = {**options, "sigmas": torch.full((3,), sigma)}
        assert torch.equal(compiled(q, k, v, given), layer(q, k, v, given))
        assert torch.equal(layer(q, k, v, given), layer(q, k, v, {})) == (sigma == 2.0)
        if step == 1:
            both = len(graphs)
    assert both == len(graphs), "a step compiled anew"
    assert not any((3,) in shapes for shapes in graphs), "a graph reads the sigma"


# --- the node pack ----------------------------------------------------------------------------------------------------


def test_the_node_has_the_inputs_of_its_function():
    assert NODE_CLASS_MAPPINGS.keys() == NODE_DISPLAY_NAME_MAPPINGS.keys() == {"SageAOTAttention"}
    node = NODE_CLASS_MAPPINGS["SageAOTAttention"]
    required, optional = (node.INPUT_TYPES()[name] for name in ("required", "optional"))
    taken = inspect.signature(getattr(node, node.FUNCTION)).parameters
    assert [*required, *optional] == [*taken][1:]
    assert {name: taken[name].default for name in optional} == {
        name: given[1]["default"] for name, given in optional.items()} == {
        "keep": 1.0, "first_text_tokens": 0, "last_text_tokens": 0}, "workflows of before have none of these"
    assert [*required] == ["model", "when", "otherwise", "start_percent", "end_percent", "dense_blocks"]
    assert node.RETURN_TYPES == ("MODEL",) and required["model"] == ("MODEL",)
    for choice in ("when", "otherwise"):
        for value in required[choice][0]:
            Policy(**{choice: value})
        assert required[choice][0][0] == getattr(Policy(), choice), "ComfyUI takes the first as the default"
    defaults = {name: given[1]["default"] for name, given in required.items() if "default" in given[-1]}
    assert defaults == {"start_percent": 0.0, "end_percent": 1.0, "dense_blocks": ""}


def test_the_pack_exports_the_node():
    folder = ROOT / "examples/comfyui"
    spec = importlib.util.spec_from_file_location("sage_aot_pack", folder / "__init__.py")
    pack = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(pack)
    assert pack.NODE_CLASS_MAPPINGS is NODE_CLASS_MAPPINGS
    assert pack.NODE_DISPLAY_NAME_MAPPINGS is NODE_DISPLAY_NAME_MAPPINGS
    assert (folder / "requirements.txt").read_text().split() == ["sage-aot"]


def test_the_metadata_of_the_pack():
    if sys.version_info < (3, 11):
        pytest.skip("tomllib came with 3.11")
    import tomllib

    settings = tomllib.loads((ROOT / "examples/comfyui/pyproject.toml").read_text())
    assert settings["project"]["dependencies"] == ["sage-aot"]
    assert settings["tool"]["comfy"]["DisplayName"] == NODE_DISPLAY_NAME_MAPPINGS["SageAOTAttention"]
    assert {"PublisherId", "DisplayName"} == settings["tool"]["comfy"].keys() and settings["project"]["urls"].keys()


def test_an_import_brings_no_comfyui():
    program = "import sys, sage_aot.integrations.comfyui; print(*[n for n in sys.modules if n.startswith('comfy')])"
    assert subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, cwd=ROOT).stdout == b"\n"


# --- ComfyUI itself ---------------------------------------------------------------------------------------------------

COMFYUI_PATH = os.environ.get("COMFYUI_PATH")
needs_comfyui = pytest.mark.skipif(COMFYUI_PATH is None, reason="COMFYUI_PATH names no checkout of ComfyUI")
BLOCKS, CALLS, STEPS = 2, 2, 4  # of the Wan model: self-attention and cross-attention a block


@pytest.fixture(scope="module")
def comfyui():
    """Output of comfyui_host.py."""
    paths = [str(ROOT), str(ROOT / "tests/integrations"), COMFYUI_PATH, *os.environ.get("PYTHONPATH", "").split(":")]
    ran = subprocess.run([sys.executable, ROOT / "tests/integrations/comfyui_host.py", "--cpu",
                          "--use-pytorch-cross-attention"], capture_output=True, text=True,
                         env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))})
    assert ran.returncode == 0, ran.stderr[-3000:]
    return json.loads(ran.stdout)


@needs_comfyui
def test_comfyuis_attention(comfyui):
    cases = comfyui["attention"]
    assert len(cases) == 6
    numbers = cases.pop("mask of numbers")
    assert numbers == {"exact": 0.0, "quantized": 0.0, "report": {"a mask of numbers": 2}}
    for name, case in cases.items():
        assert case["report"] == {"sage_aot": 2} and case["exact"] < 2e-6, name
        assert 1e-4 < case["quantized"] < 0.1, name


@needs_comfyui
def test_comfyuis_sampler_with_its_wan_model(comfyui):
    wan, calls = comfyui["wan"], BLOCKS * CALLS * STEPS
    outside = "a sigma outside of the part of the schedule that is served"
    assert wan["exact report"] == wan["quantized report"] == {"sage_aot": calls}
    assert wan["exact"] < 5e-6 and 1e-4 < wan["quantized"] < 0.1
    assert wan["half of the schedule"] == {"sage_aot": 12, outside: 4}  # the shift leaves one step for the second half
    assert wan["half, then the other"] == {"sage_aot": 16, outside: 12}
    assert wan["dense block, known"] == {"sage_aot": calls // 2, "a dense block": calls // 2}
    assert wan["exact, dense block"] < 5e-6
    assert wan["report of the model itself"] == {} and wan["of the model itself"] == 0 and wan["the model is as before"]


@needs_comfyui
def test_comfyuis_unet_names_its_blocks(comfyui):
    for dense, calls in (("", 0), ("input:1", 2), ("1", 4), ("middle:0, output:0-9", 10)):
        case = comfyui["unet"][dense]
        assert case["report"] == {"sage_aot": 14 - calls, **({"a dense block": calls} if calls else {})}
        assert case["exact"] < 5e-6
