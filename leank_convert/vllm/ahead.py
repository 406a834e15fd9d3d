"""Compilation of kernels in processes of their own, while vLLM loads and compiles the model.

In one process compilers and Dynamo wait for each other, as Python's lock is one. What is compiled is then
loaded from TileLang's cache on disk. This module needs nothing of vLLM, which takes long to import.
"""

from __future__ import annotations

import contextlib
import pickle
import subprocess
import sys
import threading
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from leank_convert._runtime.decode_kernels_leank import DecodeKernels
from leank_convert._runtime.kernel_key_leank import KernelKey

# Whatever is in the working directory stays out.
_PROGRAM = (
    "import pickle, sys; read = sys.stdin.buffer; sys.path[:] = pickle.load(read); "
    "from leank_convert.vllm import ahead; ahead.compile_all(*pickle.load(read))"
)

_MOST_SECONDS = 600  # far more than compilers take

_compilations: list[threading.Thread] = []


def compile_ahead(keys: Iterable[KernelKey], *, has_ranks: bool) -> None:
    """Begin to compile what layers will ask for, so that no request waits: kernels of a fused step apart."""
    keys = list(keys)
    for own in ([key for key in keys if key.has_glue], [key for key in keys if not key.has_glue]):
        if own:
            given = own, has_ranks
            _compilations.append(threading.Thread(target=_compile_and_load, args=given, daemon=True))
            _compilations[-1].start()


def _compile_and_load(keys: list[KernelKey], has_ranks: bool) -> None:
    command, silent = [sys.executable, "-I", "-c", _PROGRAM], subprocess.DEVNULL
    given = pickle.dumps([path for path in sys.path if path]) + pickle.dumps((keys, has_ranks))
    # Whatever fails there fails here, too, and again where a layer asks, which tells of it.
    with contextlib.suppress(Exception):
        subprocess.run(command, input=given, stdout=silent, stderr=silent, timeout=_MOST_SECONDS, check=False)
    with contextlib.suppress(Exception):
        compile_all(keys, has_ranks)


def wait_for_kernels() -> None:
    """Wait until all is compiled, or failed."""
    for compilation in _compilations:
        compilation.join()


def compile_all(keys: list[KernelKey], has_ranks: bool) -> None:
    """Compile the kernels of decoding, of pages and of ranks into TileLang's cache; takes no GPU memory."""
    from leank_convert.vllm.page_kernels import compile_page_kernels
    from leank_convert.vllm.sum_kernel import compile_sum_kernels

    with ThreadPoolExecutor(len(keys)) as pool:
        made = list(pool.map(DecodeKernels, keys))
        # Other numbers of columns have the same ones, and those of rows of many have no glue.
        of_pages = {replace(own.key, num_queries=8): own.arch for own in made if not own.key.has_glue}
        list(pool.map(compile_page_kernels, of_pages, of_pages.values()))
        of_ranks = {own.key: own.arch for own in made if own.key.has_glue and has_ranks}
        list(pool.map(compile_sum_kernels, of_ranks, of_ranks.values()))
