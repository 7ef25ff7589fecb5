"""The routing policy: no Ray, no model."""

from __future__ import annotations

import json
import random

from nanoinfer.cluster.prefix import CHARACTERS, IDS, MAX_CHUNKS, PrefixPolicy, chunks_of


def body(**fields: object) -> bytes:
    return json.dumps(fields).encode()


def policy(names: str, **options: float) -> PrefixPolicy[str]:
    made: PrefixPolicy[str] = PrefixPolicy(**options)  # type: ignore[arg-type]
    made.keep(names)
    return made


def test_prompts_that_begin_alike_share_the_numbers_of_their_beginning_and_no_more() -> None:
    shared = "x" * (3 * CHARACTERS)
    one, other = chunks_of(body(prompt=shared + "a" * CHARACTERS)), chunks_of(body(prompt=shared + "b" * CHARACTERS))
    assert len(one) == len(other) == 4
    assert one[:3] == other[:3]
    assert one[3] != other[3]
    # The same chunk after another beginning has another hash.
    assert not set(chunks_of(body(prompt="y" + shared))) & set(one)
    assert chunks_of(body(prompt=shared + "a")) == one[:3]  # a part of a chunk is none


def test_texts_ids_lists_and_conversations_have_beginnings_and_anything_else_has_none() -> None:
    ids = list(range(2 * IDS + 3))
    assert len(chunks_of(body(prompt=ids))) == 2
    assert chunks_of(body(prompt=[ids, [7] * IDS])) == chunks_of(body(prompt=ids))  # the first of several
    turns = [{"role": "user", "content": "q" * CHARACTERS}, {"role": "assistant", "content": "a" * CHARACTERS}]
    more = [*turns, {"role": "user", "content": "and?" * CHARACTERS}]
    assert chunks_of(body(messages=more))[: len(chunks_of(body(messages=turns)))] == chunks_of(body(messages=turns))
    assert len(chunks_of(body(prompt="x" * (CHARACTERS * (MAX_CHUNKS + 9))))) == MAX_CHUNKS
    for none in (b"", b"{", b"[]", b"3", body(), body(prompt=None), body(prompt=[]), body(messages=[3]), b"[" * 99_999):
        assert chunks_of(none) == []


def test_a_prompt_goes_where_the_longest_part_of_its_beginning_is() -> None:
    found = policy("abc")
    found.begin("1", "b", [1, 2])
    found.begin("2", "c", [1, 2, 3])
    assert found.rank([1, 2, 3, 4])[0] == "c"
    assert found.rank([1, 2, 9]) == ["b", "c", "a"]  # as long at both, so who has waited longer
    assert found.rank([9])[0] == "a"  # known nowhere: the least to do
    found.end("1")
    found.end("2")
    assert found.load == {"a": 0, "b": 0, "c": 0}
    assert found.rank([1, 2, 3])[0] == "c"  # what was served is still in the cache


def test_load_is_bounded_and_what_spills_over_is_known_in_both_places() -> None:
    found = policy("ab", slack=0.5, floor=2)
    sent = []
    for n in range(100):  # one beginning, and no request ever ends
        sent.append(found.rank([1])[0])
        found.begin(str(n), sent[-1], [1])
        mean = (n + 1) / 2
        assert max(found.load.values()) <= max(2, -(-1.5 * (mean + 0.5) // 1)), n
    assert sent[:2] == ["a", "a"] or sent[:2] == ["b", "b"]  # up to the floor, affinity alone
    assert min(found.load.values()) >= 25  # of 100, the mean being 50 and the slack 0.5
    for n in range(100):
        found.end(str(n))
    assert found.depths([1]) == {"a": 1, "b": 1}


def test_without_a_known_beginning_all_replicas_get_the_same() -> None:
    found = policy("abcd")
    for n in range(40):
        found.begin(str(n), found.rank([1000 + n])[0], [1000 + n])
    assert set(found.load.values()) == {10}


def test_one_that_is_gone_is_not_ranked_and_takes_its_load_with_it() -> None:
    found = policy("ab")
    found.begin("1", "a", [1])
    found.begin("2", "b", [2])
    found.keep("bc")
    assert found.load == {"b": 1, "c": 0}
    assert found.rank([1])[0] == "c"  # a's beginning went with it, so the least to do
    assert found.known[1] == set()  # nor does its name stay
    found.end("1")  # its end comes late, and belongs to no replica
    found.end("2")
    found.end("2")
    assert found.load == {"b": 0, "c": 0}
    found.begin("3", "a", [1])  # a choice that was made before it went
    assert found.load == {"b": 0, "c": 0}
    found.drop("b")
    assert found.rank([2]) == ["c"]
    found.keep("")
    assert found.rank([2]) == []


def test_a_request_that_is_sent_elsewhere_counts_there_only() -> None:
    found = policy("ab")
    found.begin("1", "a", [1])
    found.begin("1", "b", [1])
    assert found.load == {"a": 0, "b": 1}


def test_memory_is_bounded_and_a_long_beginning_is_forgotten_before_the_short_ones_in_it() -> None:
    found = policy("ab", capacity=4)
    found.begin("1", "a", [1, 2, 3, 4])
    found.begin("2", "b", [9])
    assert list(found.known) == [3, 2, 1, 9]
    assert found.depths([1, 2, 3, 4]) == {"a": 3}
    found.begin("3", "a", [1])  # used again, so kept
    found.begin("4", "b", [8, 7])
    assert set(found.known) == {9, 1, 8, 7}


def test_conversations_find_their_past_and_taking_turns_does_not() -> None:
    """64 conversations of 6 turns on 4 replicas, 16 requests under way: the share of chunks that are found."""

    def found_share(by_prefix: bool) -> tuple[float, float]:
        rng, made = random.Random(0), policy("abcd")
        pasts = {talk: [talk * 1000] for talk in range(64)}
        caches: dict[str, set[int]] = {name: set() for name in "abcd"}
        asked = hit = 0
        turns = [talk for talk in pasts for _ in range(6)]
        rng.shuffle(turns)
        peak = 0.0
        for n, talk in enumerate(turns):
            chunks = pasts[talk]
            at = made.rank(chunks if by_prefix else [])[0]
            made.begin(str(n), at, chunks)
            made.end(str(n - 16))
            peak = max(peak, max(made.load.values()) / 4)
            asked, hit = asked + len(chunks), hit + sum(chunk in caches[at] for chunk in chunks)
            caches[at].update(chunks)
            chunks += [chunks[-1] + 1, chunks[-1] + 2]  # the answer, and the next question
        return hit / asked, peak

    (good, peak), (poor, _) = found_share(True), found_share(False)
    assert good > 0.6  # of 64 x 6 turns' chunks, 1/6 are new in any case: at best 0.69
    assert poor < 0.4
    assert peak <= 1.6  # of the mean
