"""What a client may send: the bodies of OpenAI's two endpoints, checked before any work.

Unknown fields are ignored, since clients send many. A known field with a value that is not served is refused: to
ignore it silently would answer another question.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from nanoinfer.sampling.params import SamplingParams

SEED = 2**63
#: Fields that are called the same in :class:`SamplingParams`.
SAME_NAMES = {"temperature", "top_p", "min_p", "seed", "n", "ignore_eos"} | {
    f"{kind}_penalty" for kind in ("repetition", "frequency", "presence")
}


def _only(*allowed: Any) -> AfterValidator:
    """A field that clients send, of which this server serves these values and absence."""

    def check(value: Any) -> Any:
        if value is not None and value not in allowed:
            shown = " or ".join(repr(item) for item in allowed if item not in ([], {}, False))
            raise ValueError(f"this value is not served here; leave the field out{shown and f' or give {shown}'}")
        return value

    return AfterValidator(check)


def _stops(value: Any) -> list[str]:
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise ValueError("give a text or a list of texts")
    if len(texts) > 4 or "" in texts:
        raise ValueError("give at most four texts, none of them empty")
    if any("\ud800" <= char <= "\udfff" for text in texts for char in text):
        raise ValueError("a lone surrogate is no text")
    return texts


def _prompts(value: Any) -> list[Any]:
    """One text, one list of token ids, or a list of either kind, as a list of prompts."""
    if isinstance(value, str) or _are(value, int):
        return [value]
    if _are(value, str) or (isinstance(value, list) and value and all(_are(ids, int) for ids in value)):
        return list(value)
    raise ValueError("give a text, a list of token ids, or a list of either")


def _are(value: Any, kind: type) -> bool:
    return isinstance(value, list) and bool(value) and all(type(item) is kind for item in value)


def _content(value: Any) -> str:
    """A text, or text parts, joined by a newline."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise ValueError("give a text or a list of text parts")
    texts = []
    for part in value:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise ValueError('this model reads text only: parts are {"type": "text", "text": "..."}')
        texts.append(part["text"])
    return "\n".join(texts)


class Strict(BaseModel):
    """No value is turned into another type; what is not known is ignored."""

    model_config = ConfigDict(strict=True, extra="ignore")


class StreamOptions(Strict):
    """``continuous_usage_stats``, from vLLM: every chunk has the number of tokens so far: a client need not guess."""

    include_usage: bool = False
    continuous_usage_stats: bool = False


class GenerationRequest(Strict):
    """What both endpoints have in common. ``top_k`` to ``ignore_eos`` are not OpenAI's, but common."""

    model: str | None = None
    n: Annotated[int, Field(ge=1)] = 1
    temperature: Annotated[float, Field(ge=0, le=2, allow_inf_nan=False)] = 1.0
    top_p: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] = 1.0
    frequency_penalty: Annotated[float, Field(ge=-2, le=2, allow_inf_nan=False)] = 0.0
    presence_penalty: Annotated[float, Field(ge=-2, le=2, allow_inf_nan=False)] = 0.0
    seed: Annotated[int | None, Field(ge=-SEED, lt=SEED)] = None
    stop: Annotated[list[str], BeforeValidator(_stops, json_schema_input_type=str | list[str] | None)] = []
    stream: bool = False
    stream_options: StreamOptions | None = None
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] = 0
    min_p: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] = 0.0
    repetition_penalty: Annotated[float, Field(ge=1e-3, le=1e3, allow_inf_nan=False)] = 1.0
    ignore_eos: bool = False
    logit_bias: Annotated[Any, _only({})] = None

    @model_validator(mode="before")
    @classmethod
    def _null_is_default(cls, body: Any) -> Any:  # as in OpenAI's own API
        if not isinstance(body, dict):
            return body
        fields = cls.model_fields
        return {
            key: item
            for key, item in body.items()
            if item is not None or key not in fields or fields[key].is_required()
        }

    @model_validator(mode="after")
    def _check_stream_options(self) -> GenerationRequest:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options go with stream=true only")
        return self

    def params(self, max_tokens: int, logprobs: int | None) -> SamplingParams:
        top_k = max(self.top_k, 0)  # -1 is "off" in vLLM
        alike = self.model_dump(include=SAME_NAMES)
        return SamplingParams(max_tokens=max_tokens, top_k=top_k, stop=tuple(self.stop), logprobs=logprobs, **alike)


Prompts = Annotated[
    list[str | list[int]],
    BeforeValidator(_prompts, json_schema_input_type=str | list[int] | list[str] | list[list[int]]),
]


class CompletionRequest(GenerationRequest):
    """``POST /v1/completions``."""

    prompt: Prompts
    max_tokens: Annotated[int, Field(ge=0)] = 16  # OpenAI's default of old
    logprobs: Annotated[int | None, Field(ge=0, le=5)] = None
    echo: bool = False
    best_of: Annotated[Any, _only(1)] = None
    suffix: Annotated[Any, _only("")] = None

    @model_validator(mode="after")
    def _check_echo(self) -> CompletionRequest:
        if self.echo and self.logprobs is not None:
            raise ValueError("echo with logprobs is not served here: leave one of them out")
        return self


class Message(Strict):
    """One turn of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[str, BeforeValidator(_content, json_schema_input_type=str | list[dict[str, str]])]

    def as_dict(self) -> dict[str, str]:
        """For the chat template; OpenAI's newer name of the system's role is the same thing."""
        return {"role": "system" if self.role == "developer" else self.role, "content": self.content}


class ChatRequest(GenerationRequest):
    """``POST /v1/chat/completions``."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_tokens: Annotated[int | None, Field(ge=1)] = None
    max_completion_tokens: Annotated[int | None, Field(ge=1)] = None
    logprobs: bool = False
    top_logprobs: Annotated[int | None, Field(ge=0, le=20)] = None
    response_format: Annotated[Any, _only({"type": "text"})] = None
    tools: Annotated[Any, _only([])] = None
    tool_choice: Annotated[Any, _only("none", "auto")] = None
    functions: Annotated[Any, _only([])] = None
    function_call: Annotated[Any, _only("none", "auto")] = None
    modalities: Annotated[Any, _only(["text"])] = None
    audio: Annotated[Any, _only()] = None

    @model_validator(mode="after")
    def _check_top_logprobs(self) -> ChatRequest:
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs go with logprobs=true only")
        return self

    @property
    def limit(self) -> int | None:
        """The most tokens: the newer name wins."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
