"""The Python API: its names and what importing it loads, and wrong arguments, devices and window sizes."""

import importlib.util
import inspect
import json
import sys

import pytest
import torch

import leank_convert
from leank_convert.device import choose_device
from leank_convert.errors import LeanKError
from leank_convert.windows import Windows
from tests.checks import refusal, run_python

LONG, EVALUATE = "a" * 5000, "evaluate_checkpoint"


@pytest.mark.parametrize("name", leank_convert.__all__)
def test_every_name_is_a_documented_typed_object_and_no_submodule(name):
    found = getattr(leank_convert, name)
    assert inspect.getdoc(found)
    assert importlib.util.find_spec(f"leank_convert.{name}") is None, "the import would give the module"
    if inspect.isfunction(found):
        hints = inspect.get_annotations(found)
        assert set(inspect.signature(found).parameters) | {"return"} == set(hints)


def test_importing_the_package_loads_no_library():
    program = (
        "import json, sys; before = set(sys.modules); import leank_convert; "
        "print(json.dumps(sorted({name.split('.')[0] for name in set(sys.modules) - before})))"
    )
    loaded = set(json.loads(run_python("-c", program).stdout)) - set(sys.stdlib_module_names)
    assert loaded == {"leank_convert"}


@pytest.mark.parametrize(
    ("name", "arguments", "options", "message"),
    [
        ("load_recipe", ["quickstart", [5]], {}, r"`overrides` is \[5\], not a list"),
        ("load_recipe", ["quickstart", ["stage1.steps=0", "stage2.steps=0"]], {}, "nothing would tell"),
        ("load_mask", [torch.ones(2).numpy()], {}, r"array\(\[1\., 1\.\].* cannot be a path: expected str"),
        ("export_checkpoint", [LONG, None, "out"], {}, "cannot be a path: File name too long"),
        ("export_checkpoint", ["testbed", None, "out"], {"pruning_ratio": "x"}, "is 'x', not a number"),
        ("export_checkpoint", ["testbed", None, "a\0"], {}, "is no path: it holds a NUL character"),
        ("export_checkpoint", ["testbed", None, "out"], {"config_overrides": 5}, "is 5, not a mapping"),
        ("export_checkpoint", ["testbed", None, "out"], {"overwrite": "no"}, "'no', neither true nor false"),
        ("train_mask", ["testbed", "out"], {"resume": "no"}, "'no', neither true nor false"),
        ("train_mask", ["testbed", 5], {}, "5 cannot be a path"),
        ("train_mask", ["testbed", ""], {}, "it is empty"),
        (EVALUATE, ["absent"], {"num_samples": 0}, "`num_samples` is 0, not a whole number from 1"),
        (EVALUATE, ["absent"], {"also": "fp8"}, "`also` is 'fp8', not a list of texts"),
        (EVALUATE, ["absent"], {"lengths": ["500"]}, r"\['500'\], not a list of whole numbers"),
        (EVALUATE, ["absent"], {"also": ["windows"]}, "`windows`: no variant to compare with"),
        (EVALUATE, ["absent"], {"lengths": 500}, "`lengths` is 500, not a list of whole"),
        ("export_onnx", ["testbed", None, "out"], {"dtype": "bfloat16"}, "not one of float32, float16"),
    ],
)
def test_what_a_caller_does_wrong_is_one_error(name, arguments, options, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with refusal(message):
        getattr(leank_convert, name)(*arguments, **options)
    assert not list(tmp_path.iterdir())


def test_the_text_of_an_error_is_in_pythons_words():
    error = LeanKError("`--seed` is -1", "`--force`, `--set 'b={}'`, `--kv-dtype fp8`, `x --resume`")
    told = 'hint: `force=True`, `overrides=["b={}"]`, `kv_dtype="fp8"`, `x --resume`'
    assert str(error) == f"`seed` is -1\n{told}"


@pytest.mark.parametrize("device", ["foo", "", "cuda:-1", "cuda:99", "meta", "privateuseone"])
def test_a_device_that_cannot_compute_here_is_refused(device):
    with refusal(f"device `{device}` cannot be used: .", "`cpu`"):
        choose_device(device)


def test_a_usable_device_is_given_back():
    assert choose_device("cpu") == choose_device(torch.device("cpu")) == torch.device("cpu")
    assert choose_device(None).type == ("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize("key", ["sink_size", "recent_size", "flush_size"])
@pytest.mark.parametrize("value", [-1, True, 1.0, "8", 10**30])
def test_a_window_size_that_is_no_number_of_tokens_is_refused(key, value):
    with refusal(f"`{key}` is .{{,160}}$"):
        Windows(**{key: value})


def test_window_sizes_up_to_any_context_are_taken():
    assert Windows(2**24, 2**24, 2**24).flush_size == 2**24
    with refusal("`flush_size` is 0"):
        Windows(flush_size=0)
    with refusal("`prune` is 'lazy', not"):
        Windows(prune="lazy")
