"""Prints the requirements of an extra, to install them without the package: python ci/extra.py codegen"""

import sys
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib

    settings = tomllib.loads((Path(__file__).resolve().parent.parent / "pyproject.toml").read_text("utf-8"))
    print(*settings["project"]["optional-dependencies"][sys.argv[1]])
else:
    sys.exit(f"expected Python 3.11 or later, which reads TOML, got {sys.version.split()[0]}: use another Python")
