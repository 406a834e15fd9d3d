"""What a converted checkpoint carries: config, cache, attention and model classes, for transformers.

Every `*_leank.py` here is copied flat into each checkpoint and loaded from there with
`trust_remote_code=True`. The files import the standard library, torch, transformers and one another
(`from .x_leank import y`), nothing else. README.md draws the cache and states the maths.
"""
