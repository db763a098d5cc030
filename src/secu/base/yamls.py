"""Read YAML that may come from anyone: its size, its depth and what its aliases expand to are bounded."""

from pathlib import Path
from typing import Any

import yaml

from secu.base.errors import UserError, shortened

LARGEST = 100_000  # characters of a text, and of what it stands for once its aliases are replaced
DEEPEST = 20  # levels of nesting; settings have three
MOST_DIGITS = 100  # of a whole number


def read_yaml(path: Path, what: str) -> Any:
    """Return the content of a YAML file; ``what`` begins the message of an error, for example ``recipe``."""
    try:
        with path.open(encoding="utf-8") as file:
            text = file.read(LARGEST + 1)
    except UnicodeDecodeError:
        raise UserError(f"{what}: {path} is not a text file, so it is not valid YAML") from None
    except OSError as error:
        raise UserError(f"{what}: cannot read {path}: {error.strerror}") from None
    return parse_yaml(text, f"{what}: {path}")


def parse_yaml(text: str, name: str) -> Any:
    """Return the value of a YAML text; ``name`` begins the message of an error."""
    try:
        if len(text) > LARGEST:
            raise yaml.YAMLError(f"longer than {LARGEST:,} characters")
        return yaml.load(text, _Loader)
    except (yaml.YAMLError, ValueError) as error:  # ValueError: 2024-13-45, !!int x
        raise UserError(f"{name} is not valid YAML: {shortened(' '.join(str(error).split()))}") from None
    except (AttributeError, LookupError, TypeError):  # !!timestamp x, !!bool x, !!int without a number
        raise UserError(f"{name} is not valid YAML: a value does not have the type that is stated for it") from None


class _Loader(yaml.SafeLoader):
    """A loader that refuses repeated keys, deep nesting, and aliases that expand to too much."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.level = 0
        self.extents: dict[yaml.Node, tuple[int, int]] = {}  # of finished nodes: size and depth, aliases replaced

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """Return the next node: the parent's method, bounded."""
        self.level += 1
        if self.level > DEEPEST:
            raise yaml.YAMLError(f"nested more than {DEEPEST} levels deep")
        is_alias = self.check_event(yaml.AliasEvent)
        node = super().compose_node(parent, index)
        self.level -= 1
        assert node is not None
        if not is_alias:
            self.extents[node] = self._extent(node)
        elif node not in self.extents:
            raise yaml.YAMLError("an alias refers to a value that contains it")
        return node

    def _extent(self, node: yaml.Node) -> tuple[int, int]:
        """Return the number of characters and nodes that a node stands for, and its depth."""
        if isinstance(node, yaml.ScalarNode):
            return 1 + len(node.value), 1
        children = node.value
        if isinstance(node, yaml.MappingNode):
            _require_unique([key for key, _ in node.value])
            children = [child for pair in node.value for child in pair]
        size = 1 + sum(self.extents[child][0] for child in children)
        depth = 1 + max((self.extents[child][1] for child in children), default=0)
        if size > LARGEST or depth > DEEPEST:
            raise yaml.YAMLError(f"its aliases expand to more than {LARGEST:,} characters or {DEEPEST} levels")
        return size, depth

    def construct_yaml_int(self, node: yaml.ScalarNode) -> int:
        """Return a whole number; Python cannot print those of thousands of digits."""
        number: int = super().construct_yaml_int(node)
        if abs(number) >= 10**MOST_DIGITS:
            raise yaml.YAMLError(f"a whole number of more than {MOST_DIGITS} digits")
        return number


_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.construct_yaml_int)


def _require_unique(keys: list[yaml.Node]) -> None:
    seen: set[tuple[str, str]] = set()
    for key in keys:
        if isinstance(key, yaml.ScalarNode):
            if (key.tag, key.value) in seen:
                raise yaml.YAMLError(f"the key {key.value!r} appears twice")
            seen.add((key.tag, key.value))
