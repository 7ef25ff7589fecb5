"""One model over several processes: tensor, pipeline, context, expert and data parallel.

Read ``collectives`` first (what ranks send each other, counted), then ``launch`` (starts the ranks), then one file a
split. ``experiments`` has the measured comparisons of chapter 19.
"""
