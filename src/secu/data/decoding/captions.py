"""Captions and keywords that photo programs store inside image files, as EXIF."""

from contextlib import suppress
from typing import Any

from PIL import ExifTags, Image

from secu.data.decoding.decode import quiet
from secu.data.decoding.image_files import opened

TEXTS = (
    ExifTags.Base.ImageDescription,
    ExifTags.Base.XPTitle,
    ExifTags.Base.XPSubject,
    ExifTags.Base.XPComment,
    ExifTags.Base.XPKeywords,
)
MOST = 2_000  # characters of a caption


def read_caption(path: str) -> str:
    """Return the description, title, subject, comment and keywords of a file; empty if it has none."""
    with suppress(Exception), quiet(), opened(path) as image:  # a damaged EXIF block is as good as none
        exif = Image.Image.getexif(image)  # that of a PNG would decode the picture, in case EXIF follows the pixels
        return " ".join(filter(None, (_text(exif.get(tag)) for tag in TEXTS)))[:MOST]
    return ""


def _text(value: Any) -> str:
    """Return a value as text; the tags that start with XP are bytes in UTF-16."""
    if isinstance(value, bytes):
        value = value[: 2 * MOST].decode("utf-16-le", "ignore")
    return value.replace("\0", " ").strip()[:MOST] if isinstance(value, str) else ""
