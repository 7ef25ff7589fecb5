"""Text to token ids and back, every vocabulary through tiktoken.

A byte-level BPE is three things: bytes to rank, a pattern that splits the text first, and special tokens.
:mod:`nanoinfer.text.tokenizer_files` reads them from the files that come with the weights.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from typing import TypeVar

import tiktoken

from nanoinfer.errors import TokenizerError
from nanoinfer.text.chat import render

T = TypeVar("T")

#: GPT-2's split, with possessive runs so that a megabyte of spaces does not overflow the regex stack.
GPT2_PATTERN = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"""


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

    ``pattern`` splits a text before merges, whose order is that of the ids in ``ranks``. With ``adds_bos`` plain
    prompts begin with ``bos_id``. ``chat_template`` is jinja2 source, None for a base model. ``n_vocab`` is one more
    than the highest id.
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
        """Token ids of a text; the few bytes for which a vocabulary has no token are left out.

        ``bos`` begins with ``bos_id``. ``specials`` reads ``<|endoftext|>`` and the like as special tokens: off by
        default, so that a user's text can never forge one. Raises :class:`TokenizerError` for a lone surrogate, a text
        that tiktoken cannot split, or ``bos`` without ``bos_id``.
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
            f"{self.name} cannot split this text of {len(text):,} characters (a very long run of spaces?); shorten it",
        )
        ids = [i for i in ids if i < self.n_vocab]
        return [self.bos_id, *ids] if bos and self.bos_id is not None else ids

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of one token; empty for special ids and for ids the vocabulary does not have."""
        return self._bytes.get(token_id, b"")

    def decode(self, ids: Iterable[int]) -> str:
        """The text of all ids together: specials left out, broken UTF-8 as U+FFFD."""
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


class Detokenizer:
    """Ids to text, one at a time, for one request; the pieces joined equal :meth:`Tokenizer.decode`.

    A character whose bytes are spread over several tokens is held until it is
    complete; bytes that can no longer become one come out as U+FFFD at once.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        """The text that this token completes, often empty."""
        return self._decoder.decode(self._tokenizer.token_bytes(token_id))

    def finish(self) -> str:
        """The rest: U+FFFD for an incomplete character, else nothing."""
        return self._decoder.decode(b"", final=True)
