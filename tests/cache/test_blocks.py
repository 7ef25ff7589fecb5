"""Who owns which block: exact accounts, exact prefixes, and nothing shared that two may write."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanoinfer.cache.blocks import ROOT, BlockPool, BlockTable, PoolCounts
from nanoinfer.errors import RequestError
from tests.examples import examples

SIZE = 4
A, B, C, D = ([first] * SIZE for first in (10, 20, 30, 40))  # whole blocks of text


def write(pool: BlockPool, table: BlockTable, text: Sequence[int]) -> list[tuple[int, int]]:
    """Compute what the table lacks of the text, in one go; the copies that took."""
    lacking = len(text) - table.length
    copies = pool.grow(table, lacking)
    pool.commit(table, text, lacking)
    return copies


def opened(pool: BlockPool, text: Sequence[int]) -> BlockTable:
    """A text that is wholly in the cache."""
    table = pool.open(text)
    write(pool, table, text)
    return table


def found(pool: BlockPool, text: Sequence[int]) -> int:
    """Tokens of the text that are found; they are not held."""
    table = pool.open(text)
    length = table.length
    pool.close(table)
    return length


class TestLengths:
    @pytest.mark.parametrize(
        ("tokens", "blocks", "full"),
        [(1, 1, 0), (3, 1, 0), (4, 1, 1), (5, 2, 1), (7, 2, 1), (8, 2, 2), (9, 3, 2)],
    )
    def test_around_the_edges_of_a_block(self, tokens: int, blocks: int, full: int) -> None:
        pool, text = BlockPool(3, SIZE), list(range(tokens))
        table = pool.open(text)
        assert (table.blocks, table.length, pool.used, pool.room(table)) == ([], 0, 0, 12)
        assert pool.blocks_for(tokens) == pool.missing(table, tokens) == blocks
        assert pool.grow(table, tokens) == []
        assert (table.blocks, table.length) == (list(range(blocks)), 0)  # taken, and nothing written yet
        assert (pool.missing(table, tokens), pool.room(table), pool.available) == (0, 12, 3 - blocks)
        pool.commit(table, text, tokens)
        assert (table.length, table.hashed_blocks, pool.room(table)) == (tokens, full, 12 - tokens)
        assert pool.live_tokens([table]) == tokens
        pool.check([table])
        pool.close(table)
        assert table.blocks == []
        assert (table.length, table.hashed_blocks, table.prefix) == (0, 0, ROOT)
        assert (pool.used, pool.available) == (0, 3)
        pool.check([])
        assert sorted(pool.drop_cached()) == list(range(full))

    def test_one_token_at_a_time(self) -> None:
        pool, table = BlockPool(3, SIZE), BlockTable()
        wanted = []
        for length in range(12):
            wanted.append(pool.missing(table, 1))
            assert pool.room(table) == 12 - length
            write(pool, table, list(range(length + 1)))
        assert wanted == [1, 0, 0, 0] * 3
        assert (table.blocks, pool.room(table)) == ([0, 1, 2], 0)
        assert (pool.missing(table, 1), pool.missing(table, 5)) == (1, 2)

    def test_blocks_of_one_token(self) -> None:
        pool = BlockPool(3, 1)
        table = opened(pool, [5, 6, 7])
        assert (table.hashed_blocks, pool.room(table)) == (3, 0)
        other = pool.fork(table)
        assert (pool.missing(other, 1), pool.room(other)) == (1, 0)  # a new block, and never a copy
        pool.close(table)
        pool.close(other)
        assert [found(pool, [5, 6, 7][:n]) for n in range(4)] == [0, 0, 1, 2]

    @pytest.mark.parametrize("sizes", [(0, 16), (-1, 16), (4, 0), (4, -2)])
    def test_a_pool_of_nothing(self, sizes: tuple[int, int]) -> None:
        with pytest.raises(RequestError, match=f"at least 1 block of 1 token, got {sizes[0]} blocks of {sizes[1]}"):
            BlockPool(*sizes)


class TestPrefixes:
    @pytest.mark.parametrize(
        ("tokens", "length"), [(0, 0), (3, 0), (4, 0), (5, 4), (7, 4), (8, 4), (9, 8), (12, 8), (13, 12), (14, 12)]
    )
    def test_whole_blocks_are_found_and_the_last_token_never(self, tokens: int, length: int) -> None:
        pool, text = BlockPool(8, SIZE), [*A, *B, *C, 50]
        pool.close(opened(pool, text))
        table = pool.open([*text, 51][:tokens])
        assert (table.length, table.hashed_blocks, table.blocks) == (
            length,
            length // SIZE,
            [0, 1, 2][: length // SIZE],
        )
        pool.check([table])

    def test_found_while_others_hold_it_and_after(self) -> None:
        pool = BlockPool(8, SIZE)
        first = opened(pool, [*A, *B, 1])
        second = pool.open([*A, *B, 2])
        assert second.blocks == first.blocks[:2] == [0, 1]
        pool.check([first, second])
        assert pool.used == 3
        pool.close(first)
        assert pool.used == 2
        pool.close(second)
        assert (pool.used, found(pool, [*A, *B, 3])) == (0, 8)

    def test_the_same_block_behind_another_prefix_is_another_block(self) -> None:
        pool = BlockPool(8, SIZE)
        pool.close(opened(pool, [*A, *B]))
        assert [found(pool, [*text, 0]) for text in (B, [*C, *B], [*B, *A], [*B, *B], A[1:] + B)] == [0] * 5
        pool.close(opened(pool, [*C, *B]))
        first, second = pool.open([*A, *B, 0]), pool.open([*C, *B, 0])
        assert (first.length, second.length) == (8, 8)
        assert not set(first.blocks) & set(second.blocks)

    def test_nor_is_it_found_where_the_text_before_ends_alike(self) -> None:
        """[A B D] and [C B D]: the last two blocks hold the same tokens, and the first tells them apart."""
        pool = BlockPool(12, SIZE)
        pool.close(opened(pool, [*A, *B, *D]))
        pool.close(opened(pool, [*C, *B]))
        assert [found(pool, [*text, *B, *D, 0]) for text in (A, C)] == [12, 8]

    def test_keys_of_equal_hash_are_told_apart(self) -> None:
        pool = BlockPool(8, 2)
        assert hash((ROOT, (-1, 5))) == hash((ROOT, (-2, 5)))  # what a dict of hashes alone would confuse
        table = opened(pool, [-1, 5])
        assert found(pool, [-2, 5, 0]) == 0
        other = opened(pool, [-2, 5])
        assert (found(pool, [-1, 5, 0]), found(pool, [-2, 5, 0])) == (2, 2)
        assert (
            (pool.open([-1, 5, 0]).blocks, pool.open([-2, 5, 0]).blocks) == (table.blocks, other.blocks) == ([0], [1])
        )
        # And one block on, behind prefixes that are alike.
        write(pool, table, [-1, 5, 7, -1])
        assert [found(pool, [-1, 5, 7, last, 0]) for last in (-1, -2)] == [4, 2]
        assert found(pool, [-2, 5, 7, -1, 0]) == 2

    def test_taken_is_not_written(self) -> None:
        """Blocks are found once their tokens are committed, not when they are handed out."""
        pool, text = BlockPool(4, SIZE), [*A, *B]
        table = pool.open(text)
        pool.grow(table, 8)
        lengths = [found(pool, [*text, 0])]
        for n in (3, 1, 3, 1):
            pool.commit(table, text, n)
            lengths.append(found(pool, [*text, 0]))
        assert lengths == [0, 0, 4, 4, 8]

    def test_sharing_turned_off(self) -> None:
        pool = BlockPool(4, SIZE, share_prefixes=False)
        table = opened(pool, [*A, *B])
        assert (table.length, table.hashed_blocks, found(pool, [*A, *B, 0])) == (8, 0, 0)
        pool.close(table)
        assert (found(pool, [*A, *B, 0]), pool.available, pool.drop_cached()) == (0, 4, [])

    def test_dropped_content_is_gone_and_its_blocks_are_free(self) -> None:
        pool = BlockPool(4, SIZE)
        held = opened(pool, A)
        pool.close(opened(pool, [*A, *B, *C]))
        assert sorted(pool.drop_cached()) == [1, 2]
        assert (found(pool, [*A, *B, 0]), pool.available, pool.counts.evicted) == (4, 3, 0)
        pool.check([held])
        pool.close(opened(pool, [*A, *D, 1]))  # blocks that were dropped serve again
        assert found(pool, [*A, *D, 0]) == 8

    @examples(100)
    @given(st.lists(st.lists(st.integers(0, 1), max_size=9), max_size=12), st.integers(1, 3))
    def test_the_longest_common_prefix_and_nothing_else(self, texts: list[list[int]], size: int) -> None:
        pool, seen = BlockPool(200, size), list[list[int]]()
        for text in texts:
            in_common = (n for n in range(0, len(text), size) if any(s[:n] == text[:n] and len(s) >= n for s in seen))
            table = pool.open(text)
            assert table.length == max(in_common, default=0)
            write(pool, table, text)
            pool.check([table])
            pool.close(table)
            seen.append(text)


class TestEviction:
    def test_free_blocks_go_first_then_the_end_of_what_was_used_longest_ago(self) -> None:
        pool = BlockPool(6, SIZE)
        for text in ([*A, *B], [*C, *D]):  # blocks 0 1 and 2 3
            pool.close(opened(pool, text))
        taker = BlockTable()
        lengths = []
        for blocks in range(1, 7):
            pool.grow(taker, blocks * SIZE)
            lengths.append((found(pool, [*A, *B, 0]), found(pool, [*C, *D, 0]), pool.counts.evicted))
        assert taker.blocks == [4, 5, 1, 0, 3, 2]
        assert lengths == [(8, 8, 0), (8, 8, 0), (4, 8, 1), (0, 8, 2), (0, 4, 3), (0, 0, 4)]
        pool.check([taker])

    def test_use_renews(self) -> None:
        pool = BlockPool(4, SIZE)
        for text in ([*A, *B], [*C, *D]):
            pool.close(opened(pool, text))
        assert found(pool, [*A, 0]) == 4  # the beginning alone
        taker = BlockTable()
        pool.grow(taker, 4 * SIZE)
        assert taker.blocks == [1, 3, 2, 0]

    def test_what_somebody_holds_stays(self) -> None:
        pool = BlockPool(4, SIZE)
        pool.close(opened(pool, [*A, *B, *C]))
        holder, taker = pool.open([*A, *B, 0]), BlockTable()
        assert (pool.available, pool.room(taker), pool.room(holder)) == (2, 8, 8)
        pool.grow(taker, 8)
        assert (holder.blocks, taker.blocks) == ([0, 1], [3, 2])
        assert (pool.room(holder), pool.room(taker)) == (0, 8)  # of the 8, none is written yet
        pool.check([holder, taker])

    def test_a_child_outlives_its_parent_unfound_and_harmless(self) -> None:
        """The child's holder has a parent of its own, unfiled because the same content was filed already."""
        pool = BlockPool(4, SIZE)
        first, second = pool.open(A), pool.open(A)
        write(pool, first, A)
        write(pool, second, A)
        write(pool, second, [*A, *B])  # block 2, filed behind block 0
        pool.close(first)
        taker = BlockTable()
        pool.grow(taker, 2 * SIZE)  # block 3, then block 0 is evicted: the parent of block 2
        assert (second.blocks, taker.blocks, pool.counts.evicted) == ([1, 2], [3, 0], 1)
        assert found(pool, [*A, *B, 0]) == 0
        pool.check([second, taker])
        pool.commit(taker, [*C, *D], 8)
        # Block 0 is D behind C now, and block 2 still B behind A: a number belongs to a text, not to a block.
        assert found(pool, [*C, *D, *B, 0]) == 8
        pool.close(taker)
        third = opened(pool, [*A, *C])  # the same parent once more, under a number of its own
        assert (found(pool, [*A, *C, 0]), found(pool, [*A, *B, 0])) == (8, 4)
        for table in (second, third):
            pool.close(table)
        pool.check([])
        assert pool.available == 4


