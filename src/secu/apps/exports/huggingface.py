"""Hugging Face: a dataset of Parquet files with the original pictures, which ``datasets.load_dataset`` opens."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

import secu
from secu.apps.exports.content import COLUMNS, Content, Row, has_pictures
from secu.apps.exports.parquet import TYPES, schema_of, write_files
from secu.apps.exports.writing import Format
from secu.apps.originals import original_bytes
from secu.base.names import escape
from secu.results.tables import LABEL, writable

VALUES = {str: "string", int: "int64", float: "float64", bool: "bool"}
EXPLAINED = {
    "image": "the picture as it was stored",
    "id": "path of the image, or its number",
    "cluster": "number of its cluster",
    "cluster_name": "name of its cluster",
    "confidence": "probability of its cluster",
    "second": "number of the second most probable cluster",
    "second_name": "name of the second most probable cluster",
    "second_confidence": "probability of the second most probable cluster",
    "cosine": "cosine similarity to the center of its cluster",
    "outlier": "whether it is far from that center",
    LABEL: "true label, which was not used for the clusters",
    "marked_wrong": "whether a person marked the cluster as wrong",
    "x": "horizontal position on a map of all images, from 0 to 1",
    "y": "vertical position on the map, from 0 to 1",
    "embedding": "unit embedding",
}


def write(content: Content, place: Path) -> None:
    """Write the files in data/, and the dataset card."""
    named = _class_names(content)
    types = dict.fromkeys(named, TYPES[int])  # a class is stored as its number
    metadata = {"huggingface": json.dumps({"info": {"features": _features(content, named)}})}
    schema = schema_of(content, types, metadata)
    write_files(place / "data", schema, _rows(content, named))
    (place / "README.md").write_text(_card(content, schema.names), encoding="utf-8")


def _class_names(content: Content) -> dict[str, list[str]]:
    """Return the names of the classes in each column that has classes."""
    named = {"cluster_name": content.classes, "second_name": content.classes}
    labels = dict.fromkeys(label for label in content.table.get(LABEL, []) if label)
    if labels:
        ordered = [name for name in map(writable, content.images.class_names) if name in labels]
        named[LABEL] = list(dict.fromkeys([*ordered, *labels]))
    return named


def _rows(content: Content, named: dict[str, list[str]]) -> Iterator[Row]:
    """Yield the rows with numbers for classes; an unknown label is None."""
    embeddings_ND = content.embeddings.numpy()
    number_of = {column: {name: number for number, name in enumerate(names)} for column, names in named.items()}
    for index, row in enumerate(content.rows()):
        picture = {}
        if has_pictures(content.images):
            name, stored = original_bytes(content.images, index, "export")
            picture = {"image": {"bytes": stored, "path": escape(name)}}
        numbers = {column: number_of[column].get(row[column]) for column in named}
        yield {**picture, **row, **numbers, "embedding": embeddings_ND[index]}


def _features(content: Content, named: dict[str, list[str]]) -> dict[str, Any]:
    """Return the type of each column in the library's own notation."""
    features: dict[str, Any] = {"image": {"_type": "Image"}} if has_pictures(content.images) else {}
    features |= {name: {"dtype": VALUES[COLUMNS[name]], "_type": "Value"} for name in content.table}
    features |= {name: {"names": names, "_type": "ClassLabel"} for name, names in named.items()}
    value = {"dtype": "float32", "_type": "Value"}
    return {**features, "embedding": {"feature": value, "length": content.embeddings.shape[1], "_type": "Sequence"}}


def _card(content: Content, columns: list[str]) -> str:
    """Return the dataset card: settings for the library, and what the columns mean."""
    settings = {
        "pretty_name": content.title,
        "tags": ["clustering", "secu"],
        "configs": [{"config_name": "default", "data_files": [{"split": "train", "path": "data/train-*"}]}],
    }
    lines = [
        f"---\n{yaml.safe_dump(settings, sort_keys=False, allow_unicode=True)}---",
        f"# {content.title}\n",
        f"{len(content.images):,} images in {len(content.results.centers):,} clusters, found without labels by SeCu "
        f"{secu.__version__}.\n",
        "| column | meaning |\n|---|---|",
        *(f"| `{name}` | {EXPLAINED[name]} |" for name in columns),
    ]
    return "\n".join(lines) + "\n"


FORMAT = Format(write, opening="datasets.load_dataset({path!r})")
