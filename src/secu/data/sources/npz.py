"""Images and columns in an .npz file, unpacked in pieces and within bounds."""

import os
import zipfile
from typing import Any

import numpy as np
from numpy.typing import NDArray

from secu.base.errors import UserError, shortened
from secu.base.names import printable
from secu.data.rows import Header, read_npy_header, require_plain
from secu.data.sources.archives import require_ratio

IMAGE_KEYS = ("images", "image", "x", "data", "pixels", "arr_0")  # preferred keys of an .npz with several image arrays
PIECE = 1 << 20  # bytes unpacked at a time


def load_npz(path: str) -> tuple[NDArray[Any], dict[str, Any]]:
    """Return the images in an .npz file, and other arrays with one value per image.

    Raises:
        UserError: There are no images, or several arrays of images.
        ValueError: The file is damaged, or unpacks to too much.
    """
    with zipfile.ZipFile(path) as file:
        headers = _npz_headers(file)
        key = _image_key(path, headers)
        count = headers[key].shape[:1]
        alike = [name for name, header in headers.items() if header.shape == count and not header.dtype.hasobject]
        require_ratio(sum(headers[name].nbytes for name in (key, *alike)), os.path.getsize(path))
        return _read_npz(file, key), {name: _read_npz(file, name).tolist() for name in alike}


def _image_key(path: str, headers: dict[str, Header]) -> str:
    """Return the key of the images in an .npz file."""
    images = [key for key, header in headers.items() if len(header.shape) in (3, 4)]
    if len(images) > 1:
        images = [key for name in IMAGE_KEYS for key in images if key.lower() == name][:1] or images
    if len(images) == 1:
        return images[0]
    what = f"several arrays of images ({', '.join(images)}): name one of them 'images'" if images else "no images"
    held = shortened(", ".join(f"{key} {header.shape}" for key, header in headers.items()))
    raise UserError(
        f"source: {printable(path)} contains {printable(shortened(what))}; it has {printable(held) or 'nothing'}"
    )


def _npz_headers(file: zipfile.ZipFile) -> dict[str, Header]:
    """Return the header of every array in an .npz file."""
    headers = {}
    for name in file.namelist():
        if name.endswith(".npy"):
            with file.open(name) as member:
                headers[name.removesuffix(".npy")] = read_npy_header(member)
    return headers


def _read_npz(file: zipfile.ZipFile, key: str) -> NDArray[Any]:
    """Return an array of an .npz file, read in pieces, so that it is in memory only once."""
    with file.open(f"{key}.npy") as member:
        header = read_npy_header(member)
        require_plain(header)
        if header.nbytes > file.getinfo(f"{key}.npy").file_size:
            raise ValueError(f"the array {key} is truncated")
        member.seek(header.offset)
        array = np.empty(header.shape[::-1] if header.fortran else header.shape, header.dtype)
        rest = array.reshape(-1).view(np.uint8).data
        while rest:
            piece = member.read(min(len(rest), PIECE))
            if not piece:
                raise ValueError(f"the array {key} is truncated")
            rest[: len(piece)] = piece
            rest = rest[len(piece) :]
    return array.T if header.fortran else array
