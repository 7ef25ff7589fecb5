"""Where vocabularies come from: a folder's files, a GGUF header, a file of tiktoken ranks.

They are read from what comes with the weights, so that no tokenizer is ever fetched from a second place. What
tiktoken cannot run exactly is refused: a tokenizer that is nearly right makes a model that is wrong.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from nanoinfer.errors import TokenizerError
from nanoinfer.store import read_json
from nanoinfer.text.tokenizer import GPT2_PATTERN, Tokenizer

#: SmolLM2's: digits are split off first, then GPT-2's rule runs on each piece. Here both steps in one.
SMOLLM_PATTERN = r"""\p{N}|'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?[^\s\p{L}\p{N}]++|\s++(?=\p{N}|\z)|\s+(?![^\s\p{N}])|\s+"""
#: Llama 3's, as its tokenizer.json writes it.
LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
#: ``tokenizer.ggml.pre`` of a GGUF to the pattern it means.
GGUF_PATTERNS: Mapping[str, str] = {
    "gpt-2": GPT2_PATTERN,
    "smollm": SMOLLM_PATTERN,
    "llama-bpe": LLAMA3_PATTERN,
    "llama3": LLAMA3_PATTERN,
}


class UnsupportedTokenizer(TokenizerError):
    """An undamaged tokenizer that tiktoken would not run exactly: its model takes token ids only."""

    def __init__(self, problem: str) -> None:
        super().__init__(f"{problem}; give prompts as token ids")


# --- byte-level BPE -------------------------------------------------------------


def _byte_order() -> list[int]:
    """The 256 bytes in the order of GPT-2's vocabulary: the printable ones, then the rest."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    return printable + [byte for byte in range(256) if byte not in set(printable)]


#: GPT-2 writes bytes as printable characters: unprintable ones are moved to U+0100 and above.
CHAR_TO_BYTE = {chr(b if i < 188 else 256 + i - 188): b for i, b in enumerate(_byte_order())}


def _to_bytes(token: str) -> bytes | None:
    """The bytes that a token stands for, or None where it is not in the byte alphabet (a special)."""
    try:
        return bytes(CHAR_TO_BYTE[char] for char in token)
    except KeyError:
        return None


def _ranks(vocab: Mapping[str, int], merges: Iterable[str | Sequence[str]], where: str) -> dict[bytes, int]:
    """Bytes to id for every token that the merges can make.

    tiktoken knows one order only, that of the ids; it merges exactly as the list
    says if the list's results have ids that never fall.
    """
    ranks: dict[bytes, int] = {bytes([b]): vocab[c] for c, b in CHAR_TO_BYTE.items() if c in vocab}
    last = -1
    for number, merge in enumerate(merges, start=1):
        parts = merge.split(" ") if isinstance(merge, str) else list(merge)
        token = "".join(parts)
        if len(parts) != 2 or token not in vocab or (raw := _to_bytes(token)) is None:
            raise TokenizerError(f"{where}: merge {number} ({merge!r}) does not make a token of the vocabulary")
        if vocab[token] < last:
            raise UnsupportedTokenizer(f"{where}: token ids are not in merge order (merge {number}, {merge!r})")
        last = ranks[raw] = vocab[token]
    return ranks


def byte_level() -> Tokenizer:
    """256 tokens, one a byte, in GPT-2's byte order: for random tiny models."""
    return Tokenizer({bytes([b]): i for i, b in enumerate(_byte_order())}, name="bytes")


def from_vocab_merges(
    vocab: Mapping[str, int],
    merges: Iterable[str | Sequence[str]],
    *,
    specials: Mapping[str, int] | None = None,
    name: str = "vocab and merges",
    **settings: Any,
) -> Tokenizer:
    """From GPT-2's two tables. Tokens that no merge makes are special unless ``specials`` says which are.

    ``settings`` are those of :class:`Tokenizer`. Raises :class:`TokenizerError` where
    the ids are not in merge order.
    """
    ranks = _ranks(vocab, merges, name)
    if specials is None:
        made = set(ranks.values())
        specials = {token: i for token, i in vocab.items() if i not in made}
    return Tokenizer(ranks, specials=specials, name=name, **settings)


