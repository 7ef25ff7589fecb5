"""A server behind an OpenAI-compatible API, as a target: vLLM, SGLang, llama.cpp, a hosted one, or our own.

A client must not become what is measured: no cap on connections (a pool of 100 turns the 101st user into a hidden
queue), no task and no timer for a chunk, and the time of a chunk is taken before anything is done with it.
"""

from __future__ import annotations

import asyncio
import json
import urllib.request
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cached_property
from typing import Any, Literal
from urllib.parse import urlsplit, urlunsplit

from nanoinfer.bench.loadgen import Target
from nanoinfer.bench.stream import SSEParser, StreamRecorder, error_text, estimate_tokens
from nanoinfer.errors import RequestError
from nanoinfer.measure.clock import now
from nanoinfer.measure.trace import Trace
from nanoinfer.workload.items import WorkItem

try:
    import aiohttp
except ModuleNotFoundError:  # pragma: no cover
    raise RequestError("loading a server needs aiohttp: pip install 'nanoinfer[bench]'") from None

Endpoint = Literal["completions", "chat"]
PATHS: Mapping[str, str] = {"completions": "completions", "chat": "chat/completions"}
#: Fields beyond the plain API. Where a server answers 400, they are left out one by one, from the left.
EXTENSIONS = ("continuous_usage_stats", "ignore_eos", "stream_options")
#: Seconds that a connection is kept for the next request: below the 5 after which many servers close theirs.
KEEP_S = 2.0
#: Seconds that the end of a body may come after the end of the answer before the connection is closed.
LAST_BYTES_S = 0.25
REJECTIONS = (429, 503)
LOOPBACK = ("localhost", "127.0.0.1", "::1")


