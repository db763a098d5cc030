"""The pictures of an export: linked, copied or written as files, or as bytes."""

import io
import shutil
from contextlib import suppress
from pathlib import Path

from PIL import Image

from secu.base.errors import UserError
from secu.base.names import printable
from secu.data import Images
from secu.data.folders import is_image
from secu.data.image_files import BadImage, opened
from secu.data.text import one_line
from secu.results.edits import ranked
from secu.results.pictures import Tile


def put_pictures(images: Images, folder: Path, *, copy: bool) -> list[str]:
    """Put every picture into a new folder, in the order of the images, and return the names of the files.

    Files are linked to, or copied; pictures in an archive are extracted, and those of an array are written as PNG.
    """
    folder.mkdir()
    return [_put(images, index, folder, copy=copy) for index in range(len(images))]


def _put(images: Images, index: int, folder: Path, *, copy: bool) -> str:
    name, content = original(images, index)
    target = folder / ranked(index, name)
    if isinstance(content, bytes):
        target.write_bytes(content)
    elif copy:
        shutil.copy2(content, target)
    else:
        try:
            target.symlink_to(content.resolve())
        except (OSError, NotImplementedError) as error:
            raise UserError(f"export: this disk has no links ({one_line(error)}); use --copy") from None
    return target.name


def original(images: Images, index: int) -> tuple[str, Path | bytes]:
    """Return a file name for an image, and its file or the encoded picture; pixels become PNG."""
    shown = printable(images.ids[index])
    try:
        content = images.original(index)
    except Exception as error:  # of a damaged archive, any
        raise UserError(f"export: cannot read {shown}: {one_line(error)}") from None
    if isinstance(content, Path):
        if not content.is_file():
            raise UserError(f"export: {printable(str(content))} does not exist any more; restore it")
        return content.name, content
    if isinstance(content, bytes):
        return _file_name(images.ids[index], content), content
    return f"{images.ids[index]}.png", encoded(content)


def original_bytes(images: Images, index: int) -> tuple[str, bytes]:
    """Return a file name for an image, and the encoded picture."""
    name, content = original(images, index)
    if isinstance(content, bytes):
        return name, content
    try:
        return name, content.read_bytes()
    except OSError as error:
        raise UserError(f"export: cannot read {printable(str(content))}: {one_line(error)}") from None


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
