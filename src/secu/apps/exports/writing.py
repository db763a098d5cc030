"""The formats by name, and how an export is written: it appears when it is complete, and replaces only an export."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import secu
from secu.apps.exports.content import Content, Request, gather
from secu.apps.originals import require_outside
from secu.base.errors import UserError
from secu.base.files import aside, is_taken, remove_leftovers, replace_folder, write_atomically, write_json
from secu.data.text import one_line
from secu.registry import Registry

MARK = "secu-export.json"  # a file in the folder of an export; in a Parquet file, a key of its metadata
FORMATS = Registry(
    "--to",
    **{
        "fiftyone": "secu.apps.exports.fiftyone:FORMAT",
        "embedding-atlas": "secu.apps.exports.atlas:FORMAT",
        "huggingface": "secu.apps.exports.huggingface:FORMAT",
        "labelstudio": "secu.apps.exports.labelstudio:FORMAT",
    },
)


class Format(NamedTuple):
    """How clusters are written for a tool."""

    write: Callable[[Content, Path], None]  # into an empty folder or, if there is a suffix, to a file
    opening: str  # how to open the result; {path} is where it is, and {quoted} the same for a shell
    suffix: str = ""  # of the file; empty for a folder
    needs_pictures: bool = False  # whether it cannot represent vectors without pictures


def export_to(tool: str, request: Request, destination: Path, *, force: bool = False) -> int:
    """Write a run's clusters in the format of a tool, and return the number of images."""
    form: Format = FORMATS[tool]
    count = 0

    def write(place: Path) -> None:
        nonlocal count
        content = gather(request, needs_pictures=form.needs_pictures)
        request.listener.busy(f"writing {destination}")
        form.write(content, place)
        count = len(content.images)
        _check(form, request, destination, force=force)  # again: something may have appeared there meanwhile

    try:
        remove_leftovers(destination.parent, destination.name)  # may put an earlier export back
        _check(form, request, destination, force=force)
        if form.suffix:
            write_atomically(destination, write)
        else:
            with _building(destination) as place:
                write(place)
                write_json(place / MARK, {"to": tool, "secu": secu.__version__, "images": count})
    except OSError as error:
        raise UserError(f"export: cannot write {destination}: {one_line(error)}") from None
    return count


@contextmanager
def _building(destination: Path) -> Iterator[Path]:
    """Yield a hidden folder that takes the place of the destination at the end."""
    with aside(destination) as folder:
        place = folder / destination.name
        place.mkdir()  # fails now if no folder can have this name
        yield place
        replace_folder(place, destination)


def _check(form: Format, request: Request, destination: Path, *, force: bool) -> None:
    """Raise if the destination has the wrong kind of name, or if something is there that must not be replaced."""
    if destination.suffix != form.suffix and form.suffix:
        raise UserError(f"export: {destination} must end in {form.suffix}")
    if not destination.parent.is_dir():
        raise UserError(f"export: folder {destination.parent} does not exist")
    if request.copy:
        require_outside(request.run, destination, "export", "copies")
    if destination.name and not is_taken(destination):
        return
    if not force:
        raise UserError(f"export: {destination} already exists; choose another name, or replace it with --force")
    if destination.is_dir() == bool(form.suffix) or not _is_export(destination):
        raise UserError(f"export: {destination} is not an export of secu, so it will not be replaced")


def _is_export(path: Path) -> bool:
    """Return whether a folder or a Parquet file was written by this package as an export."""
    if path.is_dir():
        return (path / MARK).is_file()
    import pyarrow as pa
    import pyarrow.parquet as parquet

    try:
        with path.open("rb") as file:
            return MARK.encode() in (parquet.read_schema(file).metadata or {})
    except (OSError, pa.ArrowException):
        return False
