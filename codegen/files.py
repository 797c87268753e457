"""Writing files atomically, and with a new time for ninja only where the content is new."""

from __future__ import annotations

import os
import secrets
from pathlib import Path


def write_atomic(path: Path, data: bytes) -> None:
    """Write a file in one step: readers see the old bytes or all the new ones."""
    partial = path.with_name(f"{path.name}.{secrets.token_hex(8)}.tmp")
    partial.write_bytes(data)
    os.replace(partial, path)


def write_if_changed(path: Path, data: bytes) -> bool:
    """Write a file unless it holds these bytes already; return whether it was written."""
    if path.is_file() and path.read_bytes() == data:
        return False
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, data)
    return True
