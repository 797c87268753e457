"""Facts about a run of pytest that its conftest.py files share: how it was asked, and the lines that it ends with."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

LINES = pytest.StashKey[list[str]]()
"""Key of the configuration's stash: lines for the end of the session, from the process that ran the tests."""


def asked_by_name(config: pytest.Config) -> bool:
    """True where the command line asks for tests by more than their folder: by -m, -k or the file."""
    return names_tests(config.option.markexpr, config.option.keyword, config.args)


def names_tests(mark: str, keyword: str, arguments: Iterable[str]) -> bool:
    return bool(mark or keyword or any(argument.split("::")[0].endswith(".py") for argument in arguments))
