"""Label Studio: tasks whose predictions are the clusters, the labeling interface, and the pictures.

Label Studio serves local files below its document root, here the folder in which the export lies.
"""

import json
import os
from pathlib import Path
from typing import Any
from urllib.parse import quote
from xml.sax.saxutils import quoteattr

from secu.apps.exports.content import Content, Row
from secu.apps.exports.writing import Format
from secu.apps.originals import put_all

CONTROL = "cluster"  # names of the tags in the interface
OBJECT = "image"


def write(content: Content, place: Path) -> None:
    """Write tasks.json, interface.xml, and the pictures in images/."""
    files = put_all(content.images, place / "images", copy=content.request.copy, command="export")
    (place / "interface.xml").write_text(_interface(content.classes), encoding="utf-8")
    with (place / "tasks.json").open("w", encoding="utf-8") as file:
        file.write("[")
        for number, (name, row) in enumerate(zip(files, content.rows(), strict=True)):
            url = f"/data/local-files/?d={quote(os.fsencode(f'{place.name}/images/{name}'))}"
            file.write((",\n" if number else "\n") + json.dumps(_task(url, row, content.title), ensure_ascii=False))
        file.write("\n]\n")


def _task(url: str, row: Row, run: str) -> dict[str, Any]:
    choice = {
        "id": "cluster",
        "from_name": CONTROL,
        "to_name": OBJECT,
        "type": "choices",
        "value": {"choices": [row["cluster_name"]]},
    }
    prediction = {"model_version": f"secu {run}", "score": row["confidence"], "result": [choice]}
    return {"data": {OBJECT: url, **row}, "predictions": [prediction]}


def _interface(names: list[str]) -> str:
    """Return the labeling interface: the picture, and one choice per cluster."""
    choices = "".join(f"    <Choice value={quoteattr(name)}/>\n" for name in names)
    return (
        "<View>\n"
        f'  <Image name="{OBJECT}" value="${OBJECT}"/>\n'
        f'  <Choices name="{CONTROL}" toName="{OBJECT}" choice="single-radio" showInline="true">\n'
        f"{choices}"
        "  </Choices>\n"
        "</View>\n"
    )


FORMAT = Format(
    write,
    opening="in Label Studio, paste interface.xml as the interface, add {path} as local storage, and import tasks.json",
    needs_pictures=True,
)