def from_tiktoken(path: Path, **settings: Any) -> Tokenizer:
    """From a file of ``base64 rank`` lines, as tiktoken itself keeps them."""
    try:
        lines = path.read_text("ascii").split("\n")
        pairs = (line.split() for line in lines if line)
        ranks = {codecs.decode(raw.encode(), "base64"): int(rank) for raw, rank in pairs}
    except (OSError, ValueError) as error:
        raise TokenizerError(f"{path}: not a file of tiktoken ranks ({error})") from None
    return Tokenizer(ranks, **settings)


# --- GGUF -----------------------------------------------------------------------


def from_gguf(meta: Mapping[str, Any], name: str = "GGUF tokenizer") -> Tokenizer:
    """From a GGUF header (key to value)."""
    key = "tokenizer.ggml."
    if (kind := meta.get(key + "model")) != "gpt2":
        raise UnsupportedTokenizer(f"{name}: tokenizer '{kind}' is not byte-level BPE")
    pre = meta.get(key + "pre", "default")
    if pre not in GGUF_PATTERNS:
        known = ", ".join(GGUF_PATTERNS)
        raise UnsupportedTokenizer(f"{name}: pre-tokenizer '{pre}' is not supported (known: {known})")
    for part in ("tokens", "merges"):
        if not meta.get(key + part):
            raise TokenizerError(f"{name}: '{key}{part}' is missing; is the file damaged?")
    bos_id = meta.get(key + "bos_token_id")
    return from_vocab_merges(
        {token: i for i, token in enumerate(meta[key + "tokens"])},
        meta[key + "merges"],
        pattern=GGUF_PATTERNS[pre],
        bos_id=bos_id,
        eos_ids=gguf_eos_ids(meta),
        # If absent, llama.cpp's default for this pre-tokenizer counts: Llama 3 adds it, the others do not.
        adds_bos=bool(meta.get(key + "add_bos_token", GGUF_PATTERNS[pre] is LLAMA3_PATTERN)),
        chat_template=meta.get("tokenizer.chat_template"),
        name=name,
    )


def gguf_eos_ids(meta: Mapping[str, Any]) -> frozenset[int]:
    """Every id that a GGUF header says ends a sequence, a turn or a message."""
    ends = (meta.get(f"tokenizer.ggml.{end}_token_id") for end in ("eos", "eot", "eom"))
    return frozenset(end for end in ends if isinstance(end, int))


# --- Hugging Face ---------------------------------------------------------------


def from_tokenizer_json(source: Path | Mapping[str, Any], **settings: Any) -> Tokenizer:
    """From a Hugging Face ``tokenizer.json``, as a path or parsed.

    ``settings`` are those of :class:`Tokenizer` and win over the file.
    Raises :class:`TokenizerError` for anything tiktoken would not run exactly.
    """
    data = _optional_json(source) if isinstance(source, Path) else source
    name = str(source) if isinstance(source, Path) else "tokenizer.json"
    try:
        model = data["model"]
        pattern = _pattern_of(data, name)
        added = {str(token["content"]): int(token["id"]) for token in data.get("added_tokens") or ()}
        vocab = {token: i for token, i in model["vocab"].items() if token not in added}
        bos_id = _template_bos(data, added)
        settings = {"bos_id": bos_id, "adds_bos": bos_id is not None, "name": name} | settings
        return from_vocab_merges(vocab, model["merges"], specials=added, pattern=pattern, **settings)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise TokenizerError(f"{name}: damaged or not a tokenizer.json ({type(error).__name__}: {error})") from None


