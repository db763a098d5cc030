"""Downloads from a real server on this machine: whole, broken, resumed, wrong and hostile."""

import hashlib
import io
import tarfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest

from secu.base.errors import UserError
from secu.data import open_source
from secu.data.sources.downloads import ARCHIVES, BLOCK, Archive, download, install

PAYLOAD = np.random.default_rng(0).bytes(3 * BLOCK)  # random, so that packing does not shrink it under a block


@dataclass
class Site:
    """A server of one file, and how it misbehaves."""

    data: bytes = b""
    ranges: bool = True
    send_length: bool = True
    drops: list[int] = field(default_factory=list)  # bytes after which to break, one entry per request
    asked: list[str | None] = field(default_factory=list)  # the Range of each request
    url: str = ""


@pytest.fixture
def site(monkeypatch) -> Iterator[Site]:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    state = Site()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            wanted = self.headers["Range"]
            state.asked.append(wanted)
            start = int(wanted.removeprefix("bytes=").removesuffix("-")) if wanted and state.ranges else 0
            if start and start >= len(state.data):
                self.send_response(416)
                self.send_header("Content-Range", f"bytes */{len(state.data)}")
                self.end_headers()
                return
            body = state.data[start:]
            self.send_response(206 if start else 200)
            if state.send_length:
                self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body[: state.drops.pop(0)] if state.drops else body)

        def log_message(self, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    state.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield state
    server.shutdown()
    thread.join()
    server.server_close()


def pack(*members: tarfile.TarInfo | tuple[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        for member in members:
            if isinstance(member, tarfile.TarInfo):
                tar.addfile(member)
            else:
                info = tarfile.TarInfo(member[0])
                info.size = len(member[1])
                tar.addfile(info, io.BytesIO(member[1]))
    return buffer.getvalue()


GOOD = pack(("things/one.bin", PAYLOAD), ("things/sub/two.txt", b"two"))


def publish(site: Site, data: bytes = GOOD) -> Archive:
    site.data = data
    return Archive(f"{site.url}/things.tar.gz", hashlib.md5(data).hexdigest(), "things")


def contents(root: Path) -> set[str]:
    return {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()}


UNPACKED = {"things/one.bin", "things/sub/two.txt"}


def test_download_unpacks_and_leaves_nothing_else(site, tmp_path):
    calls: list[tuple[int, int | None]] = []
    root = tmp_path / "new" / "root"
    folder = install(publish(site), root, lambda done, total: calls.append((done, total)))
    assert folder == root / "things"
    assert (folder / "one.bin").read_bytes() == PAYLOAD
    assert contents(root) == UNPACKED
    assert [path.name for path in root.iterdir()] == ["things"]
    assert calls[-1] == (len(GOOD), len(GOOD))
    assert len(calls) >= 3
    assert calls == sorted(calls)


def test_folder_that_is_there_needs_no_network(tmp_path):
    (tmp_path / "things").mkdir()
    assert install(Archive("http://127.0.0.1:1/things.tar.gz", "0", "things"), tmp_path) == tmp_path / "things"


def test_archive_put_there_by_hand_needs_no_network_and_stays(site, tmp_path):
    archive = publish(site)
    (tmp_path / archive.file).write_bytes(GOOD)
    install(archive, tmp_path)
    assert site.asked == []
    assert contents(tmp_path) == UNPACKED | {"things.tar.gz"}


def test_wrong_archive_put_there_by_hand_is_refused_and_stays(site, tmp_path):
    archive = publish(site)
    (tmp_path / archive.file).write_bytes(b"something else")
    with pytest.raises(UserError, match=rf"things.tar.gz: its MD5 is .*, not {archive.md5}; remove it"):
        install(archive, tmp_path)
    assert contents(tmp_path) == {"things.tar.gz"}


def test_broken_connection_is_resumed_where_it_broke(site, tmp_path):
    site.drops = [1000, 2 * BLOCK]
    calls: list[tuple[int, int | None]] = []
    install(publish(site), tmp_path, lambda done, total: calls.append((done, total)))
    assert site.asked == [None, "bytes=1000-", f"bytes={1000 + 2 * BLOCK}-"]
    assert {total for _, total in calls} == {len(GOOD)}
    assert contents(tmp_path) == UNPACKED


def test_part_of_an_earlier_run_is_resumed(site, tmp_path):
    (tmp_path / "things.tar.gz.part").write_bytes(GOOD[:12345])
    install(publish(site), tmp_path)
    assert site.asked == ["bytes=12345-"]
    assert contents(tmp_path) == UNPACKED


def test_server_that_ignores_ranges_starts_over(site, tmp_path):
    site.ranges = False
    (tmp_path / "things.tar.gz.part").write_bytes(GOOD[:12345])
    install(publish(site), tmp_path)
    assert site.asked == ["bytes=12345-"]
    assert contents(tmp_path) == UNPACKED


def test_whole_part_is_used(site, tmp_path):
    (tmp_path / "things.tar.gz.part").write_bytes(GOOD)
    install(publish(site), tmp_path)
    assert site.asked == [f"bytes={len(GOOD)}-"]
    assert contents(tmp_path) == UNPACKED


def test_server_without_length(site, tmp_path):
    site.send_length = False
    calls: list[tuple[int, int | None]] = []
    install(publish(site), tmp_path, lambda done, total: calls.append((done, total)))
    assert calls[-1] == (len(GOOD), None)
    assert contents(tmp_path) == UNPACKED


def test_server_that_always_breaks_at_once_is_given_up_and_the_part_stays(site, tmp_path):
    site.drops = [500, 0, 0, 0]
    with pytest.raises(UserError, match=r"broke after 500 of \d+ bytes\); put the file things.tar.gz from there into"):
        install(publish(site), tmp_path)
    assert len(site.asked) == 2
    assert contents(tmp_path) == {"things.tar.gz.part"}
    site.drops = []
    install(publish(site), tmp_path)
    assert contents(tmp_path) == UNPACKED


def test_wrong_checksum_removes_what_came(site, tmp_path):
    archive = publish(site)
    site.data = GOOD[:-1] + b"x"
    with pytest.raises(UserError, match=rf"the download has MD5 .*, expected {archive.md5}"):
        install(archive, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_interrupt_keeps_the_part_alone_and_the_next_run_resumes(site, tmp_path):
    def stop(done: int, total: int | None) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        install(publish(site), tmp_path, stop)
    assert contents(tmp_path) == {"things.tar.gz.part"}
    size = (tmp_path / "things.tar.gz.part").stat().st_size
    assert 0 < size < len(GOOD)
    install(publish(site), tmp_path)
    assert site.asked[-1] == f"bytes={size}-"
    assert contents(tmp_path) == UNPACKED


def test_without_network_says_what_to_put_where(tmp_path):
    url = "http://127.0.0.1:1/things.tar.gz"
    with pytest.raises(UserError) as caught:
        install(Archive(url, "0", "things"), tmp_path)
    message = str(caught.value)
    assert message.startswith(f"cannot download {url} (")
    assert message.endswith(f"put the file things.tar.gz from there into {tmp_path}")
    assert "\n" not in message
    assert list(tmp_path.iterdir()) == []


def member(name: str, kind: bytes, target: str = "") -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, target
    return info


@pytest.mark.skipif(not hasattr(tarfile, "data_filter"), reason="this Python has no filter")
@pytest.mark.parametrize(
    "bad",
    [
        ("things/../../outside", b"x"),
        member("things/link", tarfile.SYMTYPE, "/etc/passwd"),
        member("things/pipe", tarfile.FIFOTYPE),
        member("things/device", tarfile.CHRTYPE),
    ],
)
def test_hostile_archive_leaves_no_folder(site, tmp_path, bad):
    root = tmp_path / "a" / "root"
    with pytest.raises(UserError, match=r"things.tar.gz: cannot be unpacked"):
        install(publish(site, pack(("things/one.bin", b"1"), bad)), root)
    assert contents(tmp_path) == {"a/root/things.tar.gz"}


@pytest.mark.parametrize("data", [GOOD[: len(GOOD) // 2], b"no archive", pack(("other/file", b"x"))])
def test_archive_that_cannot_be_unpacked_leaves_no_folder(site, tmp_path, data):
    with pytest.raises(UserError, match=r"things.tar.gz: cannot be unpacked"):
        install(publish(site, data), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["things.tar.gz"]


def test_download_by_name_then_load(site, tmp_path, monkeypatch):
    batch = pack(("cifar-100-binary/test.bin", bytes([19, 99]) + bytes(3072)))
    archive = publish(site, batch)
    monkeypatch.setitem(ARCHIVES, "cifar100-20", Archive(archive.url, archive.md5, "cifar-100-binary"))
    assert download("cifar100-20", tmp_path) == tmp_path / "cifar-100-binary"
    assert open_source("dataset:cifar100-20", split="test", root=tmp_path).targets.tolist() == [19]


def test_names_without_an_archive(tmp_path):
    assert download("digits", tmp_path) == tmp_path
    with pytest.raises(UserError, match=rf"imagenet: must be downloaded manually .* {tmp_path}/imagenet/train and"):
        download("imagenet", tmp_path)
    with pytest.raises(UserError, match=r"unknown data set 'cifar'; did you mean cifar10"):
        download("cifar", tmp_path)


def test_download_knows_the_names_that_open_source_knows(tmp_path):
    messages = []
    for call in (lambda: download("x", tmp_path), lambda: open_source("dataset:x", root=tmp_path)):
        with pytest.raises(UserError) as caught:
            call()
        messages.append(str(caught.value))
    assert messages[0] == messages[1]
