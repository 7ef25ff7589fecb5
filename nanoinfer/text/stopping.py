"""Stop strings: what may be delivered now, what must be held back, when to end.

The result must not depend on how the text was split into tokens. So a match counts
only when no stop string that *starts earlier* can still complete.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopChecker:
    """Takes the text deltas of one request; passes on what can no longer be part of a stop string."""

    def __init__(self, stops: Sequence[str]) -> None:
        self.stops = tuple(stops)
        self.held = ""
        self.hit = False

    def push(self, text: str) -> str:
        """Take a delta; return the text that may be delivered. Sets ``hit`` once a stop string is found."""
        return self._release(text, final=False)

    def finish(self) -> str:
        """The text has ended: return what was held, up to a match if there is one."""
        return self._release("", final=True)

    def _release(self, text: str, final: bool) -> str:
        if self.hit:
            return ""
        text = self.held + text
        for start in range(len(text)):
            if any(text.startswith(stop, start) for stop in self.stops):
                self.hit, self.held = True, ""
                return text[:start]
            rest = text[start:]
            if not final and any(stop.startswith(rest) for stop in self.stops):
                self.held = rest
                return text[:start]
        self.held = ""
        return text
