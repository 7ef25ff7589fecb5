"""Text to token ids and back.

Read ``tokenizer`` first (a vocabulary, run by tiktoken), then ``tokenizer_files`` (where vocabularies come from),
``chat`` (messages to a prompt) and ``stopping`` (stop strings).
"""
