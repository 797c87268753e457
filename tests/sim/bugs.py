"""Every planted bug: those of mutations.py in the order of their tests, and what each kernel is compiled with."""

from __future__ import annotations

from collections import defaultdict

from drawn import drawn, variants_of
from mutations import MUTATIONS
from schemata import Bug

SWITCHED: dict[str, list[Bug]] = defaultdict(list)
"""Per variant the bugs that its kernels are compiled with, all at once."""

for _mutation in MUTATIONS:
    if _mutation.bug.can_be_switched:
        SWITCHED[_mutation.variant].append(_mutation.bug)
for _bug in drawn():
    for _name in variants_of(_bug):
        SWITCHED[_name].append(_bug)

IN_TURN = sorted(MUTATIONS, key=lambda mutation: [
    other for other in MUTATIONS if other.variant == mutation.variant].index(mutation))
"""The first of each variant, then the second: so the workers compile different variants."""

TESTS = len(IN_TURN) + len(drawn()) + len(SWITCHED)
"""Number of tests that are marked `planted`."""
