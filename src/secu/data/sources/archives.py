"""Images in a .zip or .tar archive, read in place: nothing is extracted to disk.

Links, devices, members larger than ``MAX_MEMBER`` and members whose path leads out of the archive are skipped. If two
members have the same name, the later one is used, as it would be after extraction.
"""

import bz2
import gzip
import io
import lzma
import os
import posixpath
import re
import stat
import tarfile
import threading
import zipfile
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import IO, Any, NamedTuple, cast

from secu.base.names import printable
from secu.data.decoding.decode import Raw
from secu.data.sources.base import Skipped, Source, file_stamp
from secu.data.sources.folders import is_image
from secu.data.text import natural, reading

TAR_SUFFIXES = (".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tbz2", ".tbz", ".tar.xz", ".txz")
MAX_MEMBER = 256 << 20  # bytes
MAX_RATIO = 200  # maximum compression ratio of an archive: images are hardly compressible
ANY_RATIO = 1 << 30  # size in bytes up to which any ratio is allowed

_DRIVE = re.compile(r"[A-Za-z]:")


class Member(NamedTuple):
    """A file in an archive, with the reason if it must not be read."""

    path: str
    info: Any  # its ZipInfo or TarInfo
    offset: int
    refusal: str


class _ArchiveSource(Source):
    """Common base of zip and tar: members by id, read one at a time, fastest in archive order."""

    def __init__(self, name: str, found: list[Member]) -> None:
        chosen: dict[str, Member] = {}
        skipped: list[Skipped] = []
        for member in found:
            path = member.path.replace("\\", "/")  # archives created on Windows may contain backslashes
            inside = _inside(path)
            if not is_image(posixpath.basename(path)) or _is_hidden(inside or ""):
                continue
            if inside is None or member.refusal:
                skipped.append((member.path, member.refusal or "its path leads out of the archive"))
            else:
                chosen[inside] = member
        ids = sorted(chosen, key=natural)
        super().__init__(name, os.path.abspath(name), ids, skipped=skipped, stamps=[file_stamp(name)])
        self.members = [chosen[i] for i in self.ids]
        self.lock = threading.Lock()

    @cached_property
    def order(self) -> Sequence[int]:
        """The images in archive order, since a compressed .tar can only be read forward."""
        return sorted(range(len(self)), key=self.position)

    def position(self, i: int) -> int:
        """Return the offset of image ``i`` in the archive."""
        return self.members[i].offset


class ZipSource(_ArchiveSource):
    """Images in a .zip."""

    def __init__(self, name: str) -> None:
        with reading(printable(name)):
            self.archive = zipfile.ZipFile(name)
            infos = [info for info in self.archive.infolist() if not info.is_dir()]
            found = [Member(info.filename, info, info.header_offset, _zip_refusal(info)) for info in infos]
            super().__init__(name, found)
            require_ratio(sum(member.info.file_size for member in self.members), os.path.getsize(name))

    def read(self, i: int, values: str | None = None) -> Raw:
        """Return the bytes of image ``i``."""
        info: zipfile.ZipInfo = self.members[i].info
        with self.lock, self.archive.open(info) as file:
            return file.read(info.file_size)


class TarSource(_ArchiveSource):
    """Images in a .tar, compressed or not."""

    def __init__(self, name: str) -> None:
        found: list[Member] = []
        with reading(printable(name)):
            size = os.path.getsize(name)
            self.file = _unpacking(name)
            self.archive = open_tar(self.file, MAX_MEMBER)
            self.random_order = isinstance(self.file, io.BufferedReader)  # a compressed one is read from the start
            for info in members_of(self.archive):
                if not self.random_order:
                    require_ratio(info.offset_data + info.size, size)
                if not info.isdir():
                    refusal = _size_refusal(info.size) if info.isfile() else "a link or a device"
                    found.append(Member(info.name, info, info.offset_data, refusal))
        super().__init__(name, found)

    def read(self, i: int, values: str | None = None) -> Raw:
        """Return the bytes of image ``i``; fast when images are read in archive order."""
        info: tarfile.TarInfo = self.members[i].info
        with self.lock:
            return cast("IO[bytes]", self.archive.extractfile(info)).read(info.size)


def open_tar(file: IO[bytes], most: int) -> tarfile.TarFile:
    """Open a .tar, of whose members at most ``most`` bytes are read at a time."""
    return tarfile.open(fileobj=cast("IO[bytes]", _Guarded(file, most)), mode="r:")


def members_of(archive: tarfile.TarFile) -> Iterator[tarfile.TarInfo]:
    """Yield the members of a .tar; raise if a header is damaged in a way that would make tarfile loop forever."""
    reached = -1
    while (info := archive.next()) is not None:
        archive.members.clear()  # type: ignore[attr-defined]  # otherwise all headers stay in memory
        if info.offset <= reached or info.size < 0:
            raise tarfile.ReadError("corrupt header: negative or repeated offset")
        reached = info.offset
        yield info


class _Guarded:
    """A file that refuses very large reads, since a .tar header may claim any length."""

    def __init__(self, file: IO[bytes], most: int) -> None:
        self.file = file
        self.most = most

    def read(self, size: int = -1) -> bytes:
        if not 0 <= size <= self.most + tarfile.RECORDSIZE:
            raise tarfile.ReadError(f"a header of {size} bytes")
        return self.file.read(size)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)


def _unpacking(name: str) -> IO[bytes]:
    """Open a .tar file, detecting its compression from the first bytes."""
    file = open(name, "rb")  # noqa: SIM115
    magic = file.read(6)
    file.seek(0)
    if magic.startswith(b"\x1f\x8b"):
        return cast("IO[bytes]", gzip.GzipFile(fileobj=file))
    if magic.startswith(b"BZh"):
        return cast("IO[bytes]", bz2.BZ2File(file))
    return cast("IO[bytes]", lzma.LZMAFile(file)) if magic == b"\xfd7zXZ\x00" else file


def require_ratio(unpacked: int, size: int) -> None:
    """Raise ``ValueError`` if the content of a compressed file is much larger than the file, in bytes."""
    if unpacked > max(ANY_RATIO, MAX_RATIO * size):
        raise ValueError(f"it unpacks to more than {MAX_RATIO} times its size; unpack it by hand")


def _zip_refusal(info: zipfile.ZipInfo) -> str:
    kind = stat.S_IFMT(info.external_attr >> 16)
    return _size_refusal(info.file_size) if kind in (0, stat.S_IFREG) else "a link or a device"


def _size_refusal(size: int) -> str:
    return f"{size / 1e6:,.0f} MB unpacked; the limit is {MAX_MEMBER / 1e6:,.0f} MB" if size > MAX_MEMBER else ""


def _inside(path: str) -> str | None:
    """Return a member's normalized path; None if it leads out of the archive."""
    if path.startswith("/") or _DRIVE.match(path):
        return None
    path = posixpath.normpath(path)
    return None if path.split("/")[0] == ".." else path


def _is_hidden(path: str) -> bool:
    return any(part.startswith(".") or part == "__MACOSX" for part in path.split("/"))