class HttpTarget(Target):
    """One model of one server. Use it in one event loop, and ``close`` it there.

    Args:
        url: the server (``http://host:8000``), its API (``https://host/api/v1``), or the full address of an endpoint.
        model: its name there; :meth:`connect` finds one.
        endpoint: ``completions`` (texts or token ids) or ``chat`` (texts, as one message of a user). None takes that
            of the address, else completions.
        count: tokens of a text, for servers that send no counts; without, an estimate.
        extra: more fields of the request's body; None removes a field, as in ``{"ignore_eos": None}``, which otherwise
            asks for exactly ``output`` tokens.

    Raises:
        RequestError: an address, a key or an endpoint that cannot be used.
    """

    def __init__(
        self,
        url: str,
        *,
        model: str,
        endpoint: Endpoint | None = None,
        api_key: str | None = None,
        count: Callable[[str], int] | None = None,
        extra: Mapping[str, Any] | None = None,
    ) -> None:
        if endpoint is None:
            endpoint = "chat" if url.rstrip("/").endswith("/chat/completions") else "completions"
        if endpoint not in PATHS:
            raise RequestError(f"endpoint '{endpoint}': known are completions and chat")
        if api_key is not None and not (api_key.isascii() and api_key.isprintable()):
            raise RequestError("the API key holds characters that no header can carry; is there a line end in it?")
        self.base = _base(url)
        self.url, self.model, self.endpoint = f"{self.base}/{PATHS[endpoint]}", model, endpoint
        self.name = f"{model} at {self.base}"
        self.messages: dict[str, str] = {}
        self._count, self._extra = count or estimate_tokens, dict(extra or {})
        self._all_extensions = tuple(name for name in EXTENSIONS if name not in self._extra)
        self._extensions = self._all_extensions
        self._is_settled = False  # whether the server has accepted a request with these
        self._headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self.proxy = _proxy(self.base)

    @classmethod
    async def connect(
        cls, url: str, *, model: str | None = None, timeout_s: float = 60.0, **options: Any
    ) -> HttpTarget:
        """A target that has answered one small request, so that a mistake shows before the load.

        ``options`` are those of the class. Without a ``model`` it takes the first that the server offers.

        Raises:
            RequestError: no server there, an unknown model, a refused key, with the server's own text.
        """
        target = cls(url, model=model or "", **options)
        try:
            async with asyncio.timeout(timeout_s):
                if model is None:
                    target.model = await target._first_model()
                    target.name = f"{target.model} at {target.base}"
                trace = Trace(start := now(), start)
                await target.send(WorkItem("Hello", 1), trace)
            if trace.status != "ok":
                raise RequestError(f"{target.url}: {trace.error}: {target.messages[trace.error or '']}")
        except BaseException as error:
            await target.close()
            if isinstance(error, TimeoutError):
                raise RequestError(f"{target.base}: no answer within {timeout_s:g} s") from None
            raise
        return target

    @property
    def settings(self) -> dict[str, Any]:
        """Which server, model and request fields; no key."""
        return {
            "url": self.url,
            "model": self.model,
            "endpoint": self.endpoint,
            "extensions": list(self._extensions),
            "extra": self._extra,
            "is_proxied": self.proxy is not None,
        }

    async def send(self, work: WorkItem, trace: Trace) -> None:
        """Send one request and read its answer to the end."""
        recorder = StreamRecorder(trace, self._count)
        if not isinstance(work.prompt, str):
            trace.prompt_tokens = len(work.prompt)
        try:
            while not await self._try(work, trace, recorder):
                pass
        except asyncio.CancelledError:
            if trace.t_end is None:  # else the answer had ended, and only the connection was waited for
                trace.status = "cancelled"
            raise
        except (aiohttp.ClientError, OSError, ValueError) as error:
            self.fail(trace, *_classify(error, bool(trace.chunks)))
        finally:
            recorder.close()
            if trace.t_end is None:
                trace.t_end = now()

    async def close(self) -> None:
        """Close all connections."""
        if (session := vars(self).pop("_session", None)) is not None:
            await session.close()

    async def _try(self, work: WorkItem, trace: Trace, recorder: StreamRecorder) -> bool:
        """One attempt; False where the server refused an extension, and it is worth another without."""
        extensions = self._extensions
        body = self._body(work, extensions)
        trace.t_sent = now()
        async with self._session.post(self.url, data=body, proxy=self.proxy) as response:
            if response.status == 200:
                await self._read(response, trace, recorder)
                self._is_settled = True
                return True
            message = error_text(_json_or_text(await response.content.read(4096)))
            if response.status in (400, 422) and not self._is_settled:
                if extensions:
                    if self._extensions is extensions:  # no other request has removed one meanwhile
                        self._extensions = extensions[1:]
                    return False
                self._extensions = self._all_extensions  # they were not the reason
            self.fail(trace, f"http {response.status}", message)
            if response.status in REJECTIONS:
                trace.status = "rejected"
            return True

    async def _read(self, response: aiohttp.ClientResponse, trace: Trace, recorder: StreamRecorder) -> None:
        if response.content_type == "application/json":
            return self.fail(trace, "no stream", "the server answered with a whole JSON document instead of a stream")
        parser, content = SSEParser(), response.content
        while not recorder.is_done and recorder.error is None:
            read = await content.readany()
            t = now()
            for data in parser.feed(read) if read else parser.end():
                recorder.take(data, t)
            if not read:
                break
        trace.t_end = t
        if recorder.error is not None:
            self.fail(trace, "error frame", recorder.error)
        elif not (recorder.is_done or recorder.is_finished):
            self.fail(trace, "cut off", "the stream ended before the answer did")
        elif not content.at_eof():  # read on to the end, or the connection cannot be used again
            with suppress(TimeoutError):
                async with asyncio.timeout(LAST_BYTES_S):
                    await content.readany()

    def _body(self, work: WorkItem, extensions: tuple[str, ...]) -> bytes:
        body: dict[str, Any] = {"model": self.model, "stream": True, "max_tokens": work.output, "temperature": 0}
        if self.endpoint == "completions":
            body["prompt"] = work.prompt if isinstance(work.prompt, str) else list(work.prompt)
        elif isinstance(work.prompt, str):
            body["messages"] = [{"role": "user", "content": work.prompt}]
        else:
            raise RequestError("chat takes texts, not token ids; use the completions endpoint, or prompts of words")
        if "stream_options" in extensions:
            body["stream_options"] = {"include_usage": True}
            if "continuous_usage_stats" in extensions:
                body["stream_options"]["continuous_usage_stats"] = True
        if "ignore_eos" in extensions:
            body["ignore_eos"] = True
        body |= self._extra
        return json.dumps({key: value for key, value in body.items() if value is not None}).encode()

    @cached_property
    def _session(self) -> aiohttp.ClientSession:
        return aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_S, ttl_dns_cache=300),
            timeout=aiohttp.ClientTimeout(total=None),  # the load sets the limit
            headers=self._headers,
            cookie_jar=aiohttp.DummyCookieJar(),
        )

    async def _first_model(self) -> str:
        try:
            async with self._session.get(f"{self.base}/models", proxy=self.proxy) as response:
                body = _json_or_text(await response.read())
            if response.status != 200:
                raise RequestError(f"{self.base}/models: http {response.status}: {error_text(body)}")
            return str(body["data"][0]["id"])
        except (aiohttp.ClientError, OSError, ValueError) as error:
            _, message = _classify(error, False)
            raise RequestError(f"{self.base}: {message}") from None
        except (LookupError, TypeError):
            raise RequestError(f"{self.base}/models names no model: say which") from None


