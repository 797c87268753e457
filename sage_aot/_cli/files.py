"""Checks of the files that commands write, before the work whose results they are to hold."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from sage_aot.errors import ArgumentError


def check_file(command: str, file: str) -> None:
    """Raise ArgumentError for a file that cannot be made where it is to be."""
    if Path(file).is_dir() or not Path(file).absolute().parent.is_dir():
        raise ArgumentError(f"{command}: expected a file in a folder that exists, got {file}")


def check_picture(command: str, file: str) -> None:
    """Raise ArgumentError likewise, and for a suffix of no format that matplotlib, where it is installed, writes."""
    check_file(command, file)
    suffix = Path(file).suffix.removeprefix(".").lower()
    if find_spec("matplotlib") is None or not suffix:  # matplotlib adds one
        return
    from matplotlib.backend_bases import FigureCanvasBase

    if suffix not in FigureCanvasBase.get_supported_filetypes():
        raise ArgumentError(f"{command}: expected a picture of a format that matplotlib writes, got {file}; name it "
                            f"{Path(file).with_suffix('.png')}")
