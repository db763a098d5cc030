"""Content + template + style + scripts → one HTML file that asks nobody for anything.

Nothing that comes from outside (file names, titles, warnings) is ever markup: the template escapes what it prints, the
scripts only set text, and in the embedded JSON no ``<`` is left that could end the script element. The page forbids
itself every request, and every script and style but its own two, by a Content-Security-Policy.
"""

import base64
import hashlib
import json
import re
from importlib import resources
from pathlib import Path
from typing import Any

import yaml
from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from secu.config import Config
from secu.files import write_text
from secu.report.build import content, summarize
from secu.report.data import ReportData
from secu.report.thumbnails import LEVELS, make_sheets

BUDGET = 9_500_000  # bytes of the whole file
LEAST = 400_000  # bytes that are left to the pictures even where names of monstrous length take all of that
NAMES = 4_000_000  # bytes up to which the page holds the name of every image, for the download
FEW_PIXELS = 20  # of a picture that is all there is: up to that each one is shown as a square
PARTS = ("base", "edits", "download", "pictures", "cards", "map", "explore", "charts", "truth", "app")  # in this order
SCRIPTS = tuple(f"{name}.js" for name in PARTS)
UNSAFE = {ord(sign): f"\\u{ord(sign):04x}" for sign in "<>&\u2028\u2029"}


def write_report(path: Path, data: ReportData) -> None:
    """Write the report of a run, atomically."""
    write_text(path, render(data))


def render(data: ReportData) -> str:
    """Return the whole page."""
    style, script = asset("style.css"), bundle()
    page = content(data)
    if len(to_json([page["ids"], page["cluster"]]).encode()) > NAMES:
        page["ids"] = page["cluster"] = None
    used = len(style) + len(script) + len(to_json(page).encode())
    cards, points = page["pictures"]["index"][: page["onCards"]], page["pictures"]["index"][page["onCards"] :]
    budget = max(BUDGET - used, LEAST) * 3 // 4  # base64 makes four bytes of three
    on_cards, on_map, level = make_sheets(data.images, cards, points, budget)
    page["pixelated"] = level is LEVELS[0] and on_cards.width <= FEW_PIXELS
    page["sheets"] = [on_cards.payload(), on_map.payload()]
    template = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    return template.from_string(asset("template.html.j2")).render(
        **overview(data),
        policy=policy(style, script),
        style=Markup(style),
        script=Markup(script),
        content=Markup(to_json(page)),
    )


def overview(data: ReportData) -> dict[str, Any]:
    """Return what the template prints itself."""
    return {
        "title": printable(data.title),
        "summary": summarize(data),
        "warnings": [printable(warning) for warning in data.warnings],
        "facts": {printable(key): printable(str(value)) for key, value in data.facts.items()},
        "settings": settings(data.config),
        "config": printable(yaml.safe_dump(data.config.model_dump(mode="json"), sort_keys=False, allow_unicode=True)),
        "scores": data.scores,
        "seconds": duration(data.metrics[-1].get("seconds")) if data.metrics else None,
        "has_truth": data.targets is not None and bool((data.targets >= 0).any()),
    }


def settings(config: Config) -> dict[str, str]:
    """Say in plain words how the run was set up."""
    optim, constraint = config.optim, config.constraint
    balance = {
        "none": "groups may be of any size",
        "size": f"groups held at {constraint.lower:.0%} of an equal share or more",
        "entropy": "groups are drawn towards equal sizes",
    }[constraint.kind]
    if constraint.kind == "size" and constraint.upper is not None:
        balance += f", none over {constraint.upper:.0%}"
    return {
        "Clusters asked for": f"{config.heads[0]:,}",
        "Balance": balance,
        "Network": config.encoder.backbone,
        "Rounds through all pictures": f"{optim.total_epochs:,}",
        "Pictures at a time": f"{optim.batch_size:,}",
        "Learning rate": f"{optim.lr:g}",
        "Random seed": str(config.seed),
    }


def duration(seconds: float | None) -> str | None:
    """Return a time as people say it."""
    if seconds is None:
        return None
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes, hours = seconds / 60, seconds / 3600
    return f"{minutes:.0f} min" if minutes < 90 else f"{hours:.1f} h"


def asset(name: str) -> str:
    """Return a file of this package; its line ends as the browser will count them for the hash."""
    text = resources.files("secu.report").joinpath(name).read_text(encoding="utf-8")
    return text.replace("\r\n", "\n")


def bundle() -> str:
    """Return all scripts as one, in a scope of their own."""
    return '(() => {\n"use strict";\n' + "\n".join(asset(name) for name in SCRIPTS) + "})();\n"


def policy(style: str, script: str) -> str:
    """Allow this style, this script and pictures inside the file; nothing else, and no request at all."""

    def source(text: str) -> str:
        return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode('ascii')}'"

    rules = ("default-src 'none'", "img-src data:", "base-uri 'none'", "form-action 'none'")
    return "; ".join((*rules, f"style-src {source(style)}", f"script-src {source(script)}"))


def to_json(value: Any) -> str:
    """Return JSON that can stand inside a script element whatever text is in it."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).translate(UNSAFE)
    # Names that are not valid UTF-8 reach Python as lone surrogates, which no file can hold but JSON can spell.
    return re.sub("[\ud800-\udfff]", lambda match: f"\\u{ord(match[0]):04x}", text)


def printable(text: str) -> str:
    """Return text that can be written as UTF-8."""
    return text.encode("utf-8", "replace").decode("utf-8")
