"""Decoders, and what brings their weights in.

Read ``attention``, ``model`` (what every decoder has in common), ``gpt2``, ``llama`` and ``moe``; then ``registry`` (a
name in, a model ready to run out) and what it uses: ``weights`` (safetensors and random), ``gguf_file``, ``fetch``.
``lookup`` gives a model's shape without weights.
"""
