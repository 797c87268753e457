"""Keys that a query row sees, against lists written by hand; both references that read them, against torch's SDPA."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from sage_aot._problem.mask import Mask, rows_see_alike
from sage_aot._problem.options import Options
from sage_aot._tools import reference

SEEN = {
    ((3, 3), False): ["111", "111", "111"],
    ((3, 3), True): ["100", "110", "111"],
    ((2, 4), True): ["1110", "1111"],
    ((4, 2), True): ["00", "00", "10", "11"],
    ((1, 1), True): ["1"],
}
"""Keys that each row sees, by queries and keys, and whether causal."""


@pytest.mark.parametrize(("lengths", "is_causal"), SEEN)
def test_a_row_sees_these_keys(lengths, is_causal):
    queries, keys = lengths
    visible = Mask(is_causal).visible_keys(torch.arange(queries), queries, keys)
    seen = visible.contains(torch.arange(keys))
    assert ["".join(str(int(x)) for x in row) for row in seen] == SEEN[lengths, is_causal]
    assert visible.none.tolist() == [not row.any() for row in seen]
    assert visible.contains(torch.arange(1, keys)).tolist() == seen[:, 1:].tolist()


def test_a_mask_takes_the_options_of_a_call():
    assert Mask.of(Options(is_causal=True)) == Mask(is_causal=True) and Mask.of(Options()) == Mask()


def test_a_reference_refuses_what_is_no_part_of_a_mask():
    q = torch.randn(1, 1, 3, 8)
    with pytest.raises(TypeError, match="causal"):
        reference.attention(q, q, q, causal=True)


@pytest.mark.parametrize("is_causal", [False, True])
def test_a_reference_is_what_torch_computes(is_causal):
    q, k, v = torch.randn(3, 1, 2, 33, 8, dtype=torch.float64)
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=is_causal)
    torch.testing.assert_close(reference.attention(q, k, v, is_causal=is_causal)[0], expected)


def test_rows_do_not_see_alike_where_any_option_hides_keys():
    """A new field of Mask needs a value here."""
    hiding = {"is_causal": True, "window": (3, 3)}
    assert hiding.keys() == {field.name for field in dataclasses.fields(Mask)}
    assert rows_see_alike(Mask())
    for name, value in hiding.items():
        assert not rows_see_alike(Mask(**{name: value})), name
