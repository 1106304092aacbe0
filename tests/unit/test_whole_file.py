"""Files that appear when they are whole: several writers, failures."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from extkv.whole_file import whole_file


def test_a_file_is_replaced_at_the_end(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"old")
    with whole_file(path) as file:
        file.write(b"new")
        file.flush()
        assert path.read_bytes() == b"old"
    assert path.read_bytes() == b"new"
    assert [found.name for found in tmp_path.iterdir()] == ["file"]


def test_a_failure_leaves_what_was_there(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"old")

    def fail_halfway() -> None:
        with whole_file(path) as file:
            file.write(b"half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail_halfway()
    assert path.read_bytes() == b"old"
    assert [found.name for found in tmp_path.iterdir()] == ["file"]


def test_a_missing_folder_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere"), whole_file(tmp_path / "nowhere" / "a"):
        pass


def test_two_that_write_one_file_at_once_both_end(tmp_path):
    # Processes of one training run did: one renamed what the other had begun.
    path = tmp_path / "file"
    with whole_file(path) as first, whole_file(path) as second:
        first.write(b"first")
        second.write(b"second")
    assert path.read_bytes() == b"first"


def test_readers_see_whole_files_only(tmp_path):
    path = tmp_path / "file"
    contents = [bytes([number]) * 100_000 for number in range(4)]
    path.write_bytes(contents[0])

    def write(content: bytes) -> None:
        for _ in range(20):
            with whole_file(path) as file:
                file.write(content[:50_000])
                file.flush()
                file.write(content[50_000:])

    with ThreadPoolExecutor(4) as pool:
        writers = [pool.submit(write, content) for content in contents]
        while not all(writer.done() for writer in writers):
            assert path.read_bytes() in contents
        for writer in writers:
            writer.result()
