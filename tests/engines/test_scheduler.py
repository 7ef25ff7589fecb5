"""Who computes what in which step, worked out by hand. Blocks are of 4 tokens."""

from __future__ import annotations

import pytest

from nanoinfer.errors import RequestError
from tests.engines.house import House, names


class TestPlans:
    def test_decodes_first_and_prompts_share_the_rest(self) -> None:
        house = House(32, budget=8)
        for length in (3, 3, 9):
            house.add([length] * length)
        assert house.steps(2) == ["a[0:3] b[0:3] c[0:2]", "a[3:4] b[3:4] c[2:8]"]
        house.add([4] * 7)
        # The last token of c's prompt is one token like any other; a prompt is begun with what is left.
        assert house.steps(3) == [
            "a[4:5] b[4:5] c[8:9] d[0:5]",
            "a[5:6] b[5:6] c[9:10] d[5:7]",
            "a[6:7] b[6:7] c[10:11] d[7:8]",
        ]
        house.check()

    def test_a_long_prompt_comes_in_chunks_and_the_last_one_is_sampled(self) -> None:
        house = House(32, budget=8)
        long = house.add([1] * 20)
        ends = []
        for _ in range(3):
            plan = house.scheduler.schedule()
            assert [(c.sequence, c.n, plan.n_tokens) for c in plan.chunks] == [(long, c.n, c.n) for c in plan.chunks]
            ends.append([(c.start, c.n, c.reaches_end) for c in plan.chunks])
            house.scheduler.commit(plan)
        assert ends == [[(0, 8, False)], [(8, 8, False)], [(16, 4, True)]]

    @pytest.mark.parametrize(("length", "chunks"), [(7, "a[0:7]"), (8, "a[0:8]"), (9, "a[0:8]")])
    def test_a_prompt_as_long_as_the_budget(self, length: int, chunks: str) -> None:
        house = House(32, budget=8)
        house.add([1] * length)
        house.add([2])
        assert house.step() == chunks + (" b[0:1]" if length == 7 else "")

    @pytest.mark.parametrize(("length", "start"), [(7, 4), (8, 4), (9, 8)])
    def test_a_prompt_begins_behind_what_it_finds(self, length: int, start: int) -> None:
        house = House(32, budget=20)
        first, second = house.add([1] * length), house.add([1] * length)
        assert house.step() == f"a[0:{length}] b[0:{length}]"  # nothing is written yet that b could find
        third = house.add([1] * length)
        assert house.step() == f"a[{length}:{length + 1}] b[{length}:{length + 1}] c[{start}:{length}]"
        assert [s.found_tokens for s in (first, second, third)] == [0, 0, start]
        assert (house.pool.counts.asked_tokens, house.pool.counts.found_tokens) == (3 * length, start)

    def test_nobody_there(self) -> None:
        house = House(2)
        assert house.step() == ""
        assert (house.scheduler.places_taken, house.scheduler.waste) == (0, 0.0)

    def test_waste_is_the_unfilled_share(self) -> None:
        house = House(8)
        house.add([1] * 5)
        house.step()
        assert house.scheduler.waste == 1 - 5 / 8
        house.add([1] * 5)
        house.step()  # 6 and 5 tokens, of which 4 are shared: 3 blocks with 7
        assert house.scheduler.waste == 1 - 7 / 12


class TestQueue:
    def test_nobody_overtakes_one_who_waits_for_blocks(self) -> None:
        house = House(6)
        house.add([1] * 12)
        big, small = house.add([2] * 10), house.add([3])
        # Three blocks left, one set aside for a: b needs three, c but one.
        assert house.step() == "a[0:12]"
        assert names(house.scheduler.waiting) == "b c"
        house.scheduler.remove(big)
        assert house.step() == "a[12:13] c[0:1]"
        assert house.scheduler.running[1] is small

    def test_nor_one_who_waits_for_a_place(self) -> None:
        house = House(32, running=4)
        house.add([1] * 3, limit=4, width=3)
        house.add([2], width=2)
        house.add([3])
        assert house.step() == "a[0:3]"  # which takes three places from the start
        assert house.scheduler.places_taken == 3
        assert names(house.present) == "a a' a'' b c"
        assert house.step() == "a[3:4] a'[3:4] a''[3:4]"
        assert house.step() == "b[0:1] c[0:1]"
        assert names(house.present) == "b b' c"
        house.check()

    @pytest.mark.parametrize(("n_blocks", "plan"), [(7, "a[0:9] b[0:5]"), (6, "a[0:9] b[0:5]"), (5, "a[0:9]")])
    def test_one_block_for_each_who_runs_is_set_aside(self, n_blocks: int, plan: str) -> None:
        house = House(n_blocks)
        house.add([1] * 9)  # 3 blocks, and 1 set aside
        house.add([2] * 5, limit=6)  # 2 blocks
        assert house.step() == plan

    @pytest.mark.parametrize(("n_blocks", "admitted"), [(9, True), (8, False)])
    def test_so_is_what_the_others_still_need(self, n_blocks: int, admitted: bool) -> None:
        """Before d: a has 1 block and b 2; c has 1 and needs 1 more; 3 are set aside, and d needs 1."""
        house = House(n_blocks, budget=11)
        house.add([1] * 2)
        house.add([2] * 5)
        house.add([3] * 6)
        assert house.step() == "a[0:2] b[0:5] c[0:4]"
        house.add([4])
        assert house.step() == "a[2:3] b[5:6] c[4:6]" + " d[0:1]" * admitted

    def test_trying_to_admit_counts_nothing(self) -> None:
        house = House(5)
        house.add([1] * 9)
        house.add([1] * 13)
        assert house.steps(3) == ["a[0:9]", "a[9:10]", "a[10:11]"]
        assert (house.pool.counts.asked_tokens, house.pool.counts.found_tokens) == (9, 0)


