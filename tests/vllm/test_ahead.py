"""Kernels that a process of its own compiles while vLLM loads a model."""

import importlib
import os
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

pytest.importorskip("tilelang")

from leank_convert._runtime.kernel_key_leank import KernelKey
from leank_convert.vllm import ahead, page_kernels, sum_kernel

KEY = KernelKey(torch.device("cpu"), torch.bfloat16, 128, 4, 32, 4, 8, has_glue=False)

# Stands for a key: tells which process asked what device it is for.
TELLING = """
import os, pathlib

class Key:
    def __init__(self, path, has_glue):
        self.path, self.has_glue = path, has_glue

    @property
    def device(self):
        with pathlib.Path(self.path).open("a") as file:
            file.write(f"{os.getpid()}\\n")
        raise RuntimeError("no compiler")
"""


def test_another_process_compiles_by_our_packages_first(tmp_path, monkeypatch):
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "telling.py").write_text(TELLING)
    (tmp_path / "pickle.py").write_text("open('was run', 'w')")  # in the working directory
    monkeypatch.syspath_prepend(tmp_path / "package")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(ahead, "_compilations", [])
    telling = importlib.import_module("telling")
    ahead.compile_ahead([], has_ranks=False)
    assert not ahead._compilations
    files = [tmp_path / "asked by", tmp_path / "asked for glue by"]
    ahead.compile_ahead([telling.Key(str(file), file != files[0]) for file in files], has_ranks=True)
    ahead.wait_for_kernels()
    asked_by = [[*map(int, file.read_text().split())] for file in files]
    assert len({os.getpid(), *(first for first, *_ in asked_by)}) == 3  # each has a process to itself
    assert {process for _, *rest in asked_by for process in rest} == {os.getpid()}  # and is loaded here
    assert not (tmp_path / "was run").exists()


@pytest.mark.parametrize("has_ranks", [False, True])
def test_kernels_of_pages_are_compiled_once_for_all_numbers_of_columns(has_ranks, monkeypatch):
    found, of_pages = Mock(side_effect=lambda key: SimpleNamespace(key=key, arch="sm_90a")), Mock()
    of_ranks = Mock()
    monkeypatch.setattr(ahead, "DecodeKernels", found)
    monkeypatch.setattr(page_kernels, "compile_page_kernels", of_pages)
    monkeypatch.setattr(sum_kernel, "compile_sum_kernels", of_ranks)
    glue = replace(KEY, has_glue=True)
    keys = [replace(KEY, num_queries=64), (other := replace(KEY, max_chunks=2)), glue]
    ahead.compile_all([KEY, *keys], has_ranks)
    assert [call.args for call in of_ranks.call_args_list] == ([(glue, "sm_90a")] if has_ranks else [])
    assert {call.args for call in found.call_args_list} == {(key,) for key in (KEY, *keys)}
    asked = [call.args for call in of_pages.call_args_list]
    assert sorted(asked, key=str) == sorted([(KEY, "sm_90a"), (other, "sm_90a")], key=str)
