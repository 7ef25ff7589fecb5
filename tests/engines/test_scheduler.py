"""What each sequence computes in which step, worked out by hand. Blocks are of 4 tokens."""

from __future__ import annotations

import pytest

from nanoinfer.errors import RequestError
from tests.engines.harness import Harness, names


class TestPlans:
    def test_decodes_first_and_prompts_share_the_rest(self) -> None:
        harness = Harness(32, budget=8)
        for length in (3, 3, 9):
            harness.add([length] * length)
        assert harness.steps(2) == ["a[0:3] b[0:3] c[0:2]", "a[3:4] b[3:4] c[2:8]"]
        harness.add([4] * 7)
        # The last token of c's prompt is one token like any other; a prompt is begun with what is left.
        assert harness.steps(3) == [
            "a[4:5] b[4:5] c[8:9] d[0:5]",
            "a[5:6] b[5:6] c[9:10] d[5:7]",
            "a[6:7] b[6:7] c[10:11] d[7:8]",
        ]
        harness.check()

    def test_a_long_prompt_comes_in_chunks_and_the_last_one_is_sampled(self) -> None:
        harness = Harness(32, budget=8)
        long = harness.add([1] * 20)
        ends = []
        for _ in range(3):
            plan = harness.scheduler.schedule()
            assert [(c.sequence, c.n, plan.n_tokens) for c in plan.chunks] == [(long, c.n, c.n) for c in plan.chunks]
            ends.append([(c.start, c.n, c.reaches_end) for c in plan.chunks])
            harness.scheduler.commit(plan)
        assert ends == [[(0, 8, False)], [(8, 8, False)], [(16, 4, True)]]

    @pytest.mark.parametrize(("length", "chunks"), [(7, "a[0:7]"), (8, "a[0:8]"), (9, "a[0:8]")])
    def test_a_prompt_as_long_as_the_budget(self, length: int, chunks: str) -> None:
        harness = Harness(32, budget=8)
        harness.add([1] * length)
        harness.add([2])
        assert harness.step() == chunks + (" b[0:1]" if length == 7 else "")

    @pytest.mark.parametrize(("length", "start"), [(7, 4), (8, 4), (9, 8)])
    def test_a_prompt_begins_after_what_it_finds(self, length: int, start: int) -> None:
        harness = Harness(32, budget=20)
        first, second = harness.add([1] * length), harness.add([1] * length)
        assert harness.step() == f"a[0:{length}] b[0:{length}]"  # nothing is written yet that b could find
        third = harness.add([1] * length)
        assert harness.step() == f"a[{length}:{length + 1}] b[{length}:{length + 1}] c[{start}:{length}]"
        assert [s.cached_tokens for s in (first, second, third)] == [0, 0, start]
        assert (harness.pool.counts.asked_tokens, harness.pool.counts.found_tokens) == (3 * length, start)

    def test_no_sequence_left(self) -> None:
        harness = Harness(2)
        assert harness.step() == ""
        assert (harness.scheduler.slots_taken, harness.scheduler.waste) == (0, 0.0)

    def test_waste_is_the_unfilled_share(self) -> None:
        harness = Harness(8)
        harness.add([1] * 5)
        harness.step()
        assert harness.scheduler.waste == 1 - 5 / 8
        harness.add([1] * 5)
        harness.step()  # 6 and 5 tokens, of which 4 are shared: 3 blocks with 7
        assert harness.scheduler.waste == 1 - 7 / 12


class TestQueue:
    def test_no_sequence_overtakes_one_that_waits_for_blocks(self) -> None:
        harness = Harness(6)
        harness.add([1] * 12)
        big, small = harness.add([2] * 10), harness.add([3])
        # Three blocks left, one set aside for a: b needs three, c but one.
        assert harness.step() == "a[0:12]"
        assert names(harness.scheduler.waiting) == "b c"
        harness.scheduler.remove(big)
        assert harness.step() == "a[12:13] c[0:1]"
        assert harness.scheduler.running[1] is small

    def test_nor_one_that_waits_for_a_slot(self) -> None:
        harness = Harness(32, running=4)
        harness.add([1] * 3, limit=4, n_samples=3)
        harness.add([2], n_samples=2)
        harness.add([3])
        assert harness.step() == "a[0:3]"  # which takes three slots from the start
        assert harness.scheduler.slots_taken == 3
        assert names(harness.present) == "a a' a'' b c"
        assert harness.step() == "a[3:4] a'[3:4] a''[3:4]"
        assert harness.step() == "b[0:1] c[0:1]"
        assert names(harness.present) == "b b' c"
        harness.check()

    @pytest.mark.parametrize(("n_blocks", "plan"), [(7, "a[0:9] b[0:5]"), (6, "a[0:9] b[0:5]"), (5, "a[0:9]")])
    def test_one_block_for_each_running_sequence_is_set_aside(self, n_blocks: int, plan: str) -> None:
        harness = Harness(n_blocks)
        harness.add([1] * 9)  # 3 blocks, and 1 set aside
        harness.add([2] * 5, limit=6)  # 2 blocks
        assert harness.step() == plan

    @pytest.mark.parametrize(("n_blocks", "admitted"), [(9, True), (8, False)])
    def test_so_is_what_the_others_still_need(self, n_blocks: int, admitted: bool) -> None:
        """Before d: a has 1 block and b 2; c has 1 and needs 1 more; 3 are set aside, and d needs 1."""
        harness = Harness(n_blocks, budget=11)
        harness.add([1] * 2)
        harness.add([2] * 5)
        harness.add([3] * 6)
        assert harness.step() == "a[0:2] b[0:5] c[0:4]"
        harness.add([4])
        assert harness.step() == "a[2:3] b[5:6] c[4:6]" + " d[0:1]" * admitted

    def test_trying_to_admit_counts_nothing(self) -> None:
        harness = Harness(5)
        harness.add([1] * 9)
        harness.add([1] * 13)
        assert harness.steps(3) == ["a[0:9]", "a[9:10]", "a[10:11]"]
        assert (harness.pool.counts.asked_tokens, harness.pool.counts.found_tokens) == (9, 0)