class TestPreemption:
    def test_the_youngest_makes_room_and_is_the_first_to_come_back(self) -> None:
        house = House(4)
        house.add([1] * 7, limit=10)
        young = house.add([2] * 4)
        assert house.steps(2) == ["a[0:7] b[0:4]", "a[7:8] b[4:5]"]
        late = house.add([3])
        assert house.step() == "a[8:9]"  # a's third block; b held the other two
        assert (names(house.scheduler.waiting), young.preemptions, house.scheduler.preemptions) == ("b c", 1, 1)
        assert (young.table, young.remaining, late.preemptions) == (None, 6, 0)
        house.check()
        assert house.steps(2) == ["a[9:10]", "b[4:6] c[0:1]"]  # b's first block was still there
        assert young.found_tokens == 4
        assert house.step() == "b[6:7] c[1:2]"

    def test_without_sharing_all_of_it_is_computed_again(self) -> None:
        house = House(4, share=False)
        house.add([1] * 7, limit=10)
        house.add([2] * 4)
        assert house.steps(5)[2:] == ["a[8:9]", "a[9:10]", "b[0:6]"]

    def test_the_youngest_itself_goes_where_it_has_no_room(self) -> None:
        house = House(4)
        house.add([1] * 3, limit=6)
        young = house.add([2] * 7)
        assert house.steps(4) == ["a[0:3] b[0:7]", "a[3:4] b[7:8]", "a[4:5]", "a[5:6]"]
        assert (young.preemptions, names(house.present)) == (1, "b")
        assert house.step() == "b[8:9]"

    def test_a_prompt_waits_for_blocks_with_what_it_has_and_goes_when_a_decode_needs_one(self) -> None:
        house = House(6, running=2, budget=3)
        house.add([1] * 3, limit=16)
        prompt = house.add([2] * 16)
        plans = house.steps(10)
        assert plans[:2] == ["a[0:3]", "a[3:4] b[0:2]"]
        assert plans[6:9] == ["a[8:9] b[10:12]", "a[9:10]", "a[10:11]"]  # three blocks each, and no more
        assert (prompt.table is not None, prompt.preemptions) == (True, 0)
        assert house.steps(2) == ["a[12:13]", "a[13:14]"]
        assert (prompt.table, prompt.preemptions) == (None, 1)

    def test_several_go_where_one_does_not_suffice(self) -> None:
        """Two samples share all their blocks but the last: the younger's going frees one, held by nobody else."""
        house = House(5)
        house.add([1] * 7, limit=16)
        house.add([2] * 3, width=2)
        assert house.steps(2) == ["a[0:7] b[0:3]", "a[7:8] b[3:4] b'[3:4]"]
        assert house.step() == "a[8:9] b[4:5]"
        assert (names(house.scheduler.running), names(house.scheduler.waiting)) == ("a b", "b'")
        house.check()

    def test_alone_it_can_always_go_on(self) -> None:
        house = House(3)
        house.add([1] * 5, limit=12)
        house.add([2] * 5, limit=12)
        while house.present:
            house.step()
            house.check()
        assert house.pool.available == 3


