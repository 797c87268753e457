"""The folders and files of a source tree. The functions of codegen take a Project, so that tests can make their own."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
"""The folder that holds codegen/ and sage_aot/."""


@dataclass(frozen=True)
class Project:
    """The folders of one source tree, and the folder for intermediate files; all paths are absolute."""

    root: Path
    build: Path

    @property
    def matrix(self) -> Path:
        return self.root / "build_matrix.yaml"

    @property
    def templates(self) -> Path:
        return self.root / "templates"

    @property
    def include(self) -> Path:
        return self.templates / "include"

    @property
    def golden(self) -> Path:
        return self.root / "tests" / "golden"

    @property
    def instructions(self) -> Path:
        return self.root / "docs" / "instructions.md"

    @property
    def package(self) -> Path:
        """Folder of the kernels that the wheel ships."""
        return self.root / "sage_aot" / "kernels"

    @property
    def sources(self) -> Path:
        """Folder of the rendered sources."""
        return self.build / "gen"
