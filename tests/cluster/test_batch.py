"""Handing out shards, with workers that are no processes and die as the test says."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nanoinfer.cluster import batch
from nanoinfer.cluster.shards import Item, Shards
from nanoinfer.errors import NanoinferError

#: What a worker that has these shards (first prompts of each) does: lives, dies and comes back, or dies for good.
Fate = Callable[[list[int]], str]


class Lost(Exception):
    pass


class Mistake(Lost):
    pass


class Ray:
    """Answers come in the order in which they were asked for, late ones after all others, and None never."""

    exceptions = SimpleNamespace(RayError=Lost, RayTaskError=Mistake)

    def __init__(self) -> None:
        self.refs: dict[int, Callable[[], Any] | None] = {}

    def ref(self, answer: Callable[[], Any] | None, is_late: bool = False) -> int:
        ref = len(self.refs) + 1_000_000 * is_late
        self.refs[ref] = answer
        return ref

    def wait(self, refs: Sequence[int], num_returns: int) -> tuple[list[int], list[int]]:
        assert num_returns == 1
        ready = [ref for ref in sorted(refs) if self.refs[ref] is not None]
        assert ready, "it would wait for ever"
        return ready[:1], [ref for ref in refs if ref != ready[0]]

    def get(self, ref: int) -> Any:
        answer = self.refs[ref]
        assert answer is not None
        return answer()


class Worker:
    def __init__(self, ray: Ray, fate: Fate = lambda has: "lives", starts: bool = True, late: bool = False) -> None:
        self.ray, self.fate, self.starts, self.late, self.is_back = ray, fate, starts, late, True
        self.has: list[int] = []
        self.most = self.life = 0
        self.run = SimpleNamespace(remote=self._run)
        self.ready = SimpleNamespace(options=lambda max_task_retries: SimpleNamespace(remote=self._ready))

    def _ready(self) -> int:
        self.has.clear()
        if not self.is_back:
            return self.ray.ref(None)
        return self.ray.ref(lambda: None if self.starts else _raise(Lost("no model here")))

    def _run(self, items: Sequence[Item]) -> int:
        self.has.append(items[0].index)
        self.most = max(self.most, len(self.has))
        rows = [{"index": item.index} for item in items]
        life = self.life

        def answer() -> Any:
            if life == self.life and (fate := self.fate(self.has)) != "lives":
                self.is_back = fate != "dies for good"
                self.life += 1
            if life != self.life:  # all that it had is lost with it
                raise Lost
            self.has.remove(items[0].index)
            return rows

        return self.ray.ref(answer, self.late)


def _raise(error: Exception) -> None:
    raise error


def hand_out(
    monkeypatch: pytest.MonkeyPatch, folder: Path, ray: Ray, team: list[Worker], n: int = 20
) -> tuple[Shards, int]:
    monkeypatch.setattr(batch, "require", lambda: ray)
    shards = Shards([Item(index, "x") for index in range(20)], folder / "out", {}, 2)
    with shards.held():
        again = batch.hand_out(shards, shards.missing(), team)
        assert shards.missing() == []
    return shards, again


def test_each_worker_gets_two_at_a_time_until_all_is_done(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ray = Ray()
    team = [Worker(ray), Worker(ray)]
    _, again = hand_out(monkeypatch, tmp_path, ray, team)
    assert again == 0
    assert [worker.most for worker in team] == [2, 2]


def test_what_one_lost_for_good_is_done_by_one_that_had_no_more_to_do(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ray = Ray()
    dying = Worker(ray, lambda has: "dies for good", late=True)
    _, again = hand_out(monkeypatch, tmp_path, ray, [Worker(ray), dying])
    assert again == 2


def test_one_that_comes_back_goes_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ray, deaths = Ray(), iter(["dies", "dies"])
    only = Worker(ray, lambda has: next(deaths, "lives") if 8 in has else "lives")
    _, again = hand_out(monkeypatch, tmp_path, ray, [only])
    assert again == 3  # with the one that ran next to it at first, and not any more


def test_a_shard_that_kills_is_named_and_those_that_ran_next_to_it_are_not(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ray = Ray()
    team = [Worker(ray, lambda has: "dies" if 6 in has else "lives") for _ in range(2)]
    with pytest.raises(NanoinferError, match="prompts 6 to 7 have brought down their worker 3 times"):
        hand_out(monkeypatch, tmp_path, ray, team)
    shards = Shards([Item(index, "x") for index in range(20)], tmp_path / "out", {}, 2)
    with shards.held():
        assert 3 in shards.missing()


def test_a_worker_that_does_not_start_and_a_mistake_of_ours_end_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ray = Ray()
    with pytest.raises(NanoinferError, match="a worker does not start: no model here"):
        hand_out(monkeypatch, tmp_path, ray, [Worker(ray, starts=False)])
    ray = Ray()
    with pytest.raises(Mistake):
        hand_out(monkeypatch, tmp_path, ray, [Worker(ray, lambda has: _raise(Mistake()) or "")])  # type: ignore[func-returns-value]