class TestPreemption:
    def test_the_youngest_makes_room_and_is_the_first_to_come_back(self) -> None:
        harness = Harness(4)
        harness.add([1] * 7, limit=10)
        young = harness.add([2] * 4)
        assert harness.steps(2) == ["a[0:7] b[0:4]", "a[7:8] b[4:5]"]
        late = harness.add([3])
        assert harness.step() == "a[8:9]"  # a's third block; b held the other two
        assert (names(harness.scheduler.waiting), young.preemptions, harness.scheduler.preemptions) == ("b c", 1, 1)
        assert (young.table, young.remaining, late.preemptions) == (None, 6, 0)
        harness.check()
        assert harness.steps(2) == ["a[9:10]", "b[4:6] c[0:1]"]  # b's first block was still there
        assert young.cached_tokens == 4
        assert harness.step() == "b[6:7] c[1:2]"

    def test_without_sharing_all_of_it_is_computed_again(self) -> None:
        harness = Harness(4, share=False)
        harness.add([1] * 7, limit=10)
        harness.add([2] * 4)
        assert harness.steps(5)[2:] == ["a[8:9]", "a[9:10]", "b[0:6]"]

    def test_the_youngest_itself_goes_where_it_has_no_room(self) -> None:
        harness = Harness(4)
        harness.add([1] * 3, limit=6)
        young = harness.add([2] * 7)
        assert harness.steps(4) == ["a[0:3] b[0:7]", "a[3:4] b[7:8]", "a[4:5]", "a[5:6]"]
        assert (young.preemptions, names(harness.present)) == (1, "b")
        assert harness.step() == "b[8:9]"

    def test_a_prompt_waits_for_blocks_with_what_it_has_and_goes_when_a_decode_needs_one(self) -> None:
        harness = Harness(6, running=2, budget=3)
        harness.add([1] * 3, limit=16)
        prompt = harness.add([2] * 16)
        plans = harness.steps(10)
        assert plans[:2] == ["a[0:3]", "a[3:4] b[0:2]"]
        assert plans[6:9] == ["a[8:9] b[10:12]", "a[9:10]", "a[10:11]"]  # three blocks each, and no more
        assert (prompt.table is not None, prompt.preemptions) == (True, 0)
        assert harness.steps(2) == ["a[12:13]", "a[13:14]"]
        assert (prompt.table, prompt.preemptions) == (None, 1)

    def test_several_go_where_one_does_not_suffice(self) -> None:
        """Two samples share all their blocks but the last: the younger's going frees one that no other holds."""
        harness = Harness(5)
        harness.add([1] * 7, limit=16)
        harness.add([2] * 3, n_samples=2)
        assert harness.steps(2) == ["a[0:7] b[0:3]", "a[7:8] b[3:4] b'[3:4]"]
        assert harness.step() == "a[8:9] b[4:5]"
        assert (names(harness.scheduler.running), names(harness.scheduler.waiting)) == ("a b", "b'")
        harness.check()

    def test_alone_it_can_always_go_on(self) -> None:
        harness = Harness(3)
        harness.add([1] * 5, limit=12)
        harness.add([2] * 5, limit=12)
        while harness.present:
            harness.step()
            harness.check()
        assert harness.pool.available == 3


