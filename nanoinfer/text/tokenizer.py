"""Text to token ids and back, every vocabulary through tiktoken.

A byte-level BPE is three things: bytes to rank, a pattern that cuts the text
first, and special tokens. They are read from whatever lies beside the weights,
so that no tokenizer is ever fetched from a second place. What tiktoken cannot
run exactly is refused: a tokenizer that is nearly right is a model that is wrong.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import tiktoken

from nanoinfer.errors import TokenizerError
from nanoinfer.text.chat import render
from nanoinfer.text.tokenizer_files import (
    GPT2_PATTERN,
    LLAMA3_PATTERN,
    SMOLLM_PATTERN,
    UnsupportedTokenizer,
    content,
    find_pattern,
    folder_settings,
    read_json,
    read_text,
    template_bos,
)

T = TypeVar("T")

#: ``tokenizer.ggml.pre`` of a GGUF to the pattern it stands for.
GGUF_PATTERNS: Mapping[str, str] = {
    "gpt-2": GPT2_PATTERN,
    "smollm": SMOLLM_PATTERN,
    "llama-bpe": LLAMA3_PATTERN,
    "llama3": LLAMA3_PATTERN,
}


def _byte_order() -> list[int]:
    """The 256 bytes in the order of GPT-2's vocabulary: the printable ones, then the rest."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    return printable + [byte for byte in range(256) if byte not in set(printable)]


#: GPT-2 writes bytes as printable characters: unprintable ones are moved to U+0100 and above.
_CHAR_TO_BYTE = {chr(b if i < 188 else 256 + i - 188): b for i, b in enumerate(_byte_order())}


def _to_bytes(token: str) -> bytes | None:
    """The bytes that a token stands for, or None where it is not in the byte alphabet (a special)."""
    try:
        return bytes(_CHAR_TO_BYTE[char] for char in token)
    except KeyError:
        return None


def _ranks(vocab: Mapping[str, int], merges: Iterable[str | Sequence[str]], where: str) -> dict[bytes, int]:
    """Bytes to id for every token that the merges can make.

    tiktoken knows one order only, that of the ids; it merges exactly as the list
    says if the list's results have ids that never fall.
    """
    ranks: dict[bytes, int] = {bytes([b]): vocab[c] for c, b in _CHAR_TO_BYTE.items() if c in vocab}
    last = -1
    for number, merge in enumerate(merges, start=1):
        parts = merge.split(" ") if isinstance(merge, str) else list(merge)
        token = "".join(parts)
        if len(parts) != 2 or token not in vocab or (raw := _to_bytes(token)) is None:
            raise TokenizerError(f"{where}: merge {number} ({merge!r}) does not make a token of the vocabulary")
        if vocab[token] < last:
            raise UnsupportedTokenizer(
                f"{where}: token ids are not in merge order (merge {number}, {merge!r}), "
                "so tiktoken cannot run it exactly; give prompts as token ids"
            )
        last = ranks[raw] = vocab[token]
    return ranks


def _guarded(call: Callable[[], T], complaint: str) -> T:
    """Run tiktoken. Its panics derive from BaseException: ``except Exception`` would miss them."""
    try:
        return call()
    except BaseException as error:
        if isinstance(error, Exception) or type(error).__name__ == "PanicException":
            raise TokenizerError(f"{complaint} ({error})") from None
        raise


