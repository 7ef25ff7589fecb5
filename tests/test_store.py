"""Kept files: whole or absent, found again only for the same key, never trusted when old or damaged."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import pytest

from nanoinfer.errors import NanoinferError
from nanoinfer.store import cache_dir, cache_file, cached, read_cached, restored, write_whole


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("NANOINFER_CACHE", str(tmp_path / "cache"))


@dataclass(frozen=True)
class Numbers:
    """A result with a rule of its own."""

    numbers: tuple[int, ...]

    def __post_init__(self) -> None:
        if max(self.numbers) > 99:
            raise NanoinferError("of another kind")


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

    def measure() -> Numbers:
        calls.append(len(calls))
        return Numbers(tuple(calls))

    assert cached(path, Numbers, measure).numbers == (0,)
    assert cached(path, Numbers, measure).numbers == (0,)
    assert cached(path, Numbers, measure, fresh=True).numbers == (0, 1)
    assert cached(path, Numbers, measure).numbers == (0, 1)
    os.utime(path, (0, time.time() - 100))
    assert cached(path, Numbers, measure, max_age_s=200).numbers == (0, 1)
    assert cached(path, Numbers, measure, max_age_s=50).numbers == (0, 1, 2)


@dataclass(frozen=True)
class Everything:
    """What a stored result may hold."""

    pair: tuple[str, float]
    by_size: Mapping[int, Numbers]
    one: Numbers | None
    none: Numbers | None
    kind: Literal["a", "b"] | None
    anything: Mapping[str, Any]


def test_a_result_comes_back_as_it_was() -> None:
    result = Everything(("x", math.inf), {3: Numbers((1, 2)), 4: Numbers((5,))}, Numbers((6,)), None, "b", {"y": [1]})
    assert restored(Everything, json.loads(json.dumps(asdict(result)))) == result
    for change in ({"pair": ["x"]}, {"by_size": {"x": {"numbers": [1]}}}, {"one": [1]}, {"more": 1}):
        with pytest.raises((ValueError, AttributeError, LookupError)):
            restored(Everything, {**json.loads(json.dumps(asdict(result))), **change})


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"{}", b"null", b"\xff\xfe", b'{"numbers": [100]}'])
def test_a_damaged_file_counts_as_none(content: bytes) -> None:
    path = cache_file("kind", ["key"])
    assert read_cached(path, Numbers) is None
    write_whole(path, "")
    path.write_bytes(content)
    assert read_cached(path, Numbers) is None
    assert cached(path, Numbers, lambda: Numbers((7,))) == Numbers((7,))
    assert read_cached(path, Numbers) == Numbers((7,))


def test_only_a_result_worth_keeping_is_kept() -> None:
    path = cache_file("kind", ["key"])
    assert cached(path, Numbers, lambda: Numbers((1, 2)), keep=lambda it: len(it.numbers) < 2) == Numbers((1, 2))
    assert not path.exists()


def test_a_disk_that_refuses_costs_only_the_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("NANOINFER_CACHE", str(tmp_path / "file"))
    assert cached(cache_file("kind", ["key"]), Numbers, lambda: Numbers((3,))) == Numbers((3,))
