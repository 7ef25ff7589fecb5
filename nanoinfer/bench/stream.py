"""What the frames of an OpenAI-compatible stream say, and how many tokens each of them brought.

A frame is no token. Servers put several into one (speculative decoding, buffering), send frames without any (a
role, a usage record), and hold text back. So frames are never counted. Their tokens are, from the best that is told:

1. usage up to this frame, where the server sends it with each;
2. the token ids or log-probabilities in the frame, one each;
3. the usage of the whole answer, shared out over the frames with text by the length of their texts;
4. nothing is told: a tokenizer's count of the whole text, shared out likewise, and marked as an estimate. A text cut
   into frames has more tokens piece by piece than as a whole, and even that is not what the model generated.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from nanoinfer.measure.trace import ChunkKind, Trace


def about(text: str) -> int:
    """Tokens of a text, where nobody can say: four characters each, as in English."""
    return -(-len(text) // 4)


class Answer:
    """Writes one streamed answer into its trace.

    ``is_finished``: a reason to finish came. ``is_done``: the end of the stream was announced. ``error``: what the
    server said went wrong, None while nothing did.
    """

    def __init__(self, trace: Trace, count: Callable[[str], int]) -> None:
        self.is_finished = self.is_done = False
        self.error: str | None = None
        self._trace, self._count = trace, count
        self._given = 0  # tokens that the chunks so far have
        self._total: int | None = None  # tokens so far, by the server's word
        self._open: list[tuple[int, str]] = []  # chunks, by place, whose texts have no count yet

    def take(self, data: bytes, t: float) -> None:
        """Take the data of one event that was complete at ``t``. Raises ValueError for what is no frame."""
        if data == b"[DONE]":
            self._add(t, "done")
            self.is_done = True
        elif data:
            try:
                self._read(json.loads(data), t)
            except (AttributeError, LookupError, TypeError, RecursionError) as error:
                raise ValueError(f"not a frame: {error}") from None

    def close(self) -> None:
        """No more frames come: settle the counts."""
        if self._open:
            self._trace.estimated = True
            self._share_out(max(1, self._count("".join(text for _, text in self._open))))
        told = self._total is not None and not self._trace.estimated
        self._trace.output_tokens = (self._total or 0) if told else self._given

    def _read(self, frame: Any, t: float) -> None:
        if frame.get("error") or frame.get("object") == "error":
            self.error = words(frame)
            return
        usage, choices = frame.get("usage"), frame.get("choices")
        total = self._note_usage(usage) if usage else None
        choice = choices[0] if choices else {}  # only one was asked for
        delta = choice.get("delta")
        reasoning, text = ("", choice.get("text") or "") if delta is None else spoken(delta)
        is_end = choice.get("finish_reason") is not None
        self.is_finished |= is_end
        kind: ChunkKind = "content" if text else "reasoning" if reasoning else "finish" if is_end else "role"
        place = self._add(t, kind if choices else "usage")
        if text or reasoning:
            self._open.append((place, reasoning + text))
        elif kind == "role" and delta and "role" in delta:  # it opens the answer, whatever usage it carries
            return
        if total:
            if self._open:
                self._share_out(total - self._given)
            elif choices and total > self._given:
                self._give_textless(place, total - self._given)
        elif told := tokens_told(choice):
            if text or reasoning:
                self._open.pop()
                self._give(place, told)
            else:
                self._give_textless(place, told)

    def _note_usage(self, usage: Mapping[str, Any]) -> int | None:
        """Take the server's counts; tokens generated so far, where it says."""
        if isinstance(prompt := usage.get("prompt_tokens"), int):
            self._trace.prompt_tokens = prompt
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
        if isinstance(cached, int):
            self._trace.cached_tokens = cached
        total = usage.get("completion_tokens")
        if not isinstance(total, int):
            return None
        self._total = total
        return total

    def _add(self, t: float, kind: ChunkKind) -> int:
        self._trace.chunks.append((t, 0))
        self._trace.kinds.append(kind)
        return len(self._trace.chunks) - 1

    def _give(self, place: int, n: int) -> None:
        self._trace.chunks[place] = (self._trace.chunks[place][0], n)
        self._given += n

    def _give_textless(self, place: int, n: int) -> None:
        """Tokens that show no text: half a character, or the end of sequence."""
        if self._trace.kinds[place] == "role":
            self._trace.kinds[place] = "content"
        self._give(place, n)

    def _share_out(self, n: int) -> None:
        """Give ``n`` more tokens to the chunks without a count."""
        if n > 0:
            for (place, _), share in zip(self._open, spread(n, [len(text) for _, text in self._open]), strict=True):
                self._give(place, share)
        self._open.clear()


def spoken(delta: Mapping[str, Any]) -> tuple[str, str]:
    """The reasoning and the rest (content, a refusal, calls of tools) in a chat's delta: all of it is generated."""
    text = delta.get("content") or delta.get("refusal") or ""
    for call in delta.get("tool_calls") or ():
        function = call.get("function") or {}
        text += (function.get("name") or "") + (function.get("arguments") or "")
    reasoning = delta.get("reasoning_content") or delta.get("reasoning") or ""
    return str(reasoning), str(text)  # some servers send lists of parts


def tokens_told(choice: Mapping[str, Any]) -> int | None:
    """How many token ids or log-probabilities stand beside the text, if any do."""
    if ids := choice.get("token_ids"):
        return len(ids)
    logprobs = choice.get("logprobs") or {}
    found = logprobs.get("content") or logprobs.get("tokens")
    return len(found) if found else None


def spread(total: int, sizes: Sequence[int]) -> list[int]:
    """Whole numbers that add up to ``total``, in proportion to the sizes, and at least 1 each.

    Where there are fewer than sizes, the first and last get one, and some between.
    """
    if total < len(sizes):
        shares = [0] * len(sizes)
        for i in range(total):
            shares[i * (len(sizes) - 1) // max(total - 1, 1)] = 1
        return shares
    shares, left, size = [], total, sum(sizes)
    for behind, own in zip(range(len(sizes) - 1, -1, -1), sizes, strict=True):
        share = min(max(1, round(left * own / size)), left - behind)
        shares.append(share)
        left, size = left - share, size - own
    return shares


def words(body: Any) -> str:
    """What a server's error says, in one line: of its many shapes, the one at hand."""
    found = body
    for key in ("error", "message", "detail"):
        if isinstance(found, Mapping) and found.get(key):
            found = found[key]
    return " ".join(str(found).split())[:300]
