"""Prints the requirements of an extra, to install them without the package: python ci/extra.py codegen"""

import sys
import tomllib
from pathlib import Path

settings = tomllib.loads((Path(__file__).resolve().parent.parent / "pyproject.toml").read_text())
print(*settings["project"]["optional-dependencies"][sys.argv[1]])
