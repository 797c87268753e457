"""Work that waits until another package is imported."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


def when_imported(name: str, work: Callable[[], object]) -> None:
    """Do `work` now where the module `name` is imported, else right after its import; never import it."""
    if sys.modules.get(name) is not None:
        work()
    else:
        sys.meta_path.insert(0, _Finder(name, work))


def is_being_imported(*packages: str) -> bool:
    """True where a module of these packages is half imported: an import of it would find half of its names."""
    return any(getattr(getattr(module, "__spec__", None), "_initializing", False)
               for name, module in [*sys.modules.items()] if name.startswith(packages))


class _Finder(MetaPathFinder):
    """Finds the module through the finders behind it, and sees it loaded."""

    def __init__(self, name: str, work: Callable[[], object]) -> None:
        self._name, self._work = name, work

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
                  ) -> ModuleSpec | None:
        finders = [*sys.meta_path]
        if fullname != self._name or self not in finders:
            return None
        # Behind it alone: another build of this package may have a finder of its own in front, which asks this one.
        behind = (finder for finder in finders[finders.index(self) + 1:] if hasattr(finder, "find_spec"))
        spec = next(filter(None, (finder.find_spec(fullname, path, target) for finder in behind)), None)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, self._loaded)
        return spec

    def _loaded(self) -> None:
        if self in sys.meta_path:
            sys.meta_path.remove(self)
            self._work()


class _Loader(Loader):
    """A module's loader, in whose place it stands until the module is there."""

    def __init__(self, loader: Any, loaded: Callable[[], None]) -> None:
        self._loader, self._loaded = loader, loaded

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        made: ModuleType | None = self._loader.create_module(spec)
        return made

    def exec_module(self, module: ModuleType) -> None:
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        module.__loader__ = self._loader
        self._loader.exec_module(module)
        self._loaded()
