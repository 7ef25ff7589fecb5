"""Chat templates: the jinja2 program that turns messages into one prompt.

A template comes with the weights and is untrusted. It runs in jinja2's immutable sandbox, with the few helpers that
Hugging Face gives it and nothing else.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any, NoReturn

from jinja2 import Template, TemplateError, TemplateSyntaxError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from nanoinfer.errors import RequestError, TokenizerError


def _raise(message: str) -> NoReturn:
    raise TemplateError(message)


def _tojson(value: Any, indent: int | None = None, **_: Any) -> str:
    """Plain JSON: jinja2's own filter escapes ``<`` and ``&`` for HTML, which no model was trained on."""
    return json.dumps(value, ensure_ascii=False, indent=indent)


@lru_cache(maxsize=8)
def _compile(source: str) -> Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment.from_string(source)


def render(
    template: str,
    messages: Sequence[Mapping[str, str]],
    *,
    bos_token: str = "",
    eos_token: str = "",
    add_generation_prompt: bool = True,
) -> str:
    """The prompt for a conversation: each message has a ``role`` and a ``content``.

    Raises:
        TokenizerError: the template itself does not parse.
        RequestError: the template refuses these messages, or fails on them.
    """
    conversation: Any = messages  # of a request's body: anything
    if not isinstance(conversation, list | tuple) or not conversation:
        raise RequestError("a conversation is a list of at least one message")
    for number, message in enumerate(conversation, start=1):
        if not isinstance(message, Mapping) or not all(isinstance(message.get(k), str) for k in ("role", "content")):
            raise RequestError(f"message {number} needs a 'role' and a 'content', both of them texts")
    try:
        compiled = _compile(template)
    except TemplateSyntaxError as error:
        where = f"line {error.lineno}: {error.message}"
        raise TokenizerError(f"the model's chat template does not parse ({where})") from None
    try:
        return compiled.render(
            messages=[dict(message) for message in conversation],
            add_generation_prompt=add_generation_prompt,
            bos_token=bos_token,
            eos_token=eos_token,
            tools=None,
            documents=None,
        )
    except Exception as error:  # a template is a program, and may fail like one
        reason = str(error) or type(error).__name__
        raise RequestError(f"the model's chat template refuses these messages: {reason}") from None