def _pattern_of(data: Mapping[str, Any], name: str) -> str:
    """The pattern that equals a tokenizer.json's pipeline, or a refusal."""
    model = data["model"]
    if model.get("type", "BPE") != "BPE" or model.get("byte_fallback"):
        raise UnsupportedTokenizer(f"{name}: only byte-level BPE is supported")
    odd = [key for key in ("dropout", "continuing_subword_prefix", "end_of_word_suffix") if model.get(key)]
    if odd or data.get("normalizer"):
        raise UnsupportedTokenizer(f"{name}: '{(odd or ['normalizer'])[0]}' is not supported")
    pre = data.get("pre_tokenizer") or {}
    steps = pre.get("pretokenizers", []) if pre.get("type") == "Sequence" else [pre]
    match [(step.get("type"), step) for step in steps]:
        case [("ByteLevel", last)] if last.get("use_regex", True):
            pattern = GPT2_PATTERN
        case [("Digits", {"individual_digits": True}), ("ByteLevel", last)] if last.get("use_regex", True):
            pattern = SMOLLM_PATTERN
        case [
            ("Split", {"pattern": {"Regex": str(regex)}, "behavior": "Isolated", "invert": False}),
            ("ByteLevel", {"use_regex": False} as last),
        ]:
            pattern = regex + r"|[\s\S]"  # tiktoken would drop what a pattern leaves unmatched
        case _:
            kinds = " + ".join(str(step.get("type")) for step in steps)
            raise UnsupportedTokenizer(f"{name}: pre-tokenizer '{kinds}' is not supported")
    if last.get("add_prefix_space"):
        raise UnsupportedTokenizer(f"{name}: add_prefix_space is not supported")
    return pattern


def _template_bos(data: Mapping[str, Any], added: Mapping[str, int]) -> int | None:
    """The id that the post-processor puts before a single text, if it puts one."""
    post = data.get("post_processor") or {}
    for step in post.get("processors", []) if post.get("type") == "Sequence" else [post]:
        if step.get("type") == "TemplateProcessing":
            first = step["single"][0].get("SpecialToken")
            return added.get(first["id"]) if first else None
    return None


def from_folder(folder: Path) -> Tokenizer | None:
    """From the files next to a model's weights; None where there are none."""
    config = _optional_json(folder / "tokenizer_config.json")
    settings = {"chat_template": _chat_template(folder, config), "eos_ids": eos_ids_of_folder(folder)}
    if (path := folder / "tokenizer.json").is_file():
        tokenizer = from_tokenizer_json(path, **settings)
    elif (path := folder / "vocab.json").is_file() and (folder / "merges.txt").is_file():
        lines = _read_text(folder / "merges.txt").split("\n")
        merges = [line for line in lines[lines[0].startswith("#version") :] if line]
        tokenizer = from_vocab_merges(_optional_json(path), merges, name=str(path), **settings)
    else:
        return None
    specials = tokenizer.specials
    bos, eos = (_content(config.get(key)) for key in ("bos_token", "eos_token"))
    if bos in specials:
        tokenizer.bos_id = specials[bos]
    if eos is None and len(specials) == 1:
        eos = next(iter(specials))  # GPT-2 has one special token, and often no tokenizer_config.json
    if eos in specials:
        tokenizer.eos_ids |= {specials[eos]}
    adds_bos = config.get("add_bos_token")
    tokenizer.adds_bos = bool(tokenizer.adds_bos if adds_bos is None else adds_bos) and tokenizer.bos_id is not None
    return tokenizer


def _chat_template(folder: Path, config: Mapping[str, Any]) -> Any:
    if (path := folder / "chat_template.jinja").is_file():
        return _read_text(path)
    template = config.get("chat_template")
    if isinstance(template, list):  # several named templates
        template = next((t["template"] for t in template if t.get("name") == "default"), None)
    return template


def eos_ids_of_folder(folder: Path) -> frozenset[int]:
    """``eos_token_id``, an int or a list, of generation_config.json, which may list several, or else of config.json."""
    for file in ("generation_config.json", "config.json"):
        if (eos := _optional_json(folder / file).get("eos_token_id")) is not None:
            ids = eos if isinstance(eos, list) else [eos]
            if not all(isinstance(end, int) for end in ids):
                raise TokenizerError(f"{folder / file}: eos_token_id holds {eos!r}, no token ids; fetch it again")
            return frozenset(ids)
    return frozenset()


def _content(token: Any) -> str | None:
    """A special token is written as a string, or as an object that holds one."""
    return token.get("content") if isinstance(token, dict) else token


def _optional_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file, empty where there is no such file."""
    return read_json(path, TokenizerError) if path.is_file() else {}


def _read_text(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except (OSError, ValueError) as error:
        raise TokenizerError(f"{path}: cannot be read ({error}); fetch it again") from None
