"""The Python API: every name is there and no submodule, and importing the package loads nothing heavy."""

import importlib.util
import inspect
import json
import subprocess
import sys

import pytest

import leank_convert
from leank_convert.errors import LeanKError

LONG = "a" * 5000


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
    seen = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout
    loaded = set(json.loads(seen)) - set(sys.stdlib_module_names)
    assert loaded == {"leank_convert"}


@pytest.mark.parametrize(
    ("name", "arguments", "options", "message"),
    [
        ("load_recipe", ["quickstart", [5]], {}, r"`overrides` is \[5\], not a list"),
        ("load_recipe", ["quickstart", ["stage1.steps=0", "stage2.steps=0"]], {}, "nothing would tell"),
        ("load_mask", [LONG], {}, "cannot be a path: File name too long"),
        ("export_checkpoint", [LONG, None, "out"], {}, "cannot be a path: File name too long"),
        ("export_checkpoint", ["testbed", None, "out"], {"pruning_ratio": "x"}, "is 'x', not a number"),
        ("export_checkpoint", ["testbed", None, "a\0"], {}, "is no path: it holds a NUL character"),
        ("export_checkpoint", ["testbed", None, "out"], {"config_overrides": 5}, "is 5, not a mapping"),
        ("export_checkpoint", ["testbed", None, "out"], {"overwrite": "no"}, "'no', neither true nor false"),
        ("train_mask", ["testbed", "out"], {"resume": "no"}, "'no', neither true nor false"),
        ("train_mask", ["testbed", 5], {}, "5 cannot be a path"),
        ("export_onnx", ["testbed", None, "out"], {"dtype": "bfloat16"}, "not one of float32, float16"),
    ],
)
def test_what_a_caller_does_wrong_is_one_error(name, arguments, options, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(LeanKError, match=message):
        getattr(leank_convert, name)(*arguments, **options)
    assert not list(tmp_path.iterdir())


def test_the_text_of_an_error_is_in_pythons_words():
    error = LeanKError("`--seed` is -1", "`--force`, `--set 'b={}'`, `--kv-dtype fp8`, `x --resume`")
    told = 'hint: `force=True`, `overrides=["b={}"]`, `kv_dtype="fp8"`, `x --resume`'
    assert str(error) == f"`seed` is -1\n{told}"
