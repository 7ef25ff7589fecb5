"""The OpenAI-compatible server. Needs the extra ``serve`` (FastAPI, uvicorn, prometheus-client)."""
