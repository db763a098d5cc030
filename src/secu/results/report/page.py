"""Assemble content, template, style and scripts into one HTML file that makes no requests.

External text (file names, titles, warnings) never becomes markup: the template escapes all output, the scripts only set
text, and the embedded JSON contains no ``<`` that could end the script element. A Content-Security-Policy forbids all
requests, and all scripts and styles except the page's own.
"""

import base64
import hashlib
import json
import re
from importlib import resources
from typing import Any

import yaml
from jinja2 import Environment, FunctionLoader, StrictUndefined
from markupsafe import Markup

from secu.base.names import escape_text, printable
from secu.config import Config
from secu.results.pictures import Pictures
from secu.results.report.build import ReportData, content, summarize
from secu.results.report.limits import LONGEST_CONFIG, LONGEST_TEXT, MOST_WARNINGS, shorten
from secu.results.report.thumbnails import LEVELS, make_sheets
from secu.results.report.truth import has_truth

BUDGET = 9_500_000  # maximum size of the file in bytes
LEAST = 2_500_000  # bytes reserved for pictures
NAMES = 4_000_000  # maximum total size in bytes for embedding the names of all images, for the download
MARGIN = 300_000  # bytes for the template, with a title, warnings and facts
FEW_PIXELS = 20  # maximum width at which pixels are drawn as squares
STYLES = ("base.css", "sections.css", "tree.css", "duplicates.css")
_PARTS = """
    base units edits cut download pictures cards filter compare map
    explore dots branches levels charts truth duplicates app
"""
SCRIPTS = [f"{name}.js" for name in _PARTS.split()]  # in this order
UNSAFE = {ord(character): f"\\u{ord(character):04x}" for character in "<>&\u2028\u2029"}


class Report:
    """A page with its content, but without pixels."""

    def __init__(self, data: ReportData) -> None:
        self.data = data
        self.content = content(data)  # for the scripts
        shown: list[int] = self.content["pictures"]["index"]
        self.on_cards = shown[: self.content["onCards"]]
        self.on_map = shown[self.content["onCards"] :]  # but not on cards

    def render(self, pictures: Pictures) -> str:
        """Return the page; ``pictures`` contains the images on cards (large) and those only on the map (small)."""
        style = "".join(asset(name) for name in STYLES)
        script = bundle()
        shown = dict(self.content)
        described = overview(self.data)
        table = {name: shown.pop(name) for name in ("ids", "cluster", "leaf")}
        parts = (style, script, to_json(shown), to_json(described["config"]))
        used = sum(len(part.encode()) for part in parts) + MARGIN
        most = min(NAMES, BUDGET - LEAST - used)
        long = sum(map(len, table["ids"])) > most  # encoding it only to measure it would take very long
        size = most + 1 if long else len(to_json(table).encode())
        shown |= table if size <= most else dict.fromkeys(table)
        used += size if size <= most else 0
        budget = max(BUDGET - used, LEAST) * 3 // 4  # base64 turns three bytes into four
        on_cards, on_map, level = make_sheets(pictures, self.on_cards, self.on_map, budget)
        shown["pixelated"] = level is LEVELS[0] and on_cards.width <= FEW_PIXELS
        shown["sheets"] = [on_cards.payload(), on_map.payload()]
        templates = Environment(
            loader=FunctionLoader(asset),
            autoescape=True,
            undefined=StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        return templates.get_template("template.html.j2").render(
            **described,
            policy=policy(style, script),
            style=Markup(style),
            script=Markup(script),
            content=Markup(to_json(shown)),
        )


def overview(data: ReportData) -> dict[str, Any]:
    """Return the values that the template prints."""
    config = yaml.safe_dump(data.config.model_dump(mode="json"), sort_keys=False, allow_unicode=True)
    return {
        "title": text_of(data.title),
        "summary": summarize(data.results),
        "warnings": [text_of(warning) for warning in data.warnings[:MOST_WARNINGS]],
        "number": [text_of(reason) for reason in data.number[:MOST_WARNINGS]],
        "facts": {text_of(key): text_of(value) for key, value in data.facts.items()},
        "settings": settings(data.config),
        "config": shorten(escape_text(config), LONGEST_CONFIG),
        "scores": data.results.scores,
        "seconds": duration(data.metrics[-1].get("seconds")) if data.metrics else None,
        "has_truth": has_truth(data.results),
        "duplicates": data.results.duplicates,
        "has_tree": data.results.leaves is not None,
    }


def text_of(value: str) -> str:
    """Return a text of bounded length that can be encoded."""
    return shorten(printable(str(value)), LONGEST_TEXT)


def settings(config: Config) -> dict[str, str]:
    """Return the most important settings in plain language."""
    return {
        "Clusters": f"{config.clusters:,}",
        "Balance": balance(config),
        "Network": config.encoder.backbone + (", not trained" if config.encoder.trainable == "nothing" else ""),
        "Epochs": f"{config.optim.total_epochs:,}",
        "Batch size": f"{config.optim.batch_size:,}",
        "Learning rate": f"{config.optim.lr:g}",
        "Random seed": str(config.seed),
    }


def balance(config: Config) -> str:
    """Describe the constraint on cluster sizes in plain language."""
    constraint = config.constraint
    if config.answer == "tree":
        return "clusters may be of any size: they are merged from smaller ones"
    if config.answer == "shifted":
        return "clusters may differ in size: their borders follow the neighbors of the images"
    if constraint.kind == "size":
        at_least = f"every cluster has at least {constraint.lower:.0%} of an equal share"
        return at_least if constraint.upper is None else f"{at_least} and at most {constraint.upper:.0%}"
    known = {"none": "clusters may be of any size", "entropy": "clusters are encouraged to be equal in size"}
    return known.get(constraint.kind, constraint.kind)


def duration(seconds: float | None) -> str | None:
    """Format a duration in a suitable unit."""
    if seconds is None:
        return None
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes = seconds / 60
    return f"{minutes:.0f} min" if minutes < 90 else f"{seconds / 3600:.1f} h"


def asset(name: str) -> str:
    """Return the text of a file in this package, with line endings normalized as the browser does before hashing."""
    text = resources.files("secu.results.report").joinpath(name).read_text(encoding="utf-8")
    return text.replace("\r\n", "\n")


def bundle() -> str:
    """Return all scripts combined into one, in their own scope."""
    return '(() => {\n"use strict";\n' + "\n".join(asset(name) for name in SCRIPTS) + "})();\n"


def policy(style: str, script: str) -> str:
    """Return a policy that allows this style, this script and embedded pictures, and no requests."""

    def source(text: str) -> str:
        return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode('ascii')}'"

    rules = ("default-src 'none'", "img-src data:", "base-uri 'none'", "form-action 'none'")
    return "; ".join((*rules, f"style-src {source(style)}", f"script-src {source(script)}"))


def to_json(value: Any) -> str:
    """Return JSON that is safe inside a script element."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).translate(UNSAFE)
    # Names that are not valid UTF-8 contain lone surrogates, which cannot be encoded, but can be escaped in JSON.
    return re.sub("[\ud800-\udfff]", lambda match: f"\\u{ord(match[0]):04x}", text)
