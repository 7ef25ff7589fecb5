"""A small house under siege: whatever comes and goes, everybody ends in time, and nobody reads another's text."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from nanoinfer.errors import RequestError
from tests.engines.house import House, steps_of
from tests.examples import examples


def prompt(length: int, zeros: int) -> list[int]:
    """Zeros, then ones: texts of which any two begin alike, and every text generated goes on in zeros and ones."""
    return [int(at >= zeros) for at in range(length)]


houses = st.builds(
    lambda n_blocks, running, spare, size, share: House(n_blocks, running, running + spare, size, share),
    st.integers(1, 7),
    st.integers(1, 4),
    st.integers(1, 9),
    st.integers(1, 4),
    st.sampled_from([True, True, False]),
)
requests = st.tuples(st.integers(1, 14), st.integers(0, 14), st.integers(1, 9), st.integers(1, 3))


class Siege(RuleBasedStateMachine):
    @initialize(house=houses)
    def build(self, house: House) -> None:
        self.house = house

    @rule(requests=st.lists(requests, min_size=1, max_size=4))
    def add(self, requests: list[tuple[int, int, int, int]]) -> None:
        for length, zeros, new, width in requests:
            house, before, limit = self.house, self.house.present, length + new - 1
            if limit > len(house.memory) * house.pool.block_size or width > house.scheduler.max_running:
                with pytest.raises(RequestError):
                    house.add(prompt(length, zeros), limit, width)
                assert house.present == before
            else:
                added = house.add(prompt(length, zeros), limit, width)
                assert house.present == [*before, added]

    @rule(n=st.integers(1, 9))
    def step(self, n: int) -> None:
        for _ in range(n):
            self.house.step()
            self.house.check()

    @rule(who=st.integers(0, 19))
    def cancel(self, who: int) -> None:
        for sequence in self.house.present[who : who + 1]:
            self.house.scheduler.remove(sequence)
            assert sequence not in self.house.present

    @rule(who=st.integers(0, 9))
    def cancel_a_sample_that_has_not_begun(self, who: int) -> None:
        for sequence in [s for s in self.house.present if s.width > 1][who : who + 1]:
            sequence.width -= 1

    @invariant()
    def all_is_well(self) -> None:
        self.house.check()

    def teardown(self) -> None:
        for _ in range(self.house.work()):
            self.house.step()
            self.house.check()
        assert self.house.present == []
        assert (self.house.pool.used, self.house.pool.available) == (0, len(self.house.memory))


# Some 6,000 steps in 2 s of CPU time; in them hundreds are thrown out, and thousands of blocks are evicted.
TestSiege = Siege.TestCase
TestSiege.settings = examples(150, stateful_step_count=50)


@pytest.mark.parametrize("seed", range(4))
def test_a_long_siege_sees_all_of_it(seed: int) -> None:
    dice, house = Random(seed), House(n_blocks=6, running=4, budget=9)
    for _ in range(2000):
        if len(house.present) < 8:
            length = dice.randint(1, 16)
            house.add(prompt(length, dice.randint(0, 16)), length + dice.randint(0, 8), dice.randint(1, 3))
        if dice.random() < 0.1:
            house.scheduler.remove(dice.choice(house.present))
        house.step()
        house.check()
    counts = house.pool.counts
    assert min(counts.evicted, counts.copied, counts.found_tokens, house.scheduler.preemptions) > 100


class TestWait:
    """Who comes later delays nobody: all that has to be done before a text ends is what was there when it came."""

    @pytest.mark.parametrize("budget", [2, 3, 5, 16])
    def test_one_at_a_time_takes_as_long_as_all_of_them(self, budget: int) -> None:
        house = House(4, running=1, budget=budget, share=False)
        sizes = [(7, 9), (1, 1), (16, 16), (5, 12), (6, 6)]
        due = [0]
        for length, limit in sizes:
            house.add([1] * length, limit)
            due.append(due[-1] + steps_of(length, limit, budget))
        assert due[-1] == house.work()
        for tick in range(due[-1]):
            assert len(house.present) == sum(end > tick for end in due)
            house.step()
        assert house.present == []

    @examples(200)
    @given(house=houses, arrivals=st.lists(st.tuples(st.integers(0, 6), requests), max_size=25))
    def test_everybody_ends_within_the_work_that_was_there(
        self, house: House, arrivals: list[tuple[int, tuple[int, int, int, int]]]
    ) -> None:
        tick, due = 0, dict[int, int]()  # by arrival

        def step() -> None:
            nonlocal tick
            house.step()
            tick += 1
            assert all(tick < due[s.arrival[0]] for s in house.present)

        capacity = len(house.memory) * house.pool.block_size
        for gap, (length, zeros, new, width) in arrivals:
            for _ in range(gap):
                step()
            limit = min(length + new - 1, capacity)
            added = house.add(prompt(min(length, limit), zeros), limit, min(width, house.scheduler.max_running))
            due[added.arrival[0]] = tick + house.work()
        while house.present:
            step()
