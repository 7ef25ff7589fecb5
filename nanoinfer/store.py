"""Files: the user's cache folder, writes that are whole or absent, cached measurements, JSON from elsewhere."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, is_dataclass
from pathlib import Path
from types import NoneType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

import platformdirs

from nanoinfer.errors import NanoinferError

T = TypeVar("T")


def cache_dir() -> Path:
    """Where fetched, converted and measured files are kept: ``NANOINFER_CACHE``, or the user's cache folder."""
    return Path(os.environ.get("NANOINFER_CACHE") or platformdirs.user_cache_dir("nanoinfer", appauthor=False))


def read_json(path: Path, error: type[NanoinferError]) -> dict[str, Any]:
    """The JSON object in a file that came with a model. Raises ``error``, in one line that names the file."""
    try:
        data = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        raise error(f"{path}: missing; a model's folder holds it with the weights") from None
    except (OSError, ValueError, RecursionError) as cause:
        raise error(f"{path}: damaged ({cause}); fetch or copy the file again") from None
    if not isinstance(data, dict):
        raise error(f"{path}: not a JSON object; fetch or copy the file again")
    return data


def write_whole(path: Path, text: str) -> None:
    """Write a text in place of what was there, making the folder if need be. Two processes may do so at once.

    Raises:
        OSError: a disk that refuses; then what was there still is, and nothing half-written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        part.write_text(text, encoding="utf-8")
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def cache_file(kind: str, key: Iterable[object], code: Iterable[Path] = ()) -> Path:
    """The file of a measurement of this ``kind``; another one once the key or a source file in ``code`` changes."""
    digest = hashlib.sha256(json.dumps([str(part) for part in key]).encode())
    for folder in code:
        for file in sorted(folder.rglob("*")):
            if file.suffix in (".py", ".cpp", ".h"):
                digest.update(file.read_bytes())
    return cache_dir() / kind / f"{digest.hexdigest()[:16]}.json"


def cached(
    path: Path,
    kind: type[T],
    measure: Callable[[], T],
    *,
    max_age_s: float = float("inf"),
    fresh: bool = False,
    keep: Callable[[T], bool] = lambda _: True,
) -> T:
    """What the file holds if it can be read and is recent enough, else what ``measure`` returns, stored for next time.

    ``kind`` is the result's dataclass. ``fresh`` measures in any case; ``keep`` tells whether a new result is worth
    storing: one from a busy machine is not.
    """
    if not fresh and (result := read_cached(path, kind, max_age_s)) is not None:
        return result
    result = measure()
    if keep(result):
        with contextlib.suppress(OSError):  # a disk that refuses costs the next call the measurement, nothing else
            write_whole(path, json.dumps(asdict(result), indent=1) + "\n")  # type: ignore[call-overload]
    return result


def read_cached(path: Path, kind: type[T], max_age_s: float = float("inf")) -> T | None:
    """The stored result, or ``None`` where it is missing, older than ``max_age_s`` or damaged."""
    try:
        if time.time() - path.stat().st_mtime > max_age_s:
            return None
        result: T = restored(kind, json.loads(path.read_text(encoding="utf-8")))
        return result
    except (OSError, ValueError, LookupError, TypeError, AttributeError, NanoinferError):
        return None


def restored(kind: Any, data: Any) -> Any:
    """A dataclass, or a field of one, from the JSON of its :func:`~dataclasses.asdict`.

    Knows dataclasses, tuples, mappings and ``| None``; anything else is taken as it is. What is damaged raises
    ValueError, LookupError, TypeError, AttributeError or what the dataclass itself raises.
    """
    inner = get_args(kind)
    if is_dataclass(kind):
        types = get_type_hints(kind)
        return kind(**{name: restored(types[name], value) for name, value in data.items()})  # type: ignore[operator]
    if NoneType in inner:
        return None if data is None else restored(inner[0], data)
    if get_origin(kind) is Mapping:
        return {inner[0](key): restored(inner[1], value) for key, value in data.items()}
    if get_origin(kind) is tuple:
        each = [inner[0]] * len(data) if inner[-1] is Ellipsis else inner
        return tuple(restored(one, value) for one, value in zip(each, data, strict=True))
    return data
