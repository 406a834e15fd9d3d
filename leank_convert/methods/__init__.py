"""Methods that choose a model's channels: LeanK's training, and simpler ones that train nothing.

A method gives every channel a score [L, H_kv, D]; one selection (`train.selection`) turns scores into a mask,
and the mask file is all that comes out.
"""

from leank_convert.methods.convert import make_masks

__all__ = ["make_masks"]
