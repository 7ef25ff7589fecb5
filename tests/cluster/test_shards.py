"""A batch on the disk: what a kill leaves is what is done, and nothing is lost or done twice."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from nanoinfer.cluster.shards import Item, Row, Shards, read_prompts
from nanoinfer.errors import RequestError


def prompts(n: int) -> list[Item]:
    return [Item(index, f"prompt {index}") for index in range(n)]


def rows(shards: Shards, shard: int) -> list[Row]:
    return [{"index": item.index, "text": f"é {item.prompt}"} for item in shards.of(shard)]


def indices(path: Path) -> list[int]:
    return [json.loads(line)["index"] for line in path.read_text("utf8").splitlines()]


def test_what_is_done_stays_done_and_the_rest_is_what_is_left(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    first = Shards(prompts(10), out, {"model": "m"}, 4)
    assert first.count == 3
    with first.held():
        assert first.missing() == [0, 1, 2]
        first.write(2, rows(first, 2))
        first.write(0, rows(first, 0))
        with pytest.raises(RequestError, match="shard 1 is missing"):
            first.finish()
    again = Shards(prompts(10), out, {"model": "m"}, 4)
    with again.held():
        assert again.missing() == [1]
        again.write(1, rows(again, 1))
        assert again.finish() == (10, 0)
    assert indices(out) == list(range(10))  # in order, though they were done in another
    assert [path.name for path in sorted(again.folder.iterdir())] == ["lock", "manifest.json"]
    once_more = Shards(prompts(10), out, {"model": "m"}, 4)
    with once_more.held():
        assert once_more.missing() == []
        assert once_more.finish() == (10, 0)


def test_a_driver_killed_between_the_answers_and_the_end_loses_nothing(tmp_path: Path) -> None:
    shards = Shards(prompts(4), tmp_path / "out", {}, 2)
    with shards.held():
        for shard in range(2):
            shards.write(shard, rows(shards, shard))
        shards.finish()
        shards.write(1, rows(shards, 1))  # as if it had been killed before it removed this one
        assert shards.missing() == []
        assert shards.finish() == (4, 0)
        assert not list(shards.folder.glob("*.jsonl"))


@pytest.mark.parametrize(
    "damage", ["", '{"index": 2}\n', '{"index": 2}\n{"ind', '{"index": 2}\n{"index": 2}\n', "[1]\n[2]\n", "3\n4\n"]
)
def test_a_shard_that_is_not_whole_is_done_again(tmp_path: Path, damage: str) -> None:
    shards = Shards(prompts(4), tmp_path / "out", {}, 2)
    with shards.held():
        shards.write(0, rows(shards, 0))
        shards.write(1, rows(shards, 1))
        (shards.folder / "000001.jsonl").write_text(damage)
        (shards.folder / "000000.jsonl.99.part").write_text("half")  # of a kill in the middle of writing
        assert shards.missing() == [1]


def test_rows_that_are_not_the_shards_own_are_never_written(tmp_path: Path) -> None:
    shards = Shards(prompts(4), tmp_path / "out", {}, 2)
    with shards.held():
        for wrong in ([], [2, 3], [1, 0], [0], [0, 0], [0, 1, 1]):
            with pytest.raises(ValueError, match="shard 0"):
                shards.write(0, [{"index": index} for index in wrong])
        assert shards.missing() == [0, 1]


def test_answers_of_another_batch_are_never_mixed_in(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with Shards(prompts(4), out, {"model": "m"}, 2).held():
        pass
    for items, settings, size, what in (
        (prompts(5), {"model": "m"}, 2, "prompts_sha256, prompts differ"),
        (prompts(4), {"model": "n"}, 2, "settings differ"),
        (prompts(4), {"model": "m"}, 3, "shard differ"),
        ([*prompts(3), Item(3, "other")], {"model": "m"}, 2, "prompts_sha256 differ"),
    ):
        with pytest.raises(RequestError, match=what), Shards(items, out, settings, size).held():
            pass
    other = tmp_path / "other"
    other.write_text("another file")
    with pytest.raises(RequestError, match="not of this batch"), Shards(prompts(4), other, {}, 2).held():
        pass
    assert other.read_text() == "another file"


def test_two_runs_at_once_are_refused(tmp_path: Path) -> None:
    first, second = (Shards(prompts(4), tmp_path / "out", {}, 2) for _ in range(2))
    with first.held(), pytest.raises(RequestError, match="another run works on this batch"), second.held():
        pass
    with second.held():
        assert second.missing() == [0, 1]


def test_errors_are_rows_and_counted(tmp_path: Path) -> None:
    shards = Shards(prompts(2), tmp_path / "out", {}, 2)
    with shards.held():
        shards.write(0, [{"index": 0, "error": "the prompt is empty"}, {"index": 1, "text": "b"}])
        assert shards.finish() == (2, 1)


def test_prompts_are_read_with_their_names_and_the_first_bad_line_is_named(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "a"}\n{"prompt": [1, 2], "id": "x", "max_tokens": 3}\n', "utf8")
    assert read_prompts(file) == [Item(0, "a"), Item(1, [1, 2], "x", 3)]
    for line, what in (
        ("{", "line 2: not an object such as"),
        ("[]", "line 2: not an object"),
        ('{"text": "a"}', "line 2: not an object"),
        ('{"prompt": "a", "temperatur": 1}', "line 2: unknown field 'temperatur'"),
        ('{"prompt": 3}', "line 2: prompt must be a text or a list of token ids"),
        ('{"prompt": [true]}', "line 2: prompt must be"),
        ('{"prompt": "a", "id": 3}', "line 2: id must be a text"),
        ('{"prompt": "a", "max_tokens": -1}', "line 2: max_tokens must be"),
        ('{"prompt": "a", "max_tokens": true}', "line 2: max_tokens must be"),
    ):
        file.write_text('{"prompt": "a"}\n' + line + "\n", "utf8")
        with pytest.raises(RequestError, match=what):
            read_prompts(file)
    file.write_text("")
    with pytest.raises(RequestError, match="no prompt in it"):
        read_prompts(file)
    with pytest.raises(RequestError, match="No such file"):
        read_prompts(tmp_path / "none")
    file.write_bytes(b"\xff\n")
    with pytest.raises(RequestError, match="not UTF-8"):
        read_prompts(file)