def _classify(error: Exception, has_begun: bool) -> tuple[str, str]:
    """A connection error's short name and its message."""
    if isinstance(error, aiohttp.ClientSSLError):
        return "tls", str(error)
    if isinstance(error, aiohttp.ClientConnectorError | aiohttp.ClientProxyConnectionError):
        return "connect", f"nothing answers there; is the server running? ({error})"
    if isinstance(error, aiohttp.ClientHttpProxyError):
        return "proxy", str(error)
    if isinstance(error, aiohttp.ClientError | OSError):
        return ("cut off", "the connection broke off") if has_begun else ("disconnected", str(error) or "it hung up")
    return "bad frame", str(error)


def _json_or_text(body: bytes) -> Any:
    try:
        return json.loads(body)
    except ValueError:
        return body.decode("utf-8", errors="replace")


def _base(url: str) -> str:
    """The address of the API from any part of it. Refuses a name and password in it."""
    try:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        is_usable = parts.scheme in ("http", "https") and parts.hostname and (parts.port or 1) > 0
    except ValueError:
        is_usable = False
    if not is_usable:
        raise RequestError(f"'{url}' is no address of a server; write one such as http://localhost:8000")
    if parts.username is not None or parts.password is not None:
        raise RequestError("the address holds a name or password; give an API key instead")
    path = parts.path.rstrip("/")
    for ending in ("/chat/completions", "/completions", "/models"):
        path = path.removesuffix(ending)
    return urlunsplit((parts.scheme, parts.netloc, path or "/v1", "", ""))


def _proxy(base: str) -> str | None:
    """The proxy that the environment names for this address, looked up once; loopback needs none.

    aiohttp's ``trust_env`` would look again for each request (0.15 ms), read ``~/.netrc``, and proxy loopback too.
    """
    parts = urlsplit(base)
    host = parts.hostname or ""
    if host in LOOPBACK or urllib.request.proxy_bypass(host):
        return None
    proxies = urllib.request.getproxies()
    proxy = proxies.get(parts.scheme) or proxies.get("all")
    if proxy is not None and urlsplit(proxy).scheme not in ("http", "https"):
        raise RequestError(f"the proxy of the environment is not an HTTP proxy: {urlsplit(proxy).scheme}://...")
    return proxy
