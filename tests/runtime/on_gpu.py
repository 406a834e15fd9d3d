"""What tests on a CUDA device share: tokens and padding there, and passes that may not wait for it."""

import contextlib

import torch

from tests.runtime import tiny_inputs

MASK_WIDTHS = [[0, 16, 32], [8, 64, 64]]


def ids(rows, length, seed=0):
    """Tokens `[rows, length]`."""
    return tiny_inputs.ids(rows, length, seed).cuda()


def padded(length, *others):
    """A mask of three rows, of which the second begins with padding, and has more of it in other columns."""
    return tiny_inputs.padded(length, 22, *others, rows=3).cuda()


@contextlib.contextmanager
def no_waiting():
    """What is within raises where it waits for the device."""
    torch.cuda.synchronize()
    try:
        torch.cuda.set_sync_debug_mode("error")
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
