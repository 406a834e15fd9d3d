"""Speed and memory of a pruned cache, and the cost of training, beside dense peers in the same process.

Models have random weights and the shape of a real one. But for `serve` a figure is reported only
after what is timed has been checked against a reference: what is wrong gets no figure, `ok` is false and the
command exits 1.

Tables go to stderr. The last line of stdout is one JSON document, format_version 1: units are in the keys, a
GB/s is 1e9 bytes a second, a ratio above 1 says that ours is faster or that more of ours fits, null stands
where nothing was measured, and `check` is ‖result - exact‖ / ‖exact‖ beside torch's own.
"""
