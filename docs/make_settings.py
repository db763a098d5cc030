"""Generate docs/settings.md, the settings reference, from src/secu/config.py.

    python docs/make_settings.py

Names, types and defaults come from the models. The description of a setting is the trailing comment of its field, and
that of a section is the docstring of its class. tests/test_docs.py fails if the page is out of date.
"""

import ast
import inspect
import io
import json
import tokenize
from collections.abc import Iterable
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic import AfterValidator
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from secu import config
from secu.config import Config, Model
from secu.registry import Registry

PAGE = Path(__file__).parent / "settings.md"
INTRODUCTION = """\
# Settings

<!-- Made by docs/make_settings.py from src/secu/config.py. Do not edit: change the comments there and run it again. -->

This page lists every setting of a run, its type and its default. A recipe states only what differs from these
defaults; `secu fit` chooses some of them by [rules](defaults.md), and `secu selflabel` by its own rules.

Change a setting on the command line with `key=value`, where the key is the section and the name joined by a dot:

```
secu train cifar10 optim.epochs=200 constraint.kind=entropy
secu fit photos --clusters 8 data.image_size=64
```

Values are read as YAML: lists are in brackets (`heads=[10,20]`), and `null` means `None`. In Python, pass a
dictionary: `SeCu(settings={"optim.lr": 0.1})`. An unknown key or an impossible value is an error that names what would
be valid. `secu recipes NAME` prints a recipe with all of its settings, and every run stores its own in `config.yaml`.

A symbol in brackets, such as [γ], is the paper's name for the setting.
"""
SIGNS = {Ge: "≥", Gt: ">", Le: "≤", Lt: "<"}


def make_page() -> str:
    """Return the text of the page."""
    comments = read_comments()
    parts = [INTRODUCTION, *make_section("", Config, comments, title="Top level")]
    for prefix, model in sections(Config):
        parts += make_section(prefix, model, comments, title=f"`{prefix}`")
    return "\n".join(parts)


def sections(model: type[Model], prefix: str = "") -> list[tuple[str, type[Model]]]:
    """Return the sections below a model with their dotted names, each followed by its own sections."""
    found = []
    for name, field in model.model_fields.items():
        if inner := section_of(field):
            found.append((f"{prefix}{name}", inner))
            found += sections(inner, f"{prefix}{name}.")
    return found


def section_of(field: FieldInfo) -> type[Model] | None:
    """Return the model that a field holds, if it is a section."""
    candidates = [field.annotation, *get_args(field.annotation)]
    return next((c for c in candidates if isinstance(c, type) and issubclass(c, Model)), None)


def make_section(prefix: str, model: type[Model], comments: dict[tuple[str, str], str], title: str) -> list[str]:
    """Return the lines of one section: heading, docstring and table."""
    lines = [f"## {title}", "", *inspect.getdoc(model).replace("``", "`").splitlines(), ""]
    if prefix.startswith("paper"):
        return [*lines, f"Settings: {', '.join(f'`{prefix}.{name}`' for name in model.model_fields)}.", ""]
    lines += ["| setting | type | default | description |", "|---|---|---|---|"]
    for name, field in model.model_fields.items():
        key = f"{prefix}.{name}" if prefix else name
        description = comments.get((model.__name__, name), "").replace("None:", "`null`:")
        if section_of(field):
            link = f"see [`{key}`](#{key.replace('.', '')})"
            description = f"{description}; {link}" if description else link
            if field.default is not None:
                continue  # its own section says all there is
            lines.append(f"| `{key}` | section | `null` | {description} |")
            continue
        cells = (f"`{key}`", type_of(field), default_of(field), description)
        lines.append(f"| {' | '.join(cell.replace('|', '&#124;') for cell in cells)} |")
    return [*lines, ""]


def type_of(field: FieldInfo) -> str:
    """Return the type of a setting in words, with the bounds of a number or the valid values."""
    words = words_of(field.annotation)
    for part in field.metadata:
        if isinstance(part, AfterValidator):  # a name that a registry knows
            words = f"one of {in_code(built_in(part.func.__self__))}"  # type: ignore[attr-defined]
    bounds = [f"{SIGNS[type(part)]} {number(value_of(part))}" for part in field.metadata if type(part) in SIGNS]
    if not bounds:
        return words
    base, _, rest = words.partition(" or ")
    bounded = f"{base} {' and '.join(bounds)}"
    return f"{bounded}, or {rest}" if rest else bounded


def built_in(registry: Registry) -> list[str]:
    """Return the names of the parts that come with the package; other code may have added more."""
    modules = {name: part if isinstance(part, str) else part.__module__ for name, part in registry._parts.items()}
    return [name for name, module in modules.items() if module.startswith("secu.")]


def value_of(bound: Ge | Gt | Le | Lt) -> Any:
    """Return the one value that a bound holds."""
    return getattr(bound, type(bound).__name__.lower())


def in_code(values: Iterable[object]) -> str:
    """Return values as a list in code font."""
    return ", ".join(f"`{value}`" for value in values)


def words_of(annotation: Any) -> str:
    """Return a type annotation in words."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return f"one of {in_code(arguments)}"
    if origin in (Union, UnionType):
        return " or ".join("`null`" if part is type(None) else words_of(part) for part in arguments)
    if origin is tuple and arguments[-1] is Ellipsis:
        return f"list of {words_of(arguments[0])}s"
    if origin is tuple:
        return f"list of {len(arguments)} {words_of(arguments[0])}s"
    return {int: "integer", float: "number", str: "text", bool: "`true` or `false`"}[annotation]


def default_of(field: FieldInfo) -> str:
    """Return a default as it would be written in YAML."""
    if field.default is PydanticUndefined:
        return "required"
    if isinstance(field.default, str):
        return f"`{field.default}`" if field.default else "empty"
    if isinstance(field.default, float):
        return f"`{number(field.default)}`"
    return f"`{json.dumps(field.default)}`"


def number(value: float) -> str:
    """Return a number in few digits; large powers of two as such."""
    if isinstance(value, int) and value >= 2**20 and value.bit_count() == 1:
        return f"2^{value.bit_length() - 1}"
    return f"{value:.6g}"


def read_comments() -> dict[tuple[str, str], str]:
    """Return the comment behind each field of each class in config.py."""
    source = inspect.getsource(config)
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    by_line = {token.start[0]: token.string.lstrip("# ") for token in tokens if token.type == tokenize.COMMENT}
    found = {}
    for owner in (node for node in ast.parse(source).body if isinstance(node, ast.ClassDef)):
        for field in (node for node in owner.body if isinstance(node, ast.AnnAssign)):
            if comment := by_line.get(field.end_lineno):
                found[owner.name, ast.unparse(field.target)] = comment
    return found


if __name__ == "__main__":
    PAGE.write_text(make_page(), encoding="utf-8")