class TestSamples:
    def test_they_share_the_prompt_and_stand_together(self) -> None:
        house = House(32, running=5)
        first = house.add([1] * 6, width=3)
        house.add([2])
        assert house.step() == "a[0:6] b[0:1]"
        assert names(house.present) == "a a' a'' b"
        assert (first.width, house.scheduler.places_taken, house.pool.used) == (1, 4, 3)
        plan = house.scheduler.schedule()
        assert plan.copies == [(1, 3), (1, 4)]  # the last of the three writes into the block itself
        assert [s.found_tokens for s in house.scheduler.running] == [0] * 4

    def test_all_of_them_found_what_their_prompt_found(self) -> None:
        house = House(32)
        first = house.add([1] * 9)
        house.step()
        house.scheduler.remove(first)
        house.add([1] * 9, width=2)
        assert house.step() == "b[8:9]"
        assert [s.found_tokens for s in house.scheduler.running] == [8, 8]
        assert house.pool.counts.found_tokens == 8  # once: it was computed once

    def test_a_full_last_block_is_not_copied(self) -> None:
        house = House(32)
        house.add([1] * 8, width=3)
        house.step()
        assert house.scheduler.schedule().copies == []
        assert house.pool.used == 2 + 3

    def test_thrown_out_one_by_one_they_come_back_in_order(self) -> None:
        house = House(4, running=4)
        house.add([1] * 6, limit=16, width=3)
        order = []
        while house.present:
            house.step()
            house.check()
            order.append(names(house.present))
        assert order[0] == "a a' a''"
        assert house.scheduler.preemptions > 0
        assert list(dict.fromkeys(order)) == ["a a' a''", "a' a''", "a''", ""]


class TestOut:
    def test_one_who_waits(self) -> None:
        house = House(2)
        for token in (1, 2, 3):
            house.add([token] * 4)
        house.step()
        assert names(house.scheduler.waiting) == "b c"
        house.scheduler.remove(house.scheduler.waiting[0])
        assert names(house.present) == "a c"
        house.check()

    def test_one_who_runs(self) -> None:
        house = House(8)
        gone, other = house.add([1] * 4), house.add([2] * 4)
        house.step()
        house.scheduler.remove(gone)
        assert (gone.table, house.pool.used, house.scheduler.running) == (None, 1, [other])
        assert house.step() == "b[4:5]"
        house.check()

    def test_one_whose_prompt_is_half_computed(self) -> None:
        house = House(8, budget=6)
        gone = house.add([1] * 10)
        house.step()
        house.scheduler.remove(gone)
        assert (house.pool.used, house.present) == (0, [])
        house.add([1] * 10)
        assert house.step() == "b[4:10]"  # its first block was full, and stays to be found

    def test_samples_leave_one_by_one(self) -> None:
        house = House(8)
        first = house.add([1] * 6, width=3)
        house.step()
        house.scheduler.remove(first)
        house.check()
        assert (house.pool.used, house.step()) == (2, "a'[6:7] a''[6:7]")


class TestRefusals:
    @pytest.mark.parametrize("limit", [8, 9])
    def test_what_never_fits(self, limit: int) -> None:
        house = House(2)
        if limit == 8:
            house.add([1], limit)
            return
        with pytest.raises(RequestError, match="may grow to 9 tokens cannot fit in a KV cache of 8: shorten it"):
            house.add([1], limit)
        assert house.present == []

    def test_more_samples_than_places(self) -> None:
        house = House(8, running=3)
        house.add([1], width=3)
        with pytest.raises(RequestError, match="n = 4 samples cannot run together: at most 3"):
            house.add([1], width=4)
        assert names(house.present) == "a"

    @pytest.mark.parametrize(("running", "budget"), [(0, 5), (4, 4), (4, 0)])
    def test_a_budget_that_leaves_nothing_for_prompts(self, running: int, budget: int) -> None:
        with pytest.raises(RequestError, match=f"token_budget must be above max_running.* got {budget} and {running}"):
            House(8, running, budget)

    def test_a_budget_that_just_does(self) -> None:
        house = House(8, 2, 3)
        house.add([1])
        house.step()
        house.add([2] * 3)
        assert house.steps(2) == ["a[1:2] b[0:2]", "a[2:3] b[2:3]"]


class TestCheck:
    """What must not be is seen."""

    def house(self) -> House:
        house = House(8, running=2)
        house.add([1] * 3)
        house.add([2] * 3)
        house.step()
        house.add([3] * 3)
        house.check()
        return house

    def test_one_who_was_overtaken(self) -> None:
        house = self.house()
        house.scheduler.running.reverse()
        with pytest.raises(AssertionError, match="overtaken"):
            house.scheduler.check()

    def test_more_than_there_are_places(self) -> None:
        house = self.house()
        house.scheduler.running[0].width = 2
        with pytest.raises(AssertionError, match="more run than there are places"):
            house.scheduler.check()

    def test_one_who_waits_and_holds_blocks(self) -> None:
        house = self.house()
        house.scheduler.waiting[0].table = house.scheduler.running[0].table
        with pytest.raises(AssertionError, match="one that waits holds blocks"):
            house.scheduler.check()

    def test_blocks_that_nobody_holds(self) -> None:
        house = self.house()
        house.scheduler.running.pop()
        with pytest.raises(AssertionError, match="references and tables differ"):
            house.scheduler.check()