class TestForks:
    @pytest.mark.parametrize("length", [5, 6, 7])
    def test_who_writes_first_gets_a_copy_and_the_last_has_it_to_itself(self, length: int) -> None:
        pool, text = BlockPool(8, SIZE), [*A, *B][:length]
        tables = [opened(pool, text)]
        tables += [pool.fork(tables[0]) for _ in range(2)]
        assert [t.blocks for t in tables] == [[0, 1]] * 3
        assert (pool.used, pool.live_tokens(tables)) == (2, length)
        pool.check(tables)
        assert [pool.missing(t, 1) for t in tables] == [1, 1, 1]
        assert [pool.room(t) for t in tables] == [SIZE * 2 - length + 5 * SIZE] * 3
        assert [write(pool, t, [*text, new]) for t, new in zip(tables, (1, 2, 3), strict=True)] == [
            [(1, 2)],
            [(1, 3)],
            [],
        ]
        assert [t.blocks for t in tables] == [[0, 2], [0, 3], [0, 1]]
        assert (pool.used, pool.counts.copied) == (4, 2)
        assert pool.live_tokens(tables) == SIZE + 3 * (length + 1 - SIZE)
        pool.check(tables)

    @pytest.mark.parametrize("length", [4, 8])
    def test_full_blocks_are_never_copied(self, length: int) -> None:
        pool, text = BlockPool(8, SIZE), [*A, *B][:length]
        first = opened(pool, text)
        second = pool.fork(first)
        assert (pool.missing(second, 1), pool.missing(first, 0)) == (1, 0)
        assert [write(pool, t, [*text, 1]) for t in (second, first)] == [[], []]
        assert first.blocks[:-1] == second.blocks[:-1] == list(range(length // SIZE))
        assert first.blocks[-1] != second.blocks[-1]
        assert pool.counts.copied == 0

    def test_the_copy_needs_a_block_even_where_there_is_slack(self) -> None:
        pool = BlockPool(2, SIZE)
        first = opened(pool, [*A, 1])
        second = pool.fork(first)
        assert (pool.available, pool.room(first), pool.room(second)) == (0, 0, 0)
        pool.close(first)
        assert (pool.room(second), pool.missing(second, 1)) == (3, 0)
        assert write(pool, second, [*A, 1, 2]) == []

    def test_the_last_block_left_is_the_copys_and_is_filled(self) -> None:
        pool = BlockPool(4, SIZE)
        first = opened(pool, [*A, 1])
        second = pool.fork(first)
        assert (pool.room(second), pool.missing(second, 7)) == (7, 2)
        assert pool.grow(second, 7) == [(1, 2)]  # one copy, however much is written
        assert (second.blocks, pool.available, pool.room(first)) == ([0, 2, 3], 0, 3)
        pool.check([first, second])

    def test_a_copy_may_evict_but_not_what_it_copies(self) -> None:
        pool = BlockPool(3, SIZE)
        pool.close(opened(pool, B))
        first = opened(pool, [*A, 1])
        second = pool.fork(first)
        assert (first.blocks, write(pool, second, [*A, 1, 2])) == ([1, 2], [(2, 0)])
        assert (found(pool, [*B, 0]), pool.counts.evicted) == (0, 1)

    def test_forks_file_what_they_write(self) -> None:
        pool = BlockPool(8, SIZE)
        first = opened(pool, [*A, 1, 2])
        second = pool.fork(first)
        write(pool, first, [*A, 1, 2, 3, 4])
        write(pool, second, [*A, 1, 2, 3, 5])
        assert [pool.open([*A, 1, 2, 3, last, 0]).blocks for last in (4, 5)] == [first.blocks, second.blocks]
        assert first.blocks != second.blocks


class TestDuplicates:
    def test_the_first_is_filed_and_texts_go_on_behind_it(self) -> None:
        pool = BlockPool(6, SIZE)
        first, second = pool.open([*A, 1]), pool.open([*A, 2])  # neither finds the other: both begin at once
        write(pool, first, [*A, 1])
        write(pool, second, [*A, 2])
        assert (first.blocks, second.blocks, pool.live_tokens([first, second])) == ([0, 1], [2, 3], 10)
        assert first.prefix == second.prefix != ROOT
        write(pool, second, [*A, 2, 2, 2, 2])
        assert pool.open([*A, 2, 2, 2, 2, 0]).blocks == [0, 3]  # the first's beginning, the second's end

    def test_the_other_is_free_when_given_back(self) -> None:
        pool = BlockPool(6, SIZE)
        first, second = pool.open(A), pool.open(A)
        for table in (first, second):
            write(pool, table, A)
        pool.close(second)
        pool.close(first)
        pool.check([])
        assert (pool.available, pool.drop_cached()) == (6, [0])


class TestAccounts:
    def test_live_tokens_count_a_slot_once(self) -> None:
        pool = BlockPool(12, SIZE)
        first = opened(pool, [*A, *B, 1])
        second = opened(pool, [*A, *B, 2, 2])  # finds both blocks
        assert pool.live_tokens([]) == pool.live_tokens([BlockTable()]) == 0
        assert pool.live_tokens([first]) == 9
        assert pool.live_tokens([first, second]) == pool.live_tokens([second, first]) == 8 + 1 + 2
        third = pool.fork(second)
        assert pool.live_tokens([first, second, third]) == 11
        write(pool, third, [*A, *B, 2, 2, 3])
        assert pool.live_tokens([first, second, third]) == 8 + 1 + 2 + 3
        pool.grow(first, 8)  # taken, not written
        assert pool.live_tokens([first]) == 9

    def test_counts(self) -> None:
        pool = BlockPool(2, SIZE)
        assert pool.counts == PoolCounts(0, 0, 0, 0)
        table = opened(pool, [*A, 1])
        other = pool.fork(table)
        pool.close(table)
        write(pool, other, [*A, 1, 2])
        pool.close(other)
        pool.close(opened(pool, [*B, *C]))
        assert pool.counts == PoolCounts(evicted=1)  # tokens looked up and found are counted by the scheduler

    CORRUPTIONS: list[tuple[str, Callable[[Any], object]]] = [  # noqa: RUF012
        ("free twice", lambda pool: pool._free.append(pool._free[0])),
        ("in two states", lambda pool: pool._free.append(0)),
        ("in two states", lambda pool: pool._free.append(2)),
        ("in two states", lambda pool: pool._cached.update({0: None})),
        ("is lost", lambda pool: pool._free.pop()),
        ("is lost", lambda pool: pool._cached.pop(2)),
        ("is lost", lambda pool: pool._free.__setitem__(0, 99)),  # a foreign one in its place
        ("released more often", lambda pool: pool._refs.__setitem__(0, -1)),
        ("a cached block cannot be found", lambda pool: pool._key_of.pop(2)),
        ("a free block can be found", lambda pool: pool._free.append(pool._cached.popitem()[0])),
        ("another's content", lambda pool: pool._key_of.__setitem__(2, pool._key_of[0])),
        ("another's content", lambda pool: pool._by_content.__setitem__(pool._key_of[2], (2, 3))),
        ("another's content", lambda pool: pool._by_content.__setitem__((99, (1, 2, 3, 4)), (99, 4))),
        ("another's content", lambda pool: pool._key_of.pop(0)),
    ]

    @pytest.mark.parametrize(("says", "corrupt"), CORRUPTIONS)
    def test_each_corruption_is_seen(self, says: str, corrupt: Callable[[Any], object]) -> None:
        pool = BlockPool(6, SIZE)
        table = opened(pool, [*A, 1])  # blocks 0 (filed) and 1; 2 is cached, the others are free
        pool.close(opened(pool, B))
        pool.check([table])
        corrupt(pool)
        with pytest.raises(AssertionError, match=says):
            pool.check()

    def test_tables_that_do_not_match_are_seen(self) -> None:
        pool = BlockPool(6, SIZE)
        table = opened(pool, [*A, 1])
        pool.check()
        for tables in ([], [table, table], [table, BlockTable([0], 1)], [BlockTable([0, 2], 5)]):
            with pytest.raises(AssertionError, match="references and tables differ"):
                pool.check(tables)
        table.length = 9
        with pytest.raises(AssertionError, match="longer than its blocks"):
            pool.check([table])
