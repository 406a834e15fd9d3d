"""Folding a basis of V into weights: numbers of one tensor's block, a block being what one KV head has of it.

With B [D, D] a head's directions in columns, rows of V's weight and its bias become BT W, and the columns of
`o_proj` that each of the head's queries has become W B. As B is orthonormal the model computes what it did,
to the rounding of its weights.
"""

from __future__ import annotations

import torch
from torch import Tensor

DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "F64": torch.float64}
# Of the largest number of a block: what the order of a sum in double precision may differ by.
_ORDER = 1e-12


def fold(block: Tensor, basis: Tensor, dim: int) -> Tensor:
    """Fold a basis [D, D] into rows of V [D, …], where `dim` is 0, or columns of O [rows, G·D]; float64."""
    if dim == 0:
        return basis.mT @ block.double()
    folded = block.double().unflatten(1, (-1, len(basis))) @ basis  # type: ignore[no-untyped-call]
    return torch.flatten(folded, 1)


def fold_bytes(content: bytes, dtype: str, rows: int, basis: Tensor, dim: int) -> bytes:
    """Fold a basis into the bytes of a block of so many rows, rounded once to the dtype that they have."""
    block = torch.frombuffer(bytearray(content), dtype=DTYPES[dtype]).view(rows, -1)
    return fold(block, basis, dim).to(block.dtype).contiguous().view(torch.uint8).numpy().tobytes()


def is_folded(source: Tensor, written: Tensor, basis: Tensor, dim: int) -> bool:
    """Whether a block is the fold of another: no number of its dtype is nearer to what is computed here."""
    exact = fold(source, basis, dim)
    nearest = (exact.to(written.dtype).double() - exact).abs()
    return bool(((written.double() - exact).abs() <= nearest + _ORDER * exact.abs().amax()).all())
