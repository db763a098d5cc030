"""Images of the Hugging Face hub, or of a folder in one of its formats, read with the library ``datasets``.

``hf://NAME`` is a data set of the hub, ``hf://FOLDER`` a folder that ``datasets`` can load or has saved, and
``hf://NAME#test`` another split than the first. The library keeps its files on disk and reads rows from there.
"""

import os
from importlib.util import find_spec
from typing import Any

from secu.base.errors import UserError, nearest
from secu.base.names import printable
from secu.data.decoding.decode import Raw
from secu.data.decoding.image_files import BadImage
from secu.data.sources.base import Source
from secu.data.sources.parquet import LABELS, USUAL, labeled, named
from secu.data.strings import Names
from secu.data.text import one_line


class HubImages(Source):
    """The images in a column of a ``datasets.Dataset``."""

    has_folders = False

    def __init__(self, name: str, data: Any, column: str) -> None:
        import datasets

        self.data = data.cast_column(column, datasets.Image(decode=False)).select_columns([column])
        self.column = column
        simple = [key for key, kind in data.features.items() if isinstance(kind, datasets.Value | datasets.ClassLabel)]
        columns = {key: named(list(data[key]), _class_names(data, key)) for key in simple}
        stamps = [self.data._fingerprint]  # that ``datasets`` gives to the rows
        super().__init__(name, name, Names.of(map(str, range(len(data)))), columns=columns, stamps=stamps)

    def read(self, i: int, values: str | None = None) -> Raw:
        """Return the bytes or the path of image ``i``."""
        image = self.data[i][self.column]
        raw: Raw | None = image and (image["bytes"] or image["path"])
        if not raw:
            raise BadImage("this row has no image data")
        return raw


def open_hub(rest: str, split: str | None = None) -> Source:
    """Open ``//NAME``, ``//FOLDER`` or one of these with ``#SPLIT``."""
    place, _, part = rest.removeprefix("//").partition("#")
    name = f"hf://{place}"
    if find_spec("datasets") is None:
        raise UserError(
            f'source: {printable(name)} needs the package datasets; install it with: pip install "secu[hub]"'
        )
    import datasets

    splits = _load(name, os.path.expanduser(place))
    wanted = split or part or ("train" if "train" in splits else next(iter(splits)))
    if wanted not in splits:
        raise UserError(f"split: {printable(name)} has no split {wanted!r}; {nearest(wanted, splits)}")
    data = splits[wanted]
    found = [key for key, kind in data.features.items() if isinstance(kind, datasets.Image)]
    if not found:
        raise UserError(f"source: {printable(name)} has no column of images; it has {', '.join(data.column_names)}")
    source = HubImages(name, data, next((key for key in USUAL if key in found), found[0]))
    label = next((key for key in LABELS if key in source.columns), None)
    return labeled(source, label, _class_names(data, label))


def _load(name: str, place: str) -> dict[str, Any]:
    """Return the splits of a data set."""
    import datasets

    bars = datasets.utils.logging.is_progress_bar_enabled()
    datasets.disable_progress_bars()
    try:
        saved = any(os.path.isfile(os.path.join(place, file)) for file in ("dataset_info.json", "dataset_dict.json"))
        data = datasets.load_from_disk(place) if saved else datasets.load_dataset(place)
    except Exception as error:  # of the network, of the hub or of a file
        why = f"cannot be loaded: {one_line(error)}"
        advice = "without a network connection, give a local folder: hf://FOLDER, or its Parquet files"
        raise UserError(f"source: {printable(name)} {why}; {advice}") from None
    finally:
        if bars:
            datasets.enable_progress_bars()
    return dict(data) if isinstance(data, dict) else {str(data.split or "train"): data}


def _class_names(data: Any, key: str | None) -> list[str] | None:
    """Return the names of the classes of a column of labels; None if it has none."""
    return getattr(data.features.get(key), "names", None)
