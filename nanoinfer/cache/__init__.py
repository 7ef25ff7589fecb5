"""Where keys and values are kept between steps.

Read ``contiguous`` first: one block of memory for a batch. Then ``blocks`` (which blocks a sequence holds, and what it
shares), ``paged`` (their tensors), and ``ragged`` (attention over rows of unlike lengths).
"""