class Tokenizer:
    """One vocabulary. Ids to bytes is a table lookup; text to ids is tiktoken's.

    Attributes:
        n_vocab: one more than the highest id.
        bos_id: the begin-of-sequence id, or None.
        eos_ids: every id that ends a sequence.
        adds_bos: whether plain prompts begin with ``bos_id``.
        chat_template: jinja2 source, or None for a base model.
    """

    def __init__(
        self,
        ranks: Mapping[bytes, int],
        *,
        pattern: str = GPT2_PATTERN,
        specials: Mapping[str, int] | None = None,
        bos_id: int | None = None,
        eos_ids: Iterable[int] = (),
        adds_bos: bool = False,
        chat_template: str | None = None,
        name: str = "tokenizer",
    ) -> None:
        self.name, self.pattern = name, pattern
        self.specials = dict(specials or {})
        self.bos_id, self.eos_ids, self.adds_bos = bos_id, frozenset(eos_ids), adds_bos and bos_id is not None
        self.chat_template = chat_template
        self._special_names = {i: text for text, i in self.specials.items()}
        self._bytes = {i: raw for raw, i in ranks.items() if i not in self._special_names}
        if not self._bytes or len(self._bytes) < len(ranks) - len(self.specials):
            raise TokenizerError(f"{name}: the vocabulary is empty or two tokens share an id; is the file damaged?")
        self.n_vocab = max(max(self._bytes), *self._special_names, 0) + 1

    @cached_property
    def _encoding(self) -> tiktoken.Encoding:
        """Built at first use. tiktoken panics on a byte that has no token, so such
        bytes get placeholder ids above the vocabulary, which :meth:`encode` drops."""
        ranks = {raw: i for i, raw in self._bytes.items()}
        missing = [raw for b in range(256) if (raw := bytes([b])) not in ranks]
        ranks |= {raw: self.n_vocab + i for i, raw in enumerate(missing)}
        return _guarded(
            lambda: tiktoken.Encoding(
                self.name, pat_str=self.pattern, mergeable_ranks=ranks, special_tokens=self.specials
            ),
            f"{self.name}: tiktoken cannot use this vocabulary",
        )

    def encode(self, text: str, *, bos: bool = False, specials: bool = False) -> list[int]:
        """Token ids of a text.

        Args:
            text: any text; the few bytes for which a vocabulary has no token are left out.
            bos: put ``bos_id`` in front.
            specials: read ``<|endoftext|>`` and its like as special tokens. Off by default, so
                that a user's text can never forge one.

        Raises:
            TokenizerError: a lone surrogate, a text tiktoken cannot cut, or ``bos`` without ``bos_id``.
        """
        if bos and self.bos_id is None:
            raise TokenizerError(f"{self.name} has no begin-of-sequence token")
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise TokenizerError(f"the text is not valid Unicode: lone surrogate at character {error.start}") from None
        allowed = set(self.specials) if specials else set()
        ids = _guarded(
            lambda: self._encoding.encode(text, allowed_special=allowed, disallowed_special=()),
            f"{self.name} cannot cut this text of {len(text):,} characters (a very long run of spaces?); shorten it",
        )
        kept = [i for i in ids if i < self.n_vocab]
        return [self.bos_id, *kept] if bos and self.bos_id is not None else kept

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of one token; empty for special ids and for ids the vocabulary does not have."""
        return self._bytes.get(token_id, b"")

    def decode(self, ids: Iterable[int]) -> str:
        """The text of whole ids: specials left out, broken UTF-8 as U+FFFD."""
        return b"".join(map(self.token_bytes, ids)).decode("utf-8", errors="replace")

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Token ids of a conversation (``role`` and ``content`` each), ready for the assistant's turn.

        Whether the template writes the begin-of-sequence token or leaves it to
        the tokenizer, the result has exactly one.

        Raises:
            TokenizerError: this is a base model, it has no chat template.
            RequestError: the template refuses these messages.
        """
        if self.chat_template is None:
            raise TokenizerError(f"{self.name} has no chat template: it is a base model, give it a plain prompt")
        bos = "" if self.bos_id is None else self._special_names.get(self.bos_id, "")
        eos = next((self._special_names[i] for i in sorted(self.eos_ids) if i in self._special_names), "")
        ids = self.encode(render(self.chat_template, messages, bos_token=bos, eos_token=eos), specials=True)
        if self.bos_id is None:
            return ids
        if self.adds_bos and ids[:1] != [self.bos_id]:
            return [self.bos_id, *ids]
        return ids[1:] if ids[:2] == [self.bos_id, self.bos_id] else ids

    # --- where vocabularies come from -----------------------------------------

    @classmethod
    def byte_level(cls) -> Tokenizer:
        """256 tokens, one a byte, in GPT-2's byte order: for random tiny models."""
        return cls({bytes([b]): i for i, b in enumerate(_byte_order())}, name="bytes")

    @classmethod
    def from_vocab_merges(
        cls,
        vocab: Mapping[str, int],
        merges: Iterable[str | Sequence[str]],
        *,
        specials: Mapping[str, int] | None = None,
        name: str = "vocab and merges",
        **settings: Any,
    ) -> Tokenizer:
        """From GPT-2's two tables. Tokens that no merge makes are special unless ``specials`` says which are.

        ``settings`` are those of the constructor. Raises :class:`TokenizerError` where
        the ids are not in merge order.
        """
        ranks = _ranks(vocab, merges, name)
        if specials is None:
            made = set(ranks.values())
            specials = {token: i for token, i in vocab.items() if i not in made}
        return cls(ranks, specials=specials, name=name, **settings)

    @classmethod
    def from_tiktoken(cls, path: Path, **settings: Any) -> Tokenizer:
        """From a file of ``base64 rank`` lines, as tiktoken itself keeps them."""
        try:
            lines = path.read_text("ascii").split("\n")
            pairs = (line.split() for line in lines if line)
            ranks = {codecs.decode(raw.encode(), "base64"): int(rank) for raw, rank in pairs}
        except (OSError, ValueError) as error:
            raise TokenizerError(f"{path}: not a file of tiktoken ranks ({error})") from None
        return cls(ranks, **settings)

    @classmethod
    def from_gguf(cls, meta: Mapping[str, Any], name: str = "GGUF tokenizer") -> Tokenizer:
        """From a GGUF header (key to value)."""
        key = "tokenizer.ggml."
        if (kind := meta.get(key + "model")) != "gpt2":
            raise UnsupportedTokenizer(f"{name}: tokenizer '{kind}' is not byte-level BPE; give prompts as token ids")
        pre = meta.get(key + "pre", "default")
        if pre not in GGUF_PATTERNS:
            raise UnsupportedTokenizer(
                f"{name}: pre-tokenizer '{pre}' is not supported (known: {', '.join(GGUF_PATTERNS)}); "
                "give prompts as token ids"
            )
        for needed in ("tokens", "merges"):
            if not meta.get(key + needed):
                raise TokenizerError(f"{name}: '{key}{needed}' is missing; is the file damaged?")
        bos_id = meta.get(key + "bos_token_id")
        return cls.from_vocab_merges(
            {token: i for i, token in enumerate(meta[key + "tokens"])},
            meta[key + "merges"],
            pattern=GGUF_PATTERNS[pre],
            bos_id=bos_id,
            eos_ids=gguf_eos_ids(meta),
            # Absent, llama.cpp's default for this pre-tokenizer counts: Llama 3 adds it, the others do not.
            adds_bos=bool(meta.get(key + "add_bos_token", GGUF_PATTERNS[pre] is LLAMA3_PATTERN)),
            chat_template=meta.get("tokenizer.chat_template"),
            name=name,
        )

    @classmethod
    def from_tokenizer_json(cls, source: Path | Mapping[str, Any], **settings: Any) -> Tokenizer:
        """From a Hugging Face ``tokenizer.json``, as a path or parsed.

        ``settings`` are those of the constructor and win over the file.
        Raises :class:`TokenizerError` for anything tiktoken would not run exactly.
        """
        data = read_json(source) if isinstance(source, Path) else source
        name = str(source) if isinstance(source, Path) else "tokenizer.json"
        try:
            model = data["model"]
            pattern = find_pattern(data, name)
            added = {str(token["content"]): int(token["id"]) for token in data.get("added_tokens") or ()}
            vocab = {token: i for token, i in model["vocab"].items() if token not in added}
            bos_id = template_bos(data, added)
            settings = {"bos_id": bos_id, "adds_bos": bos_id is not None, "name": name} | settings
            return cls.from_vocab_merges(vocab, model["merges"], specials=added, pattern=pattern, **settings)
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise TokenizerError(f"{name}: damaged or not a tokenizer.json ({type(error).__name__}: {error})") from None

    @classmethod
    def from_folder(cls, folder: Path) -> Tokenizer | None:
        """From the files beside a model's weights; None where there are none."""
        if (path := folder / "tokenizer.json").is_file():
            found = cls.from_tokenizer_json(path, **folder_settings(folder))
        elif (path := folder / "vocab.json").is_file() and (folder / "merges.txt").is_file():
            lines = read_text(folder / "merges.txt").split("\n")
            merges = [line for line in lines[lines[0].startswith("#version") :] if line]
            found = cls.from_vocab_merges(read_json(path), merges, name=str(path), **folder_settings(folder))
        else:
            return None
        return found._named(folder)

    def _named(self, folder: Path) -> Tokenizer:
        """Look up the special tokens that tokenizer_config.json and generation_config.json name."""
        config = read_json(folder / "tokenizer_config.json")
        bos, eos = (content(config.get(key)) for key in ("bos_token", "eos_token"))
        if bos in self.specials:
            self.bos_id = self.specials[bos]
        if eos is None and len(self.specials) == 1:
            eos = next(iter(self.specials))  # GPT-2 has one special token, and often no tokenizer_config.json
        if eos in self.specials:
            self.eos_ids |= {self.specials[eos]}
        if (adds := config.get("add_bos_token")) is not None:
            self.adds_bos = bool(adds)
        self.adds_bos = self.adds_bos and self.bos_id is not None
        return self


def gguf_eos_ids(meta: Mapping[str, Any]) -> frozenset[int]:
    """Every id that a GGUF header says ends a sequence, a turn or a message."""
    ends = (meta.get(f"tokenizer.ggml.{end}_token_id") for end in ("eos", "eot", "eom"))
    return frozenset(end for end in ends if isinstance(end, int))


class Detokenizer:
    """Ids to text, one at a time, for one request.

    A character whose bytes are spread over several tokens is held until it is
    whole; bytes that can no longer become one come out as U+FFFD at once. The
    pieces joined are the whole decode.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        """The text that this token completes, often empty."""
        return self._decoder.decode(self._tokenizer.token_bytes(token_id))

    def finish(self) -> str:
        """What is still held: U+FFFD for a broken character, else nothing."""
        return self._decoder.decode(b"", final=True)
