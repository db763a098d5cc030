"""The original pictures of a run: linked, copied or written as files, or as encoded bytes.

Errors begin with the name of the command that uses them.
"""

import io
import shutil
from contextlib import suppress
from pathlib import Path

from PIL import Image

from secu.base.errors import UserError
from secu.base.names import printable
from secu.data import Images
from secu.data.decoding.image_files import BadImage, opened
from secu.data.sources.folders import is_image, spelled_out
from secu.data.text import one_line
from secu.results.edits import ranked
from secu.results.pictures import Tile
from secu.train.run import Run


def require_outside(run: Run, destination: Path, command: str, files: str) -> None:
    """Raise if copies would be written into the folder of a run's own images."""
    source = run.config().data.source
    base = Path(spelled_out(source)) if source else None
    if base and base.is_dir() and destination.resolve().is_relative_to(base.resolve()):
        where = f"{destination} is inside {base}, so the next run would include the {files}"
        raise UserError(f"{command}: {where}; choose another folder")


def put(images: Images, index: int, folder: Path, rank: int, *, copy: bool, command: str) -> str:
    """Put a picture into a folder, and return the name of the file, which begins with a rank.

    A file is linked to, or copied; a picture in an archive is extracted, and pixels are written as PNG.
    """
    name, content = original(images, index, command)
    target = folder / ranked(rank, name)
    if isinstance(content, bytes):
        target.write_bytes(content)
    elif copy:
        shutil.copy2(content, target)
    else:
        try:
            target.symlink_to(content.resolve())
        except (OSError, NotImplementedError) as error:
            raise UserError(f"{command}: this disk has no links ({one_line(error)}); use --copy") from None
    return target.name


def put_all(images: Images, folder: Path, *, copy: bool, command: str) -> list[str]:
    """Put every picture into a new folder, in the order of the images, and return the names of the files."""
    folder.mkdir()
    return [put(images, index, folder, index, copy=copy, command=command) for index in range(len(images))]


def original(images: Images, index: int, command: str) -> tuple[str, Path | bytes]:
    """Return a file name for an image, and its file or the encoded picture; pixels become PNG."""
    shown = printable(images.ids[index])
    try:
        content = images.original(index)
    except UserError:  # for example of feature vectors without pictures
        raise
    except Exception as error:  # of a damaged archive, any
        raise UserError(f"{command}: cannot read {shown}: {one_line(error)}") from None
    if isinstance(content, Path):
        if not content.is_file():
            raise UserError(f"{command}: {printable(str(content))} does not exist any more; restore it")
        return content.name, content
    if isinstance(content, bytes):
        return _file_name(images.ids[index], content), content
    return f"{images.ids[index]}.png", encoded(content)


def original_bytes(images: Images, index: int, command: str) -> tuple[str, bytes]:
    """Return a file name for an image, and the encoded picture."""
    name, content = original(images, index, command)
    if isinstance(content, bytes):
        return name, content
    try:
        return name, content.read_bytes()
    except OSError as error:
        raise UserError(f"{command}: cannot read {printable(str(content))}: {one_line(error)}") from None


def encoded(tile: Tile, *, quality: int | None = None) -> bytes:
    """Return a picture as PNG or, given a quality, as JPEG."""
    buffer = io.BytesIO()
    if quality is None:
        Image.fromarray(tile).save(buffer, "PNG")
    else:
        Image.fromarray(tile).save(buffer, "JPEG", quality=quality)
    return buffer.getvalue()


def _file_name(name: str, content: bytes) -> str:
    """Return the last part of an id, with an ending by its content if it has none, such as the row of a table."""
    last = name.rpartition("/")[2]
    if is_image(last):
        return last
    with suppress(BadImage), opened(content) as image:
        return f"{last}.{str(image.format).lower()}"
    return last
