"""The OpenAI-compatible server. Needs the extra ``serve`` (FastAPI, uvicorn, prometheus-client).

A request passes ``middleware`` (key, limits), ``app`` (routes), ``schemas`` (what a client may send), ``service`` (the
engine) and ``responses`` (what it gets back). Read ``app`` first; ``run`` starts all of it from ``options``.
"""
