"""Errors that stop code generation. :mod:`codegen.cli` prints their messages; any other exception is a bug."""

from __future__ import annotations

INSTALL = "install what code generation needs: pip install -e '.[codegen]'"
"""Advice for errors where a tool is missing or of another version; pyproject.toml has the versions."""


class UsageError(ValueError):
    """The caller asked for something that does not exist; exit status 2."""


class MatrixError(UsageError):
    """Everything that is wrong with a build matrix, one sentence with a line number each."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


class BuildError(RuntimeError):
    """The sources do not build, or what they build into may not be shipped; exit status 1."""
