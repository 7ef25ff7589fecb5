"""A small cache under constant pressure: each sequence ends in time and reads its own text."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from nanoinfer.errors import RequestError
from tests.engines.harness import Harness, steps_of


def prompt(length: int, zeros: int) -> list[int]:
    """Zeros, then ones: texts of which any two begin alike, and every text generated goes on in zeros and ones."""
    return [int(at >= zeros) for at in range(length)]


harnesses = st.builds(
    lambda n_blocks, running, spare, size, share: Harness(n_blocks, running, running + spare, size, share),
    st.integers(1, 7),
    st.integers(1, 4),
    st.integers(1, 9),
    st.integers(1, 4),
    st.sampled_from([True, True, False]),
)
requests = st.tuples(st.integers(1, 14), st.integers(0, 14), st.integers(1, 9), st.integers(1, 3))


class SchedulerMachine(RuleBasedStateMachine):
    @initialize(harness=harnesses)
    def build(self, harness: Harness) -> None:
        self.harness = harness

    @rule(requests=st.lists(requests, min_size=1, max_size=4))
    def add(self, requests: list[tuple[int, int, int, int]]) -> None:
        for length, zeros, new, n_samples in requests:
            harness, before, limit = self.harness, self.harness.present, length + new - 1
            if limit > len(harness.memory) * harness.pool.block_size or n_samples > harness.scheduler.max_running:
                with pytest.raises(RequestError):
                    harness.add(prompt(length, zeros), limit, n_samples)
                assert harness.present == before
            else:
                added = harness.add(prompt(length, zeros), limit, n_samples)
                assert harness.present == [*before, added]

    @rule(n=st.integers(1, 9))
    def step(self, n: int) -> None:
        for _ in range(n):
            self.harness.step()
            self.harness.check()

    @rule(index=st.integers(0, 19))
    def cancel(self, index: int) -> None:
        for sequence in self.harness.present[index : index + 1]:
            self.harness.scheduler.remove(sequence)
            assert sequence not in self.harness.present

    @rule(index=st.integers(0, 9))
    def cancel_a_sample_that_has_not_begun(self, index: int) -> None:
        for sequence in [s for s in self.harness.present if s.n_samples > 1][index : index + 1]:
            sequence.samples.pop()

    @invariant()
    def accounts_are_whole(self) -> None:
        self.harness.check()

    def teardown(self) -> None:
        for _ in range(self.harness.work()):
            self.harness.step()
            self.harness.check()
        assert self.harness.present == []
        assert (self.harness.pool.used, self.harness.pool.available) == (0, len(self.harness.memory))


# Some 6,000 steps in 2 s of CPU time; in them hundreds of sequences are preempted, and thousands of blocks evicted.
TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(max_examples=150, stateful_step_count=50, deadline=None)


@pytest.mark.parametrize("seed", range(4))
def test_a_long_run_sees_all_of_it(seed: int) -> None:
    rng, harness = Random(seed), Harness(n_blocks=6, running=4, budget=9)
    for _ in range(2000):
        if len(harness.present) < 8:
            length = rng.randint(1, 16)
            harness.add(prompt(length, rng.randint(0, 16)), length + rng.randint(0, 8), rng.randint(1, 3))
        if rng.random() < 0.1:
            harness.scheduler.remove(rng.choice(harness.present))
        harness.step()
        harness.check()
    counts = harness.pool.counts
    assert min(counts.evicted, counts.copied, counts.found_tokens, harness.scheduler.preemptions) > 100


class TestWait:
    """A later arrival delays no sequence: all that is done before a text ends is what was there when it came."""

    @pytest.mark.parametrize("budget", [2, 3, 5, 16])
    def test_one_at_a_time_takes_as_long_as_all_of_them(self, budget: int) -> None:
        harness = Harness(4, running=1, budget=budget, share=False)
        sizes = [(7, 9), (1, 1), (16, 16), (5, 12), (6, 6)]
        due = [0]
        for length, limit in sizes:
            harness.add([1] * length, limit)
            due.append(due[-1] + steps_of(length, limit, budget))
        assert due[-1] == harness.work()
        for tick in range(due[-1]):
            assert len(harness.present) == sum(end > tick for end in due)
            harness.step()
        assert harness.present == []

    @settings(max_examples=200, deadline=None)
    @given(harness=harnesses, arrivals=st.lists(st.tuples(st.integers(0, 6), requests), max_size=25))
    def test_every_sequence_ends_within_the_work_that_was_there(
        self, harness: Harness, arrivals: list[tuple[int, tuple[int, int, int, int]]]
    ) -> None:
        tick, due = 0, dict[int, int]()  # by arrival

        def step() -> None:
            nonlocal tick
            harness.step()
            tick += 1
            assert all(tick < due[s.arrival[0]] for s in harness.present)

        capacity = len(harness.memory) * harness.pool.block_size
        for gap, (length, zeros, new, n_samples) in arrivals:
            for _ in range(gap):
                step()
            limit = min(length + new - 1, capacity)
            added = harness.add(prompt(min(length, limit), zeros), limit, min(n_samples, harness.scheduler.max_running))
            due[added.arrival[0]] = tick + harness.work()
        while harness.present:
            step()
