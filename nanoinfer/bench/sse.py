"""Server-sent events, read as they come: bytes in, the data of whole events out.

A network cuts where it likes: inside a line, inside a character, between the two bytes of a line end. Nothing is
decoded here, so a cut character cannot hurt, and lines end only where the standard says: LF, CR or CRLF, and not at
U+2028 as with Python's ``splitlines``. An event is complete, and has its time, with the read that ends its empty line.
"""

from __future__ import annotations

#: Bytes of one event beyond which something other than a stream of events is coming.
MOST = 16 * 2**20


class Events:
    """The events of one stream. Comments and the fields ``event``, ``id`` and ``retry`` are passed over."""

    def __init__(self) -> None:
        self._line: list[bytes] = []  # the parts of a line that has not ended
        self._data: list[bytes] = []  # the data lines of an event that has not ended
        self._held = 0  # bytes in these two
        self._after_cr = False
        self._is_first = True

    def feed(self, read: bytes) -> list[bytes]:
        """The data of each event that these bytes complete. Raises ValueError for an event beyond :data:`MOST`."""
        if self._after_cr or b"\r" in read:
            read = self._with_lf(read)
        lines = read.split(b"\n")
        rest = lines.pop()
        events: list[bytes] = []
        if lines:
            if self._line:
                lines[0] = b"".join([*self._line, lines[0]])
                self._line = []
            if self._is_first:
                self._is_first = False
                lines[0] = lines[0].removeprefix(b"\xef\xbb\xbf")
            events = [data for line in lines if (data := self._take(line)) is not None]
            self._held = sum(map(len, self._data))
        if rest:
            self._line.append(rest)
            self._held += len(rest)
        if self._held > MOST:
            raise ValueError(f"an event of more than {MOST} bytes")
        return events

    def end(self) -> bytes | None:
        """The stream has ended: the data of an event whose empty line never came, if there is any.

        The standard drops it. Some servers end behind their last line, and what they said was said.
        """
        if self._line:
            self._take(b"".join(self._line))
            self._line = []
        return self._take(b"")

    def _take(self, line: bytes) -> bytes | None:
        """Take one line; the data of the event that it ends, if it does."""
        if not line:
            if not self._data:
                return None
            data = self._data[0] if len(self._data) == 1 else b"\n".join(self._data)
            self._data = []
            return data
        if line.startswith(b"data:"):
            self._data.append(line[6:] if line.startswith(b" ", 5) else line[5:])
        elif line == b"data":
            self._data.append(b"")
        return None

    def _with_lf(self, read: bytes) -> bytes:
        """CR and CRLF as LF. A CR ends its line at once; a LF right behind it is its other half, even a read later."""
        if self._after_cr and read:
            read = read.removeprefix(b"\n")
            self._after_cr = False
        if read:
            self._after_cr = read.endswith(b"\r")
        return read.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
