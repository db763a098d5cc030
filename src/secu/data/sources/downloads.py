"""Location of data sets on disk, and their download: fetched, verified and unpacked atomically.

Pooch is not used because it cannot resume a broken download, and STL-10 is 2.6 GB on a slow server.
"""

import hashlib
import os
import tarfile
import tempfile
import zlib
from collections.abc import Callable
from http.client import HTTPException
from pathlib import Path
from typing import NamedTuple
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import platformdirs

from secu.base.errors import UserError, nearest

BLOCK = 1 << 20  # bytes
TIMEOUT = 30  # seconds without a byte

Progress = Callable[[int, int | None], None]  # called with bytes done and total, if known


class Archive(NamedTuple):
    """An official archive, its checksum and the one folder it unpacks to."""

    url: str
    md5: str
    folder: str

    @property
    def file(self) -> str:
        """The name of the archive's file."""
        return self.url.rsplit("/", 1)[-1]


_CIFAR = "https://www.cs.toronto.edu/~kriz"
_CIFAR100 = Archive(f"{_CIFAR}/cifar-100-binary.tar.gz", "03b5dce01913d631647c71ecec9e9cb8", "cifar-100-binary")
ARCHIVES = {
    "cifar10": Archive(f"{_CIFAR}/cifar-10-binary.tar.gz", "c32a1d4ab5d03f1284b67883e8d87530", "cifar-10-batches-bin"),
    "cifar100": _CIFAR100,
    "cifar100-20": _CIFAR100,
    "stl10": Archive(
        "http://ai.stanford.edu/~acoates/stl10/stl10_binary.tar.gz", "91f7769df0f17e558f3565bffb0c7dfb", "stl10_binary"
    ),
}


def data_root(option: Path | None = None) -> Path:
    """Return the folder of all data sets: ``option``, else $SECU_DATA, else ``secu`` in the user's cache folder."""
    if option is not None:
        return Path(option).expanduser()
    if chosen := os.environ.get("SECU_DATA"):
        return Path(chosen).expanduser()
    return platformdirs.user_cache_path("secu", appauthor=False, opinion=False)


def download(name: str, root: Path, *, progress: Progress | None = None) -> Path:
    """Download a data set to ``root``, unless it or its archive already exists there.

    Returns:
        The data set's folder; ``root`` itself for ``digits``, which come with scikit-learn.
    """
    if name == "digits":
        return root
    if name == "imagenet":
        raise UserError(
            "imagenet: must be downloaded manually from https://image-net.org (free for research, after registration); "
            f"put its class folders into {root / 'imagenet' / 'train'} and {root / 'imagenet' / 'val'}"
        )
    if name not in ARCHIVES:
        raise UserError(f"data: unknown data set {name!r}; {nearest(name, [*ARCHIVES, 'imagenet', 'digits'])}")
    return install(ARCHIVES[name], root, progress)


def install(archive: Archive, root: Path, progress: Progress | None = None) -> Path:
    """Return the archive's folder under ``root``, downloading and unpacking it if necessary.

    A downloaded archive is removed once it is unpacked; one that the user put there is kept.
    """
    target = root / archive.folder
    file = root / archive.file
    if target.is_dir():
        return target
    by_hand = file.is_file()
    if by_hand:
        if (md5 := _md5(file)) != archive.md5:
            raise UserError(f"{file}: its MD5 is {md5}, not {archive.md5}; remove it to download it again")
    else:
        _fetch(archive, file, progress)
    _unpack(file, target)
    if not by_hand:
        file.unlink(missing_ok=True)
    return target


def _fetch(archive: Archive, file: Path, progress: Progress | None) -> None:
    """Download to ``file``, resuming after a broken connection as long as each attempt makes progress."""
    part = file.with_name(f"{file.name}.part")
    while True:
        before = _size(part)
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            _stream(archive.url, part, progress)
            break
        except (OSError, HTTPException) as error:
            if _size(part) <= before:
                by_hand = f"put the file {archive.file} from there into {file.parent}"
                raise UserError(f"cannot download {archive.url} ({error}); {by_hand}") from error
    if (md5 := _md5(part)) != archive.md5:
        part.unlink()
        raise UserError(f"{archive.url}: the download has MD5 {md5}, expected {archive.md5}; it was removed, try again")
    part.replace(file)


def _stream(url: str, part: Path, progress: Progress | None) -> None:
    """Append the missing bytes to ``part``; raise OSError if the connection breaks before the end."""
    done = _size(part)
    request = Request(url, headers={"User-Agent": "secu"} | ({"Range": f"bytes={done}-"} if done else {}))
    try:
        response = urlopen(request, timeout=TIMEOUT)
    except HTTPError as error:
        error.close()
        if error.code == 416 and done:  # the file is already complete; the checksum verifies it
            return
        raise
    with response:
        resumed = response.status == 206
        done = done if resumed else 0
        length = response.headers["Content-Length"]
        total = done + int(length) if length else None
        with part.open("ab" if resumed else "wb") as file:
            while block := response.read(BLOCK):
                file.write(block)
                done += len(block)
                if progress:
                    progress(done, total)
    if total is not None and done < total:
        raise ConnectionError(f"the connection broke after {done} of {total} bytes")


def _size(file: Path) -> int:
    return file.stat().st_size if file.exists() else 0


def _md5(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()


def _unpack(file: Path, target: Path) -> None:
    """Unpack into a temporary folder, then rename it to ``target``, so that the folder is always complete."""
    try:
        with (
            tempfile.TemporaryDirectory(prefix=f".{target.name}-", dir=target.parent) as scratch,
            tarfile.open(file) as tar,
        ):
            tar.extraction_filter = tarfile.data_filter
            tar.extractall(scratch)
            Path(scratch, target.name).rename(target)
    except (tarfile.TarError, EOFError, zlib.error, OSError) as error:
        if not target.is_dir():  # otherwise another process was faster
            raise UserError(f"{file}: cannot be unpacked: {error}") from error