class TestSamples:
    def test_they_share_the_prompt_and_stand_together(self) -> None:
        harness = Harness(32, running=5)
        first = harness.add([1] * 6, n_samples=3)
        harness.add([2])
        assert harness.step() == "a[0:6] b[0:1]"
        assert names(harness.present) == "a a' a'' b"
        assert (first.n_samples, harness.scheduler.slots_taken, harness.pool.used) == (1, 4, 3)
        plan = harness.scheduler.schedule()
        assert plan.copies == [(1, 3), (1, 4)]  # the last of the three writes into the block itself
        assert [s.cached_tokens for s in harness.scheduler.running] == [0] * 4

    def test_all_of_them_found_what_their_prompt_found(self) -> None:
        harness = Harness(32)
        first = harness.add([1] * 9)
        harness.step()
        harness.scheduler.remove(first)
        harness.add([1] * 9, n_samples=2)
        assert harness.step() == "b[8:9]"
        assert [s.cached_tokens for s in harness.scheduler.running] == [8, 8]
        assert harness.pool.counts.found_tokens == 8  # once: it was computed once

    def test_a_full_last_block_is_not_copied(self) -> None:
        harness = Harness(32)
        harness.add([1] * 8, n_samples=3)
        harness.step()
        assert harness.scheduler.schedule().copies == []
        assert harness.pool.used == 2 + 3

    def test_preempted_one_by_one_they_come_back_in_order(self) -> None:
        harness = Harness(4, running=4)
        harness.add([1] * 6, limit=16, n_samples=3)
        order = []
        while harness.present:
            harness.step()
            harness.check()
            order.append(names(harness.present))
        assert order[0] == "a a' a''"
        assert harness.scheduler.preemptions > 0
        assert list(dict.fromkeys(order)) == ["a a' a''", "a' a''", "a''", ""]


class TestOut:
    def test_a_waiting_sequence(self) -> None:
        harness = Harness(2)
        for token in (1, 2, 3):
            harness.add([token] * 4)
        harness.step()
        assert names(harness.scheduler.waiting) == "b c"
        harness.scheduler.remove(harness.scheduler.waiting[0])
        assert names(harness.present) == "a c"
        harness.check()

    def test_a_running_sequence(self) -> None:
        harness = Harness(8)
        gone, other = harness.add([1] * 4), harness.add([2] * 4)
        harness.step()
        harness.scheduler.remove(gone)
        assert (gone.table, harness.pool.used, harness.scheduler.running) == (None, 1, [other])
        assert harness.step() == "b[4:5]"
        harness.check()

    def test_a_sequence_whose_prompt_is_half_computed(self) -> None:
        harness = Harness(8, budget=6)
        gone = harness.add([1] * 10)
        harness.step()
        harness.scheduler.remove(gone)
        assert (harness.pool.used, harness.present) == (0, [])
        harness.add([1] * 10)
        assert harness.step() == "b[4:10]"  # its first block was full, and stays to be found

    def test_samples_leave_one_by_one(self) -> None:
        harness = Harness(8)
        first = harness.add([1] * 6, n_samples=3)
        harness.step()
        harness.scheduler.remove(first)
        harness.check()
        assert (harness.pool.used, harness.step()) == (2, "a'[6:7] a''[6:7]")


class TestRefusals:
    @pytest.mark.parametrize("limit", [8, 9])
    def test_what_never_fits(self, limit: int) -> None:
        harness = Harness(2)
        if limit == 8:
            harness.add([1], limit)
            return
        with pytest.raises(RequestError, match="may grow to 9 tokens cannot fit in a KV cache of 8: shorten it"):
            harness.add([1], limit)
        assert harness.present == []

    def test_more_samples_than_slots(self) -> None:
        harness = Harness(8, running=3)
        harness.add([1], n_samples=3)
        with pytest.raises(RequestError, match="n = 4 samples cannot run together: at most 3"):
            harness.add([1], n_samples=4)
        assert names(harness.present) == "a"

    @pytest.mark.parametrize(("running", "budget"), [(0, 5), (4, 4), (4, 0)])
    def test_a_budget_that_leaves_nothing_for_prompts(self, running: int, budget: int) -> None:
        with pytest.raises(RequestError, match=f"token_budget must be above max_running.* got {budget} and {running}"):
            Harness(8, running, budget)

    def test_a_budget_that_just_does(self) -> None:
        harness = Harness(8, 2, 3)
        harness.add([1])
        harness.step()
        harness.add([2] * 3)
        assert harness.steps(2) == ["a[1:2] b[0:2]", "a[2:3] b[2:3]"]


class TestCheck:
    """Broken accounts are detected."""

    def harness(self) -> Harness:
        harness = Harness(8, running=2)
        harness.add([1] * 3)
        harness.add([2] * 3)
        harness.step()
        harness.add([3] * 3)
        harness.check()
        return harness

    def test_the_order_of_arrival(self) -> None:
        harness = self.harness()
        harness.scheduler.running.reverse()
        with pytest.raises(AssertionError, match="arrival order violated"):
            harness.scheduler.check()

    def test_more_than_there_are_slots(self) -> None:
        harness = self.harness()
        harness.scheduler.running[0].samples *= 2
        with pytest.raises(AssertionError, match="more sequences run than there are slots"):
            harness.scheduler.check()

    def test_a_waiting_sequence_that_holds_blocks(self) -> None:
        harness = self.harness()
        harness.scheduler.waiting[0].table = harness.scheduler.running[0].table
        with pytest.raises(AssertionError, match="a waiting sequence holds blocks"):
            harness.scheduler.check()

    def test_blocks_that_no_sequence_holds(self) -> None:
        harness = self.harness()
        harness.scheduler.running.pop()
        with pytest.raises(AssertionError, match="references and tables differ"):
            harness.scheduler.check()
