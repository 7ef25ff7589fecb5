"""Text to ids and back: exact against Hugging Face tokenizers built from the same tables."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as HFTokenizer

from nanoinfer.errors import TokenizerError
from nanoinfer.models import fetch
from nanoinfer.models.gguf_file import read_gguf
from nanoinfer.text import tokenizer_files
from nanoinfer.text.tokenizer import Detokenizer, Tokenizer
from nanoinfer.text.tokenizer_files import CHAR_TO_BYTE, GPT2_PATTERN, LLAMA3_PATTERN

ALPHABET = [*"aeiou stnrEST  \n\t\r0123456789'.,!?-_()<>|", "'s", "'ll", " the", "\u00e9", "\u4e2d", "\U0001f999"]
ALPHABET += ["\u00a0", "\u3000", "\u0661", "\u00b2", "\u0301", "\u0130", "<|im_end|>", "  ", "\x04", "\ufffd"]


def table(tokenizer: Tokenizer) -> dict[int, bytes]:
    """Id to bytes of all tokens but the special ones."""
    return {i: raw for i in range(tokenizer.n_vocab) if (raw := tokenizer.token_bytes(i))}


def missing_bytes(tokenizer: Tokenizer) -> set[int]:
    known = set(table(tokenizer).values())
    return {b for b in range(256) if bytes([b]) not in known}


def random_texts(n: int, seed: int = 0) -> list[str]:
    draw = random.Random(seed)
    texts = ["".join(draw.choices(ALPHABET, k=draw.randint(0, 24))) for _ in range(n // 2)]
    points = [*range(0x250), *range(0x2000, 0x2100), *range(0x4E00, 0x4E40), *range(0x1F600, 0x1F640)]
    return texts + ["".join(map(chr, draw.choices(points, k=draw.randint(0, 16)))) for _ in range(n - n // 2)]


@pytest.fixture(scope="module")
def smollm_meta() -> dict[str, Any]:
    return dict(read_gguf(fetch.fetch(fetch.SMOLLM2)).meta)


@pytest.fixture(scope="module")
def smollm(smollm_meta: dict[str, Any]) -> Tokenizer:
    return tokenizer_files.from_gguf(smollm_meta)


def tiny_tables() -> tuple[dict[str, int], list[str]]:
    """All 256 bytes, and a few merges."""
    tokens = [char for char, _ in sorted(CHAR_TO_BYTE.items(), key=lambda item: item[1])]
    merges = ["h e", "l l", "he ll", "hell o", "Ġ w", "Ġ Ġ", "1 2", "12 3"]
    tokens += [merge.replace(" ", "") for merge in merges]
    return {token: i for i, token in enumerate(tokens)}, merges


def tokenizer_json(pre: dict[str, Any], **model: Any) -> dict[str, Any]:
    vocab, merges = tiny_tables()
    return {
        "added_tokens": [
            {"id": 300, "content": "<|begin_of_text|>", "special": True},
            {"id": 301, "content": "<|eot_id|>", "special": True},
        ],
        "normalizer": None,
        "pre_tokenizer": pre,
        "post_processor": None,
        "model": {"type": "BPE", "vocab": vocab, "merges": merges} | model,
    }


LLAMA3_PRE = {
    "type": "Sequence",
    "pretokenizers": [
        {"type": "Split", "pattern": {"Regex": LLAMA3_PATTERN}, "behavior": "Isolated", "invert": False},
        {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
    ],
}
BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}


# --- SmolLM2 ------------------------------------------------------------------


def test_smollm2_equals_hugging_face_on_random_texts(smollm: Tokenizer, smollm_meta: dict[str, Any]) -> None:
    tokens = smollm_meta["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in smollm_meta["tokenizer.ggml.merges"]]
    reference = HFTokenizer(models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=merges))
    reference.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    missing = missing_bytes(smollm)
    # Over a byte that has no token tokenizers joins the neighbours; we cut there, as llama.cpp does.
    texts = [text for text in random_texts(4400) if missing.isdisjoint(text.encode())]
    assert len(texts) > 3000
    pairs = zip(texts, reference.encode_batch(texts), strict=True)
    wrong = [text for text, theirs in pairs if smollm.encode(text) != theirs.ids]
    assert wrong == []


def test_smollm2_vocabulary(smollm: Tokenizer) -> None:
    assert smollm.n_vocab == 49_152 and len(smollm.specials) == 17 and len(table(smollm)) == 49_135
    assert (smollm.bos_id, smollm.eos_ids, smollm.adds_bos) == (1, frozenset({2}), False)
    assert smollm.decode(smollm.encode("Hello, wörld 123!\n  \U0001f999")) == "Hello, wörld 123!\n  \U0001f999"


def test_bytes_without_a_token_are_left_out(smollm: Tokenizer) -> None:
    missing = missing_bytes(smollm)
    assert bytes(sorted(missing)).hex(" ") == "04 06 13 14 16 1d c0 c1 f1 f2 f5 f6 f7 f8 f9 fa fb fc fd fe ff"
    assert smollm.encode("\x04") == []
    assert smollm.encode("a\x04b") == [*smollm.encode("a"), *smollm.encode("b")]
    ids = smollm.encode("\U00050000")  # F1 90 80 80: the first byte has no token, the others have
    assert [smollm.token_bytes(i) for i in ids] == [b"\x90", b"\x80", b"\x80"]
    assert all(i < smollm.n_vocab for i in ids)


def test_specials_are_read_only_on_request(smollm: Tokenizer) -> None:
    plain = smollm.encode("<|im_end|>")
    assert 2 not in plain and smollm.decode(plain) == "<|im_end|>"
    assert smollm.encode("<|im_end|>", specials=True) == [2]
    assert smollm.decode([2]) == "" and smollm.token_bytes(2) == b"" and smollm.token_bytes(10**6) == b""


def test_long_runs(smollm: Tokenizer) -> None:
    assert smollm.decode(smollm.encode(" " * 1_000_000)) == " " * 1_000_000
    assert smollm.decode(smollm.encode("a" * 100_000)) == "a" * 100_000
    assert smollm.encode("") == []
    with pytest.raises(TokenizerError, match="cannot split this text of 1,000,001 characters"):
        smollm.encode(" " * 1_000_000 + "a")  # tiktoken panics: a BaseException


def test_lone_surrogates_are_refused(smollm: Tokenizer) -> None:
    with pytest.raises(TokenizerError, match="lone surrogate at character 2"):
        smollm.encode("ab\ud83e")


# --- constructors -------------------------------------------------------------


def test_gpt2_from_vocab_and_merges(tmp_path: Path) -> None:
    vocab, merges = tiny_tables()
    vocab["<|endoftext|>"] = len(vocab)
    (tmp_path / "vocab.json").write_text(json.dumps(vocab), encoding="utf-8")
    (tmp_path / "merges.txt").write_text("#version: 0.2\n" + "\n".join(merges) + "\n", encoding="utf-8")
    ours = tokenizer_files.from_folder(tmp_path)
    assert ours is not None
    reference = HFTokenizer(models.BPE(vocab=vocab, merges=[tuple(merge.split(" ")) for merge in merges]))
    reference.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    assert all(ours.encode(text) == reference.encode(text).ids for text in random_texts(1000, seed=1))
    assert ours.token_bytes(ours.encode("hello")[0]) == b"hello"
    end = vocab["<|endoftext|>"]
    assert ours.eos_ids == {end} and ours.bos_id is None and not ours.adds_bos
    assert ours.encode("<|endoftext|>", specials=True) == [end]
    with pytest.raises(TokenizerError, match="no begin-of-sequence"):
        ours.encode("a", bos=True)


@pytest.mark.parametrize("ignore_merges", [True, False])
def test_llama3_tokenizer_json_equals_hugging_face(ignore_merges: bool) -> None:
    data = tokenizer_json(LLAMA3_PRE, ignore_merges=ignore_merges)
    ours = tokenizer_files.from_tokenizer_json(data)
    merges = [tuple(merge.split(" ")) for merge in data["model"]["merges"]]
    reference = HFTokenizer(models.BPE(vocab=data["model"]["vocab"], merges=merges, ignore_merges=ignore_merges))
    reference.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(LLAMA3_PATTERN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    reference.decoder = decoders.ByteLevel()
    reference.add_special_tokens([AddedToken("<|begin_of_text|>")])
    assert all(ours.encode(text) == reference.encode(text).ids for text in random_texts(1000, seed=2))


def test_byte_level_alone_means_gpt2_pattern() -> None:
    assert tokenizer_files.from_tokenizer_json(tokenizer_json(BYTE_LEVEL)).pattern == GPT2_PATTERN
    pairs = [merge.split(" ") for merge in tiny_tables()[1]]  # newer files write pairs
    assert tokenizer_files.from_tokenizer_json(tokenizer_json(BYTE_LEVEL, merges=pairs)).encode("hello") == [259]


def test_folder_settings(tmp_path: Path) -> None:
    data = tokenizer_json(LLAMA3_PRE)
    data["post_processor"] = {
        "type": "Sequence",
        "processors": [
            {"type": "ByteLevel"},
            {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "<|begin_of_text|>", "type_id": 0}}]},
        ],
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(data), encoding="utf-8")
    (tmp_path / "config.json").write_text('{"eos_token_id": 5}', encoding="utf-8")
    plain = tokenizer_files.from_folder(tmp_path)
    assert plain is not None and plain.eos_ids == {5} and plain.bos_id == 300 and plain.adds_bos
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 8]}', encoding="utf-8")
    named = {"bos_token": {"content": "<|begin_of_text|>"}, "eos_token": "<|eot_id|>", "chat_template": "x"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(named), encoding="utf-8")
    full = tokenizer_files.from_folder(tmp_path)
    assert full is not None and full.eos_ids == {7, 8, 301} and full.bos_id == 300 and full.chat_template == "x"
    assert full.encode("hello", bos=full.adds_bos) == [300, 259]
    (tmp_path / "empty").mkdir()
    assert tokenizer_files.from_folder(tmp_path / "empty") is None


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"pre_tokenizer": {"type": "Metaspace"}}, "pre-tokenizer 'Metaspace' is not supported"),
        ({"pre_tokenizer": BYTE_LEVEL | {"add_prefix_space": True}}, "add_prefix_space"),
        ({"normalizer": {"type": "NFC"}}, "'normalizer' is not supported"),
        ({"model": {"type": "Unigram", "vocab": []}}, "only byte-level BPE"),
        (
            {"model": {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 3, "ba": 2}, "merges": ["a b", "b a"]}},
            "merge order",
        ),
        ({"model": {"type": "BPE", "vocab": {"a": 0}, "merges": ["a b"]}}, "merge 1"),
        ({"model": {}}, "damaged"),
    ],
)
def test_what_tiktoken_cannot_run_exactly_is_refused(change: dict[str, Any], says: str) -> None:
    with pytest.raises(TokenizerError, match=says):
        tokenizer_files.from_tokenizer_json(tokenizer_json(BYTE_LEVEL) | change)


def test_damaged_files(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{", encoding="utf-8")
    with pytest.raises(TokenizerError, match=r"tokenizer\.json: damaged"):
        tokenizer_files.from_folder(tmp_path)
    with pytest.raises(TokenizerError, match="pre-tokenizer 'qwen2'"):
        tokenizer_files.from_gguf({"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "qwen2"})
    with pytest.raises(TokenizerError, match=r"'tokenizer\.ggml\.tokens' is missing"):
        tokenizer_files.from_gguf({"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "smollm"})
    with pytest.raises(TokenizerError, match="tokenizer 'llama' is not byte-level"):
        tokenizer_files.from_gguf({"tokenizer.ggml.model": "llama"})


# --- detokeniser --------------------------------------------------------------

LLAMA, E_ACUTE, REPLACEMENT = [172, 253, 99, 247], [127, 102], [171, 123, 121]
BYTES = tokenizer_files.byte_level()


def ids_of(raw: bytes) -> list[int]:
    known = {raw: i for i, raw in table(BYTES).items()}
    return [known[bytes([b])] for b in raw]


def stream(ids: list[int]) -> tuple[list[str], str]:
    detokenizer = Detokenizer(BYTES)
    return [detokenizer.push(i) for i in ids], detokenizer.finish()


def test_byte_level_order() -> None:
    assert ids_of(b"!~\xa1\xac\xae\xff\x00 ") == [0, 93, 94, 105, 106, 187, 188, 188 + 32]
    assert ids_of("\U0001f999".encode()) == LLAMA and ids_of("é".encode()) == E_ACUTE
    assert BYTES.n_vocab == 256 and BYTES.encode("é") == E_ACUTE and BYTES.bos_id is None


@pytest.mark.parametrize(
    ("ids", "deltas", "rest"),
    [
        (LLAMA, ["", "", "", "\U0001f999"], ""),
        (LLAMA[:3], ["", "", ""], "\ufffd"),
        (ids_of(b"\xf0\x9fA"), ["", "", "\ufffdA"], ""),
        (ids_of(b"\xc0\x880"), ["\ufffd", "\ufffd", "0"], ""),
        (REPLACEMENT, ["", "", "\ufffd"], ""),
    ],
)
def test_streamed_text(ids: list[int], deltas: list[str], rest: str) -> None:
    assert stream(ids) == (deltas, rest)
    assert "".join(deltas) + rest == BYTES.decode(ids)


def test_interleaved_streams_keep_their_own_state() -> None:
    one, two = Detokenizer(BYTES), Detokenizer(BYTES)
    first, second = "", ""
    for a, b in zip(LLAMA, [*E_ACUTE, None, None], strict=True):
        first += one.push(a)
        second += "" if b is None else two.push(b)
    assert (first + one.finish(), second + two.finish()) == ("\U0001f999", "é")


def test_joined_stream_is_the_whole_decode() -> None:
    draw = random.Random(3)
    for _ in range(500):
        ids = [draw.randrange(256) for _ in range(draw.randint(0, 12))]
        deltas, rest = stream(ids)
        assert "".join(deltas) + rest == BYTES.decode(ids)
