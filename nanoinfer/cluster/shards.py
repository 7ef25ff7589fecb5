"""A batch on the disk: prompts in shards, each answered shard a file that is written whole or not at all.

Whatever is killed, recovery reads which files exist: they are done, the others are not. A manifest names the prompts
and settings, so that answers are not mixed with those to other prompts or of another model.

    OUT.parts/manifest.json      settings, and a hash of the prompts
    OUT.parts/000017.jsonl       the rows of prompts 17 * size to 18 * size - 1
    OUT                          all rows in the order of the prompts, at the end
"""

from __future__ import annotations

import fcntl
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nanoinfer.errors import RequestError
from nanoinfer.store import write_whole

Row = dict[str, Any]
FIELDS = ("prompt", "id", "max_tokens")


@dataclass(frozen=True)
class Item:
    """One prompt: a text or token ids, the caller's own name for it, and tokens to generate, unless as all others."""

    index: int
    prompt: str | list[int]
    id: str | None = None
    max_tokens: int | None = None


def read_prompts(path: Path) -> list[Item]:
    """The prompts of a file, one JSON object a line: ``{"prompt": ..., "id": ..., "max_tokens": ...}``.

    Raises:
        RequestError: naming the first bad line.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"{path}: {getattr(error, 'strerror', None) or 'not UTF-8'}") from None
    items = [_item(path, number, line) for number, line in enumerate(lines, start=1)]
    if not items:
        raise RequestError(f"{path}: no prompt in it")
    return items


def _item(path: Path, number: int, line: str) -> Item:
    try:
        fields = json.loads(line)
    except ValueError:
        fields = None
    if not isinstance(fields, dict) or "prompt" not in fields:
        raise RequestError(f'{path}, line {number}: not an object such as {{"prompt": "Once upon a time"}}')
    if unknown := [key for key in fields if key not in FIELDS]:
        raise RequestError(f"{path}, line {number}: unknown field '{unknown[0]}'; known are {', '.join(FIELDS)}")
    prompt, name, max_tokens = fields["prompt"], fields.get("id"), fields.get("max_tokens")
    is_ids = isinstance(prompt, list) and all(type(token) is int for token in prompt)
    if not (isinstance(prompt, str) or is_ids):
        raise RequestError(f"{path}, line {number}: prompt must be a text or a list of token ids")
    if not (name is None or isinstance(name, str)):
        raise RequestError(f"{path}, line {number}: id must be a text")
    if not (max_tokens is None or (type(max_tokens) is int and max_tokens >= 0)):
        raise RequestError(f"{path}, line {number}: max_tokens must be a whole number of at least 0")
    return Item(number - 1, prompt, name, max_tokens)


class Shards:
    """The state of one batch, for use within :meth:`held`. ``settings`` are all that the answers depend on, as JSON."""

    def __init__(self, items: Sequence[Item], out: Path, settings: Mapping[str, Any], size: int = 64) -> None:
        if size < 1:
            raise RequestError(f"a shard needs at least 1 prompt, got {size}")
        self.items, self.out, self.size = items, out, size
        self.folder = out.with_name(f"{out.name}.parts")
        digest = hashlib.sha256(json.dumps([[i.prompt, i.id, i.max_tokens] for i in items]).encode()).hexdigest()
        self.manifest = {"prompts_sha256": digest, "prompts": len(items), "shard": size, "settings": dict(settings)}

    @property
    def count(self) -> int:
        """Shards in all."""
        return -(-len(self.items) // self.size)

    def of(self, shard: int) -> Sequence[Item]:
        """The prompts of a shard."""
        return self.items[shard * self.size : (shard + 1) * self.size]

    @contextmanager
    def held(self) -> Iterator[None]:
        """Make the folder and lock it against other runs that see the same disk.

        Raises:
            RequestError: it is of another batch, another run holds it, or ``out`` exists and is not of this batch.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / "lock").open("w") as lock:  # the kernel releases it, however the process ends
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise RequestError(f"{self.out}: another run works on this batch; wait for it, or end it") from None
            self._check_manifest()
            yield

    def _check_manifest(self) -> None:
        file = self.folder / "manifest.json"
        if not file.exists():
            if self.out.exists():
                raise RequestError(f"{self.out} exists already, and is not of this batch: name another file")
            write_whole(file, json.dumps(self.manifest, indent=1) + "\n")
            return
        earlier = json.loads(file.read_text(encoding="utf-8"))
        if different := [key for key in self.manifest if earlier.get(key) != self.manifest[key]]:
            raise RequestError(
                f"{self.folder} holds answers of another batch ({', '.join(different)} differ): name another output, "
                "ask for the same, or remove that folder"
            )

    def missing(self) -> list[int]:
        """Shards that are not done."""
        return [] if self.out.exists() else [shard for shard in range(self.count) if self._rows(shard) is None]

    def write(self, shard: int, rows: Sequence[Row]) -> None:
        """Keep the rows of a shard. Raises ValueError where they are not its own, each once, in order."""
        indices = [row["index"] for row in rows]
        if indices != [item.index for item in self.of(shard)]:
            raise ValueError(f"shard {shard}: rows of prompts {indices}")
        write_whole(self._part(shard), "".join(json.dumps(row) + "\n" for row in rows))

    def finish(self) -> tuple[int, int]:
        """Join the shards in ``out`` and remove them: (rows, errors among them).

        Raises:
            RequestError: a shard is missing.
        """
        if not self.out.exists():
            texts = []
            for shard in range(self.count):
                if self._rows(shard) is None:
                    raise RequestError(f"{self.folder}: shard {shard} is missing or damaged; run the batch again")
                texts.append(self._part(shard).read_text(encoding="utf-8"))
            write_whole(self.out, "".join(texts))
        for shard in range(self.count):  # a run that is killed from here on is done, too
            self._part(shard).unlink(missing_ok=True)
        rows = [json.loads(line) for line in self.out.read_text(encoding="utf-8").splitlines()]
        return len(rows), sum("error" in row for row in rows)

    def _part(self, shard: int) -> Path:
        return self.folder / f"{shard:06}.jsonl"

    def _rows(self, shard: int) -> list[Row] | None:
        """The rows of a shard; None where it is not done, or cut short by a power failure."""
        try:
            rows = [json.loads(line) for line in self._part(shard).read_text(encoding="utf-8").splitlines()]
            done = [row["index"] for row in rows] == [item.index for item in self.of(shard)]
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return rows if done else None
