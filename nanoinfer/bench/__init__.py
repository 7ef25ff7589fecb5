"""Load a server, or an engine in this process, and measure what its users would feel.

Read ``options`` and ``loadgen`` first (what is asked for, and the open and closed loop that send it), then ``client``
and ``stream`` (one request over HTTP, and the tokens in its answer), then ``summary`` and ``sweep`` (what is made of
the traces).
"""
