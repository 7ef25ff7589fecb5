"""Kept files: whole or absent, found again only for the same key, never trusted when old or damaged."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from nanoinfer.errors import NanoinferError
from nanoinfer.store import cache_dir, cache_file, cached, read_cached, write_whole


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("NANOINFER_CACHE", str(tmp_path / "cache"))


def parse(text: str) -> list[int]:
    data: list[int] = json.loads(text)["numbers"]
    return data


def dump(numbers: list[int]) -> str:
    return json.dumps({"numbers": numbers})


def test_the_users_choice_of_a_cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert cache_dir() == tmp_path / "cache"
    monkeypatch.delenv("NANOINFER_CACHE")
    assert cache_dir().name == "nanoinfer"


def test_a_write_is_whole_or_absent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "new" / "file.txt"
    write_whole(path, "first")
    write_whole(path, "second ±")
    assert path.read_text(encoding="utf-8") == "second ±"

    def no_space(self: Path, target: Path) -> Path:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", no_space)
    with pytest.raises(OSError, match="No space left"):
        write_whole(path, "third")
    assert path.read_text(encoding="utf-8") == "second ±"
    assert list(path.parent.iterdir()) == [path]


def test_another_key_or_other_code_is_another_file(tmp_path: Path) -> None:
    code = tmp_path / "code"
    (code / "inner").mkdir(parents=True)
    (code / "a.py").write_text("x = 1")
    path = cache_file("kind", ["cpu", 2], [code])
    assert path.parent == cache_dir() / "kind" and path.suffix == ".json"
    assert path == cache_file("kind", ["cpu", "2"], [code])
    assert len({path, cache_file("kind", ["cpu", 3], [code]), cache_file("kind", ["cpu2"], [code])}) == 3
    (code / "notes.txt").write_text("not code")
    assert cache_file("kind", ["cpu", 2], [code]) == path
    for name, text in (("a.py", "x = 2"), ("inner/b.cpp", "int x;"), ("inner/b.h", "")):
        (code / name).write_text(text)
        before, path = path, cache_file("kind", ["cpu", 2], [code])
        assert (path != before) == bool(text)


def test_measured_once_and_read_back(tmp_path: Path) -> None:
    path, calls = cache_file("kind", ["key"]), []

    def measure() -> list[int]:
        calls.append(len(calls))
        return [*calls]

    assert cached(path, measure, parse, dump) == [0]
    assert cached(path, measure, parse, dump) == [0]
    assert cached(path, measure, parse, dump, fresh=True) == [0, 1]
    assert cached(path, measure, parse, dump) == [0, 1]
    os.utime(path, (0, time.time() - 100))
    assert cached(path, measure, parse, dump, max_age_s=200) == [0, 1]
    assert cached(path, measure, parse, dump, max_age_s=50) == [0, 1, 2]


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"{}", b"null", b"\xff\xfe"])
def test_a_damaged_file_counts_as_none(content: bytes) -> None:
    path = cache_file("kind", ["key"])
    write_whole(path, "")
    path.write_bytes(content)
    assert read_cached(path, parse) is None
    assert cached(path, lambda: [7], parse, dump) == [7]
    assert read_cached(path, parse) == [7]


def test_what_the_parser_refuses_counts_as_none() -> None:
    def refuse(text: str) -> list[int]:
        raise NanoinferError("of another kind")

    path = cache_file("kind", ["key"])
    assert read_cached(path, parse) is None
    write_whole(path, dump([1]))
    assert read_cached(path, refuse) is None


def test_only_a_result_worth_keeping_is_kept() -> None:
    path = cache_file("kind", ["key"])
    assert cached(path, lambda: [1, 2], parse, dump, keep=lambda numbers: len(numbers) < 2) == [1, 2]
    assert not path.exists()


def test_a_disk_that_refuses_costs_only_the_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("NANOINFER_CACHE", str(tmp_path / "file"))
    assert cached(cache_file("kind", ["key"]), lambda: [3], parse, dump) == [3]
