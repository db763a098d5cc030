"""FiftyOne: a FiftyOneDataset, which ``fo.Dataset.from_dir`` imports, with its embeddings and the map.

Its files hold the documents of FiftyOne's database as MongoDB's extended JSON. Each document has an ``_id`` of 24
hexadecimal digits. Arrays are stored as compressed .npy files.
"""

import base64
import hashlib
import io
import json
import zlib
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from secu.apps.exports.content import Content
from secu.apps.exports.writing import Format
from secu.apps.originals import put_all
from secu.base.files import write_json
from secu.results.tables import LABEL

VERSION = "1.0.0"  # of the documents; later versions of FiftyOne convert them
MAP = "map"  # the key under which the app finds the map
FIELDS = "fiftyone.core.fields."
CLASSIFICATION = "fiftyone.core.labels.Classification"
PLAIN = {
    "secu_id": "String",
    "cluster_number": "Int",
    "cosine": "Float",
    "outlier": "Boolean",
    "x": "Float",
    "y": "Float",
}
WRONG = "marked_wrong"
Document = dict[str, Any]


def write(content: Content, place: Path) -> None:
    """Write metadata.json, samples.json, brain/map.json, and the pictures in data/."""
    files = put_all(content.images, place / "data", copy=content.request.copy, command="export")
    sample_ids = [_object_id("sample", index) for index in range(len(files))]
    with (place / "samples.json").open("w", encoding="utf-8") as file:
        file.write('{"samples": [')
        for number, document in enumerate(_samples(content, files, sample_ids)):
            file.write((",\n" if number else "\n") + json.dumps(document, ensure_ascii=False))
        file.write("\n]}\n")
    write_json(place / "metadata.json", _metadata(content))
    (place / "brain").mkdir()
    points = {
        "cls": "fiftyone.brain.visualization.VisualizationResults",
        "points": _packed(content.places),
        "sample_ids": _packed(np.array(sample_ids)),
    }
    write_json(place / "brain" / f"{MAP}.json", points)


def _samples(content: Content, files: list[str], sample_ids: list[str]) -> Iterator[Document]:
    embeddings_ND = content.embeddings.numpy()
    for index, row in enumerate(content.rows()):
        truth = {"ground_truth": _classification("truth", index, row[LABEL])} if row.get(LABEL) else {}
        yield {
            "_id": {"$oid": sample_ids[index]},
            "_media_type": "image",
            "_rand": int(sample_ids[index][:12], 16) / 16**12,  # the order of a random sample
            "filepath": f"data/{files[index]}",
            "tags": ["marked wrong"] if row.get(WRONG) else [],
            "cluster": _classification("cluster", index, row["cluster_name"], row["confidence"]),
            "second": _classification("second", index, row["second_name"], row["second_confidence"]),
            **truth,
            "secu_id": row["id"],
            "cluster_number": row["cluster"],
            **{name: row[name] for name in PLAIN if name in row},
            "embedding": {"$binary": {"base64": _packed(embeddings_ND[index]), "subType": "00"}},
        }


def _classification(kind: str, index: int, label: str, confidence: float | None = None) -> Document:
    more = {} if confidence is None else {"confidence": confidence}
    return {"_id": {"$oid": _object_id(kind, index)}, "_cls": "Classification", "tags": [], "label": label, **more}


def _metadata(content: Content) -> Document:
    """Return the document of the dataset: its fields, the names of clusters, and the run that made the map."""
    labels = ["cluster", "second", *(["ground_truth"] if LABEL in content.table else [])]
    return {
        "name": content.title,
        "version": VERSION,
        "media_type": "image",
        "sample_fields": [
            _field("id", "ObjectId", db_field="_id"),
            _field("filepath", "String"),
            _field("tags", "List", subfield=f"{FIELDS}StringField"),
            *(_label_field(name) for name in labels),
            *(_field(name, kind) for name, kind in PLAIN.items()),
            _field("embedding", "Vector"),
        ],
        "classes": {"cluster": content.classes, "second": content.classes},
        "info": {"exported_by": "secu"},
        "brain_methods": {MAP: _map_run()},
    }


def _map_run() -> Document:
    """Return the document of a map whose points were given."""
    config = {"cls": "fiftyone.brain.visualization.ManualVisualizationConfig", "method": "manual", "num_dims": 2}
    return {
        "key": MAP,
        "version": VERSION,
        "timestamp": {"$date": datetime.now(UTC).isoformat()},
        "config": {**config, "type": "visualization", "embeddings_field": "embedding"},
    }


def _field(name: str, kind: str, **more: Any) -> Document:
    described: Document = {"embedded_doc_type": None, "subfield": None, "fields": [], "db_field": name}
    return {"name": name, "ftype": f"{FIELDS}{kind}Field", **described, **more}


def _label_field(name: str) -> Document:
    fields = [
        _field("id", "ObjectId", db_field="_id"),
        _field("tags", "List", subfield=f"{FIELDS}StringField"),
        _field("label", "String"),
        _field("confidence", "Float"),
        _field("logits", "Vector"),
    ]
    return _field(name, "EmbeddedDocument", embedded_doc_type=CLASSIFICATION, fields=fields)


def _object_id(kind: str, index: int) -> str:
    return hashlib.sha256(f"{kind} {index}".encode()).hexdigest()[:24]


def _packed(array: NDArray[Any]) -> str:
    buffer = io.BytesIO()
    np.save(buffer, array, allow_pickle=False)
    return base64.b64encode(zlib.compress(buffer.getvalue())).decode("ascii")


FORMAT = Format(
    write,
    opening="import fiftyone as fo; fo.Dataset.from_dir({path!r}, fo.types.FiftyOneDataset)",
    needs_pictures=True,
)
