"""The shape of a model: a handful of integers from which everything countable follows. No weights, and no torch.

Read ``config`` first; ``huggingface`` and ``gguf`` read it from the files that publishers write, and ``catalog`` holds
published models by name. A new family is one entry in their tables.
"""
