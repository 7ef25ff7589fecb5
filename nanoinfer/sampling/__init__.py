"""From logits to a token.

Read ``params`` (the settings of a request) first, then ``sample`` (from logits to ids), then ``filters`` (how top-k,
top-p and min-p find what they keep without a sort).
"""
