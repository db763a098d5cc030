"""Parse and validate settings: YAML recipes and ``key=value`` overrides → Config, with one-line error messages.

Files written before a setting was renamed can still be read: see ``upgrade``.
"""

from collections.abc import Iterable, Mapping
from importlib import resources
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from secu.base.errors import LONGEST, UserError, nearest, quoted, shortened
from secu.base.yamls import DEEPEST, parse_yaml, read_yaml
from secu.config import Config, Model

RENAMED_KEYS = {
    ("augment", "grey_prob"): "gray_prob",
    ("optim", "mixed_precision"): "precision",
    ("selflabel", "unsure"): "uncertain",
}
RENAMED_VALUES: dict[tuple[str, str], dict[str | bool, str]] = {
    ("augment", "plain"): {"centre": "center"},
    # Without mixed precision, convolutions used TF32, as they do in PyTorch unless that is turned off.
    ("optim", "precision"): {True: "bf16", False: "tf32"},
    ("selflabel", "uncertain"): {"chances": "probabilities"},
}


def recipe_names() -> list[str]:
    """Return the names of the built-in recipes."""
    return sorted(
        p.name.removesuffix(".yaml") for p in resources.files("secu.recipes").iterdir() if p.name.endswith(".yaml")
    )


def load_recipe(name: str) -> dict[str, Any]:
    """Return a recipe's settings; ``name`` is a built-in recipe or the path of a YAML file."""
    if name.endswith((".yaml", ".yml")):
        path = Path(name)
        if not path.is_file():
            raise UserError(f"recipe: no file {name}")
        settings = read_yaml(path, "recipe")
    elif name in recipe_names():
        text = resources.files("secu.recipes").joinpath(f"{name}.yaml").read_text(encoding="utf-8")
        settings = parse_yaml(text, f"recipe: {name}")
    else:
        raise UserError(f"recipe: unknown {name!r}; {nearest(name, recipe_names())}, or the path of a .yaml file")
    if not isinstance(settings, dict):
        held = "nothing" if settings is None else type(settings).__name__
        raise UserError(f"recipe: {name} must hold key: value pairs, got {held}")
    return settings


def parse_overrides(pairs: Iterable[str]) -> dict[str, Any]:
    """Convert ``["optim.lr=0.1", …]`` to nested settings; values are parsed as YAML."""
    settings: dict[str, Any] = {}
    for pair in pairs:
        key, separator, text = pair.partition("=")
        if not separator or not key:
            raise UserError(f"override: {quoted(pair)} must look like key=value, for example optim.lr=0.1")
        value = parse_yaml(text, f"override: {shortened(key)}: the value {quoted(text)}")
        settings = merge(settings, nest(key, value))
    return settings


def nest(key: str, value: Any) -> dict[str, Any]:
    """Convert ``optim.lr`` and a value to ``{"optim": {"lr": value}}``."""
    if key.count(".") >= DEEPEST:
        raise UserError(f"{shortened(key)}: unknown setting; it has more than {DEEPEST} parts")
    for part in reversed(key.split(".")):
        value = {part: value}
    return dict(value)


def merge(base: Mapping[str, Any], change: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``base`` recursively updated with ``change``."""
    merged = dict(base)
    for key, value in change.items():
        both = isinstance(value, Mapping) and isinstance(merged.get(key), Mapping)
        merged[key] = merge(merged[key], value) if both else value
    return merged


def flatten(settings: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Convert nested settings to dotted keys."""
    flat: dict[str, Any] = {}
    for key, value in settings.items():
        flat |= flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat


def resolve(settings: Mapping[str, Any]) -> Config:
    """Validate settings and return a Config; the first error is raised as a one-line ``UserError``."""
    try:
        return Config.model_validate(upgrade(settings))
    except ValidationError as error:
        raise UserError(shortened(_one_line(error), LONGEST)) from None


def upgrade(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings with names and values of earlier versions replaced by current ones."""
    upgraded = {key: dict(value) if isinstance(value, Mapping) else value for key, value in settings.items()}
    for (section, old), new in RENAMED_KEYS.items():
        if old in _mapping(upgraded, section):
            upgraded[section][new] = upgraded[section].pop(old)
    for (section, key), values in RENAMED_VALUES.items():
        value = _mapping(upgraded, section).get(key)
        if isinstance(value, str | bool):
            upgraded[section][key] = values.get(value, value)
    name = _mapping(upgraded, "data").get("name")
    if isinstance(name, str):  # a data set, or "own" where data.source said which images
        del upgraded["data"]["name"]
        if name != "own":
            upgraded["data"]["source"] = f"dataset:{name}"
    if isinstance(upgraded.get("answer"), int):  # the position of the main head
        upgraded["head"] = upgraded.pop("answer")
    if "method" not in upgraded and upgraded.get("selflabel") is not None:
        upgraded["method"] = "selflabel"
    return upgraded


def _mapping(settings: dict[str, Any], section: str) -> dict[str, Any]:
    value = settings.get(section)
    return value if isinstance(value, dict) else {}


def with_shape(config: Config, shape: tuple[int, ...]) -> Config:
    """Return a config with the shape of the inputs filled in where it was left to the data.

    The shape is (channels, height, width) of images, or (D,) of feature vectors.
    """
    if len(shape) == 1:
        return resolve(merge(config.model_dump(), {"data": {"features": shape[0]}}))
    if len(shape) != 3 or shape[1] != shape[2]:
        return config
    stated = config.data.model_dump(include={"image_size", "channels"}, exclude_none=True)
    return resolve(merge(config.model_dump(), {"data": {"channels": shape[0], "image_size": shape[1], **stated}}))


def load_config(recipe: str, overrides: Iterable[str] = ()) -> Config:
    """Read a recipe, apply the overrides and validate the result."""
    settings = upgrade(load_recipe(recipe))  # before merging, so that overrides win under old and new names
    return resolve(merge(settings, parse_overrides(overrides)))


def _one_line(error: ValidationError) -> str:
    first = error.errors()[0]
    path = [str(part) for part in first["loc"]]
    key = ".".join(path)
    if first["type"] == "extra_forbidden":
        model: Any = Config
        for part in path[:-1]:
            model = _section(model, part)
        return f"{key}: unknown setting; {nearest(path[-1], model.model_fields)}"
    if first["type"] == "value_error":
        return str(first["ctx"]["error"])
    plain = {"tuple_type": "input should be a list in [brackets]", "model_type": f"input should be {key}.SETTING=VALUE"}
    message = plain.get(first["type"], first["msg"])
    return f"{key}: {quoted(first['input'])}: {message[0].lower()}{message[1:]}"


def _section(model: type[Model], name: str) -> type[Model]:
    annotation: Any = model.model_fields[name].annotation
    candidates = [annotation, *getattr(annotation, "__args__", ())]
    return next(c for c in candidates if isinstance(c, type) and issubclass(c, Model))
