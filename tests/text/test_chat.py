"""Chat templates: followed to the letter, in a sandbox, with exactly one BOS."""

from __future__ import annotations

from typing import Any

import pytest

from nanoinfer.errors import RequestError, TokenizerError
from nanoinfer.models import fetch
from nanoinfer.models.gguf_file import read_gguf
from nanoinfer.text import tokenizer_files
from nanoinfer.text.chat import render
from nanoinfer.text.tokenizer import Tokenizer

USER = [{"role": "user", "content": "hi"}]


def with_template(template: str | None, adds_bos: bool = True) -> Tokenizer:
    ranks = {bytes([i]): i for i in range(256)}
    specials = {"<s>": 256, "</s>": 257}
    return Tokenizer(
        ranks, specials=specials, bos_id=256, eos_ids=[257], adds_bos=adds_bos, chat_template=template, name="m"
    )


def test_smollm2_template_is_followed() -> None:
    tokenizer = tokenizer_files.from_gguf(read_gguf(fetch.fetch(fetch.SMOLLM2)).meta)
    expected = (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert tokenizer.chat_template is not None and render(tokenizer.chat_template, USER) == expected
    ids = tokenizer.encode_chat(USER)
    assert ids == tokenizer.encode(expected, specials=True) and ids.count(1) == 3 and ids.count(2) == 2
    own = [{"role": "system", "content": "Be brief."}, *USER]
    assert render(tokenizer.chat_template, own).startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user")


@pytest.mark.parametrize("adds_bos", [True, False])
@pytest.mark.parametrize("template", ["{{ bos_token }}{{ messages[0].content }}", "<s>{{ messages[0].content }}"])
def test_template_that_writes_bos(template: str, adds_bos: bool) -> None:
    assert with_template(template, adds_bos).encode_chat(USER) == [256, 104, 105]


def test_template_that_leaves_bos_to_the_tokenizer() -> None:
    assert with_template("{{ messages[0].content }}").encode_chat(USER) == [256, 104, 105]
    assert with_template("{{ messages[0].content }}", adds_bos=False).encode_chat(USER) == [104, 105]


def test_template_and_tokenizer_both_write_bos() -> None:
    assert with_template("{{ bos_token }}<s>{{ messages[0].content }}").encode_chat(USER) == [256, 104, 105]


def test_helpers() -> None:
    assert render("{{ messages | tojson }}", [{"role": "é<", "content": ""}]) == '[{"role": "é<", "content": ""}]'
    assert (
        render("{% for m in messages %}\n  {% if true %}\n{{ m.content }}\n  {% endif %}\n{% endfor %}", USER) == "hi\n"
    )
    assert len(render("{{ strftime_now('%Y') }}", USER)) == 4
    assert render("{% for m in messages %}{{ m.content }}{% break %}{% endfor %}", USER * 2) == "hi"
    assert render("{{ eos_token }}{{ tools is none }}", USER, eos_token="</s>") == "</s>True"
    assert render("{% if add_generation_prompt %}A{% endif %}", USER, add_generation_prompt=False) == ""


def test_errors_are_one_clear_line() -> None:
    with pytest.raises(TokenizerError, match="m has no chat template"):
        with_template(None).encode_chat(USER)
    with pytest.raises(TokenizerError, match="does not parse"):
        render("{% if %}", USER)
    with pytest.raises(RequestError, match="refuses these messages: roles must alternate"):
        render("{{ raise_exception('roles must alternate') }}", USER)
    with pytest.raises(RequestError, match="refuses these messages"):
        render("{{ messages[0].content + 1 }}", USER)


@pytest.mark.parametrize(
    "messages",
    [
        *([], None, "hi", {}, [{}], [5], [{"role": "user"}], [{"content": "x"}]),
        [{"role": "user", "content": None}],
        [*USER, {"role": "user", "content": [{"type": "text", "text": "hi"}]}],
    ],
)
def test_messages_that_are_none(messages: Any) -> None:
    with pytest.raises(RequestError, match=r"conversation is a list|message \d needs a 'role' and a 'content'"):
        render("{% for m in messages %}{{ m.content }}{% endfor %}", messages)


@pytest.mark.parametrize(
    "attack",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ cycler.__init__.__globals__.os.system('true') }}",
        "{% include '/etc/passwd' %}",
        "{{ range(10 ** 9) | list }}",
    ],
)
def test_a_template_cannot_leave_the_sandbox(attack: str) -> None:
    with pytest.raises(RequestError):
        render(attack, USER)
