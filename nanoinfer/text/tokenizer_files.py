"""The tokenizer files that lie beside a model's weights, and the patterns they name.

A ``tokenizer.json`` describes a pipeline. Only the pipelines that one tiktoken
pattern equals are read; the rest are refused, with what they hold.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nanoinfer.errors import TokenizerError

#: GPT-2's cut, with possessive runs so that a megabyte of spaces does not overflow the regex stack.
GPT2_PATTERN = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"""
#: SmolLM2's: digits are split off first, then GPT-2's rule runs on each piece. Here both steps in one.
SMOLLM_PATTERN = r"""\p{N}|'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?[^\s\p{L}\p{N}]++|\s++(?=\p{N}|\z)|\s+(?![^\s\p{N}])|\s+"""
#: Llama 3's, as its tokenizer.json writes it.
LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


class UnsupportedTokenizer(TokenizerError):
    """A tokenizer that is whole, but that tiktoken would not run exactly: its model takes token ids only."""


def read_text(path: Path) -> str:
    """A whole text file. Raises :class:`TokenizerError` naming it."""
    try:
        return path.read_text("utf-8")
    except (OSError, ValueError) as error:
        raise TokenizerError(f"{path}: cannot be read ({error}); fetch it again") from None


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object; empty where there is no such file."""
    if not path.is_file():
        return {}
    try:
        data = json.loads(read_text(path))
    except (ValueError, RecursionError) as error:
        raise TokenizerError(f"{path}: not valid JSON ({error}); fetch it again") from None
    if not isinstance(data, dict):
        raise TokenizerError(f"{path}: expected a JSON object; fetch it again")
    return data


def content(token: Any) -> str | None:
    """A special token is written as a string, or as an object that holds one."""
    return token.get("content") if isinstance(token, dict) else token


def find_pattern(data: Mapping[str, Any], name: str) -> str:
    """The pattern that equals a tokenizer.json's pipeline, or a refusal."""
    model = data["model"]
    if model.get("type", "BPE") != "BPE" or model.get("byte_fallback"):
        raise UnsupportedTokenizer(f"{name}: only byte-level BPE is supported; give prompts as token ids")
    odd = [key for key in ("dropout", "continuing_subword_prefix", "end_of_word_suffix") if model.get(key)]
    if odd or data.get("normalizer"):
        raise UnsupportedTokenizer(
            f"{name}: '{(odd or ['normalizer'])[0]}' is not supported; give prompts as token ids"
        )
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
            raise UnsupportedTokenizer(f"{name}: pre-tokenizer '{kinds}' is not supported; give prompts as token ids")
    if last.get("add_prefix_space"):
        raise UnsupportedTokenizer(f"{name}: add_prefix_space is not supported; give prompts as token ids")
    return pattern


def template_bos(data: Mapping[str, Any], added: Mapping[str, int]) -> int | None:
    """The id that the post-processor puts before a single text, if it puts one."""
    post = data.get("post_processor") or {}
    for step in post.get("processors", []) if post.get("type") == "Sequence" else [post]:
        if step.get("type") == "TemplateProcessing":
            first = step["single"][0].get("SpecialToken")
            return added.get(first["id"]) if first else None
    return None


def folder_settings(folder: Path) -> dict[str, Any]:
    """The chat template and the end ids that lie beside the weights.

    generation_config.json comes first: it alone lists several end ids.
    """
    template = read_json(folder / "tokenizer_config.json").get("chat_template")
    if isinstance(template, list):  # several named templates
        template = next((t["template"] for t in template if t.get("name") == "default"), None)
    if (path := folder / "chat_template.jinja").is_file():
        template = read_text(path)
    return {"chat_template": template, "eos_ids": eos_ids_of_folder(folder)}


def eos_ids_of_folder(folder: Path) -> frozenset[int]:
    """``eos_token_id``, an int or a list, of generation_config.json or else of config.json."""
    for file in ("generation_config.json", "config.json"):
        if (found := read_json(folder / file).get("eos_token_id")) is not None:
            ids = found if isinstance(found, list) else [found]
            if not all(isinstance(end, int) for end in ids):
                raise TokenizerError(f"{folder / file}: eos_token_id holds {found!r}, no token ids; fetch it again")
            return frozenset(ids)
    return frozenset()
