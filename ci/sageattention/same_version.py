"""The dependency of this distribution, on sage-aot of the same version; hatchling loads this file by its path."""

from __future__ import annotations

from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface


class SameVersion(MetadataHookInterface):
    """Writes the dependency next to the version, which hatchling has read by then."""

    def update(self, metadata: dict[str, Any]) -> None:
        metadata["dependencies"] = [f"sage-aot=={metadata['version']}"]
