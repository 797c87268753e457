"""Reading YAML such that every complaint has its line, and all complaints are reported.

yaml.compose keeps the line of every node, and both entries of a key that stands twice. yaml.safe_load drops the lines
and takes the last entry silently.
"""

from __future__ import annotations

import yaml


class YamlReader:
    """Reads nodes and collects complaints. A node that cannot be read gives an empty result or None."""

    def __init__(self, file_name: str) -> None:
        self.file_name = file_name
        self._problems: list[tuple[int, str]] = []

    @property
    def problems(self) -> list[str]:
        """All complaints, in the order of the file."""
        return [f"{self.file_name}:{line}: {text}" for line, text in sorted(self._problems)]

    def complain(self, line: int, text: str) -> None:
        self._problems.append((line, text))

    def document(self, text: str) -> yaml.Node | None:
        try:
            return yaml.compose(text, yaml.SafeLoader)
        except yaml.MarkedYAMLError as error:
            line = error.problem_mark.line + 1 if error.problem_mark else 1
            self.complain(line, f"expected YAML, got an error: {error.problem}")
        except yaml.YAMLError as error:  # a character that YAML forbids
            self.complain(1, f"expected YAML, got an error: {error}")
        return None

    def mapping(self, node: yaml.Node, what: str, required: tuple[str, ...],
                optional: tuple[str, ...] = ()) -> dict[str, yaml.Node]:
        """The entries of a mapping with known keys. Complains about unknown, repeated and missing keys."""
        if not isinstance(node, yaml.MappingNode):
            self.complain(line_of(node), f"expected {what} as a mapping, got {_show(node)}")
            return {}
        entries: dict[str, yaml.Node] = {}
        for key, value in node.value:
            name = str(key.value)
            if name not in required + optional:
                self.complain(line_of(key), f"expected a key of {what} ({', '.join(required + optional)}), "
                                            f"got {name!r}")
            elif name in entries:
                self.complain(line_of(key), f"expected the key {name!r} once in {what}, got it twice")
            else:
                entries[name] = value
        for name in required:
            if name not in entries:
                self.complain(line_of(node), f"expected the key {name!r} in {what}, got none")
        return entries

    def named_mappings(self, node: yaml.Node, what: str) -> dict[str, yaml.Node]:
        """The entries of a mapping whose keys may be any names."""
        names = tuple(str(key.value) for key, _ in node.value) if isinstance(node, yaml.MappingNode) else ()
        return self.mapping(node, what, (), tuple(dict.fromkeys(names)))

    def items(self, node: yaml.Node, what: str) -> list[yaml.Node]:
        if not isinstance(node, yaml.SequenceNode):
            self.complain(line_of(node), f"expected {what} as a list, got {_show(node)}")
            return []
        return list(node.value)

    def scalar(self, node: yaml.Node) -> object:
        """A string, number or truth value; None, with a complaint, for everything else."""
        if isinstance(node, yaml.ScalarNode):
            try:
                value = yaml.constructor.SafeConstructor().construct_object(node)
            except (yaml.MarkedYAMLError, ValueError):
                value = None
            if isinstance(value, (str, int, float)):
                return value
        self.complain(line_of(node), f"expected a single value, got {_show(node)}")
        return None

    def scalars(self, node: yaml.Node) -> list[tuple[int, object]]:
        """One value or a list of them, each with its line; values that stand twice are complained about."""
        nodes = node.value if isinstance(node, yaml.SequenceNode) else [node]
        if not nodes:
            self.complain(line_of(node), "expected one value or more, got an empty list")
        found: list[tuple[int, object]] = []
        for item in nodes:
            value = self.scalar(item)
            if value in [other for _, other in found]:
                self.complain(line_of(item), f"expected each value once, got {value!r} twice")
            elif value is not None:
                found.append((line_of(item), value))
        return found

    def sentence(self, node: yaml.Node, what: str) -> str | None:
        value = self.scalar(node)
        if isinstance(value, str) and value.strip():
            return value
        if value is not None:
            self.complain(line_of(node), f"expected {what} as a sentence, got {value!r}")
        return None


def line_of(node: yaml.Node) -> int:
    """The line a node starts on, counted from 1."""
    return node.start_mark.line + 1


def _show(node: yaml.Node) -> str:
    if isinstance(node, yaml.ScalarNode):
        return repr(node.value) if node.value else "nothing"
    return "a list" if isinstance(node, yaml.SequenceNode) else "a mapping"
