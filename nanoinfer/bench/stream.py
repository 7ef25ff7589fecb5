"""An OpenAI-compatible stream read as it comes: server-sent events out of bytes, and tokens out of their frames."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from nanoinfer.measure.trace import ChunkKind, Trace

#: Bytes of one event beyond which something other than a stream of events is coming.
MAX_EVENT_BYTES = 16 * 2**20


class SSEParser:
    """The events of one stream. Comments and the fields ``event``, ``id`` and ``retry`` are passed over.

    A network cuts anywhere: inside a line, inside a character, between the two bytes of a line end. Nothing is decoded
    here, so a cut character cannot hurt, and lines end only at LF, CR or CRLF, not at U+2028 as in texts
    (https://html.spec.whatwg.org/multipage/server-sent-events.html). An event is complete, and has its time, with the
    read that ends its empty line.
    """

    def __init__(self) -> None:
        self._line = bytearray()  # the part of a line that has not ended
        self._data: list[bytes] = []  # the data lines of an event that has not ended
        self._after_cr = False
        self._mark = b"\xef\xbb\xbf"  # may stand before the first line

    def feed(self, read: bytes) -> list[bytes]:
        """The data of each event that these bytes complete.

        Raises ValueError for an event beyond :data:`MAX_EVENT_BYTES`.
        """
        if not read:
            return []
        if self._after_cr:  # it has ended its line; a LF right after it is its other half
            read = read.removeprefix(b"\n")
        self._after_cr = read.endswith(b"\r")
        lines = read.splitlines()
        rest = lines.pop() if lines and not read.endswith((b"\n", b"\r")) else b""
        if lines:
            lines[0] = bytes(self._line + lines[0]).removeprefix(self._mark)
            self._line.clear()
            self._mark = b""
        self._line += rest
        events = []
        for line in lines:
            name, _, value = line.partition(b":")
            if name == b"data":
                self._data.append(value.removeprefix(b" "))
            elif not line and self._data:
                events.append(b"\n".join(self._data))
                self._data.clear()
        if len(self._line) + sum(map(len, self._data)) > MAX_EVENT_BYTES:
            raise ValueError(f"an event of more than {MAX_EVENT_BYTES} bytes")
        return events

    def end(self) -> list[bytes]:
        """The stream has ended: the data of an event whose empty line never came, if there is any.

        The standard drops it. Some servers end after their last line, and what they sent counts.
        """
        return self.feed(b"\n\n")


class StreamRecorder:
    """Writes one streamed answer into its trace.

    A frame is no token: servers put several into one (speculative decoding, buffering), send frames without any (a
    role, a usage record), and hold text back. A frame's tokens come from the best of these sources:

    1. usage up to this frame, where the server sends it with each;
    2. the token ids or log-probabilities in the frame, one each;
    3. the usage of the whole answer, apportioned to the frames with text by the length of their texts;
    4. ``count`` of the whole text, apportioned likewise, and marked as an estimate. A text cut into frames has more
       tokens piece by piece than as a whole, and even that is not what the model generated.
    """

    def __init__(self, trace: Trace, count: Callable[[str], int]) -> None:
        self.is_finished = False  # a reason to finish came
        self.is_done = False  # the end of the stream was announced
        self.error: str | None = None  # the server's error text
        self._trace, self._count = trace, count
        self._counted = 0  # tokens that the chunks so far have
        self._total: int | None = None  # tokens so far, as the server reports them
        self._open: list[tuple[int, str]] = []  # chunks, by index, whose texts have no count yet

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
            self._apportion(max(1, self._count("".join(text for _, text in self._open))), self._open)
        is_reported = self._total is not None and not self._trace.estimated
        self._trace.output_tokens = (self._total or 0) if is_reported else self._counted

    def _read(self, frame: Any, t: float) -> None:
        if frame.get("error") or frame.get("object") == "error":
            self.error = error_text(frame)
            return
        usage, choices = frame.get("usage"), frame.get("choices")
        total = self._note_usage(usage) if usage else None
        choice = choices[0] if choices else {}  # only one was asked for
        delta = choice.get("delta")
        reasoning, text = ("", choice.get("text") or "") if delta is None else delta_text(delta)
        is_end = choice.get("finish_reason") is not None
        self.is_finished |= is_end
        kind: ChunkKind = "content" if text else "reasoning" if reasoning else "finish" if is_end else "role"
        chunk = self._add(t, kind if choices else "usage"), reasoning + text
        if kind == "role" and delta and "role" in delta:  # it opens the answer, whatever usage it carries
            return
        if text or reasoning:
            self._open.append(chunk)
        if total:
            self._apportion(total - self._counted, self._open or ([chunk] if choices else []))
            self._open.clear()
        elif tokens := reported_tokens(choice):
            self._apportion(tokens, [self._open.pop() if text or reasoning else chunk])

    def _note_usage(self, usage: Mapping[str, Any]) -> int | None:
        """Take the server's counts; tokens generated so far, where it sends them."""
        if isinstance(prompt := usage.get("prompt_tokens"), int):
            self._trace.prompt_tokens = prompt
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
        if isinstance(cached, int):
            self._trace.cached_tokens = cached
        if not isinstance(total := usage.get("completion_tokens"), int):
            return None
        self._total = total
        return total

    def _add(self, t: float, kind: ChunkKind) -> int:
        self._trace.chunks.append((t, 0))
        self._trace.kinds.append(kind)
        return len(self._trace.chunks) - 1

    def _apportion(self, n: int, chunks: Sequence[tuple[int, str]]) -> None:
        """Give ``n`` more tokens to these chunks; one without a text holds half a character, or the end of sequence."""
        times, kinds = self._trace.chunks, self._trace.kinds
        for (index, _), share in zip(chunks, apportion(n, [len(text) or 1 for _, text in chunks]), strict=True):
            times[index] = times[index][0], share
            self._counted += share
            if share and kinds[index] == "role":
                kinds[index] = "content"


def estimate_tokens(text: str) -> int:
    """An estimate: 4 characters per token, as in English."""
    return -(-len(text) // 4)


def delta_text(delta: Mapping[str, Any]) -> tuple[str, str]:
    """The reasoning and the rest (content, a refusal, tool calls) in a chat's delta: all of it is generated."""
    text = delta.get("content") or delta.get("refusal") or ""
    for call in delta.get("tool_calls") or ():
        function = call.get("function") or {}
        text += (function.get("name") or "") + (function.get("arguments") or "")
    reasoning = delta.get("reasoning_content") or delta.get("reasoning") or ""
    return str(reasoning), str(text)  # some servers send lists of parts


def reported_tokens(choice: Mapping[str, Any]) -> int | None:
    """How many token ids or log-probabilities come with the text, if any do."""
    if ids := choice.get("token_ids"):
        return len(ids)
    logprobs = choice.get("logprobs") or {}
    tokens = logprobs.get("content") or logprobs.get("tokens")
    return len(tokens) if tokens else None


def apportion(total: int, sizes: Sequence[int]) -> list[int]:
    """Whole numbers that add up to ``total``, in proportion to the sizes, and at least 1 each.

    Where there are fewer than sizes, the first and last get one, and some between.
    """
    if total < len(sizes):
        shares = [0] * len(sizes)
        for i in range(total):
            shares[i * (len(sizes) - 1) // max(total - 1, 1)] = 1
        return shares
    shares, left, sum_left = [], total, sum(sizes)
    for n_after, size in zip(range(len(sizes) - 1, -1, -1), sizes, strict=True):
        share = min(max(1, round(left * size / sum_left)), left - n_after)
        shares.append(share)
        left, sum_left = left - share, sum_left - size
    return shares


def error_text(body: Any) -> str:
    """A server's error in one line: its ``error``, ``message`` or ``detail``, whichever it has."""
    text = body
    for key in ("error", "message", "detail"):
        if isinstance(text, Mapping) and text.get(key):
            text = text[key]
    return " ".join(str(text).split())[:300]
