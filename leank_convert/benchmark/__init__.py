"""How fast a pruned cache decodes and how little it holds, beside dense peers in the same process.

Measured through a checkpoint's own runtime files, on random weights or random keys and values of a real
model's shape. A figure is reported only after what was timed has been checked against a reference.
"""
