"""What the command line refuses: in one style, before torch is imported, whatever the number or library."""

import os
import re
import sys
from unittest.mock import Mock

import pytest

from tests.checks import rejected, run, run_python


@pytest.mark.parametrize(
    ("arguments", "message", "hint"),
    [
        (["trian", "x"], "no such command `trian`", "did you mean `train`?"),
        (["evaluate", "x", "--lenght", "5"], "no such option `--lenght`", "did you mean `--length`?"),
        (["--nothing"], "no such option `--nothing`", "see `leank-convert --help`"),
        (["train", "testbed"], "missing option `-o` / `--out`", "see `leank-convert train --help`"),
        (["export", "a", "-o"], "option `-o` requires an argument", "see `leank-convert --help`"),
        (
            ["train", "a", "--flush-size", "x"],
            "invalid value for `--flush-size`: `x` is not a whole number",
            "see `leank-convert train --help`",
        ),
        (["recipes", "a", "b"], "got unexpected extra argument (b)", "see `leank-convert recipes --help`"),
    ],
)
def test_what_click_refuses_is_told_as_everything_else_is(arguments, message, hint):
    assert rejected(*arguments) == f"error: {message}\nhint: {hint}\n"


EXPORT, TRAIN = "export testbed --all-channels -o OUT", "train testbed -o OUT"
REFUSED = {
    "inspect OUT/absent.safetensors": "absent.safetensors",
    "inspect llama-3.1-8b-instruct --memory 40": "`40` is no amount of memory such as 40GiB or 1.5GB",
    "inspect llama-3.1-8b-instruct --memory 40GiB --tokens 0": "0 is not in the range",
    "inspect llama-3.1-8b-instruct --tokens 8192": "--tokens goes with --memory",
    "export owner/unknown -o OUT": "no mask for `owner/unknown`",
    "export ./unknown -o OUT": "model folder `./unknown` does not exist",
    f"{EXPORT} --mask m.npy": "exclude each other",
    f"{EXPORT} --set stage1.steps=9": "--set stage1.steps has no effect: this export reads",
    f"{EXPORT} --set model.dtype=float16": "--set model.dtype has no effect: this export reads",
    f"{EXPORT} --force --key-mean": "--force goes with --kv-dtype, whose cache is tried",
    f"{EXPORT} --device cpu": "--device goes with --kv-dtype, --key-mean and --value-pruning-ratio",
    "recipes quickstart --keys": "`--keys` goes without a recipe's name",
    f"{EXPORT} --private": "--private goes with --push-to-hub",
    f"{EXPORT} --base-model /a/b": "base model '/a/b' is not a valid name",
    f"{TRAIN} --set stage1.step=5": "did you mean `stage1.steps`?",
    "train someone/some-model -o OUT": "error: `someone/some-model` is not here",
    # Of the recipes that a model has, the plainest.
    "train Qwen/Qwen2.5-7B-Instruct -o OUT --set stage1.step=5": "recipe `qwen2.5-7b-instruct`",
    f"{TRAIN} --mask-only --push-to-hub a/b": "writes no checkpoint",
    f"{TRAIN} --mask-only --base-model a/b": "writes no model card",
    f"{TRAIN} --json": "--json goes with --dry-run",
    f"{TRAIN} --push-to-hub bad-id!!": "`bad-id!!`",
    f"{TRAIN} --set mask=m.npy": "nothing is to be trained",
    f"{TRAIN} --device toaster": "toaster",
    f"{TRAIN} --method static-nrm": "`--method`",
    f"{TRAIN} --method high-frequency-ratio --budget uniform": "all channels or none; leave it out",
    f"{TRAIN} --method random --dry-run": "without `--dry-run`",
    f"{TRAIN} --method random --resume": "leave `--resume` out",
}


@pytest.mark.parametrize(("command", "message"), REFUSED.items(), ids=REFUSED)
def test_what_would_do_nothing_or_fail_late_is_refused_at_once(command, message, tmp_path):
    out = tmp_path / "out"
    told = rejected(*command.replace("OUT", str(out)).split())
    assert message in "; ".join(told.splitlines())
    assert "Traceback" not in told
    assert not out.exists()


@pytest.mark.parametrize(
    "arguments",
    [["inspect", ""], ["export", "testbed", "--all-channels", "-o", ""], ["train", "testbed", "--out="]],
)
def test_what_an_unset_variable_leaves_is_not_the_current_folder(arguments, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert "is empty: is a variable not set?" in rejected(*arguments)
    assert list(tmp_path.iterdir()) == []


def test_names_in_an_error_are_cut_and_cannot_move_the_cursor():
    told = rejected("inspect", "\x1b[2J" + "x" * 10**6)
    assert len(told) < 3000
    assert "\\x1b[2J" in told


def test_a_bare_group_shows_its_help():
    assert rejected().startswith("Usage: ")


def test_ctrl_c_is_one_line(monkeypatch):
    monkeypatch.setattr("leank_convert.inspection.inspect_artifact", Mock(side_effect=KeyboardInterrupt))
    result = run("inspect", "x")
    assert (result.exit_code, result.stderr) == (130, "error: interrupted\n")


@pytest.mark.parametrize("value", ["1" + "0" * 12, "1" + "0" * 4000, "1" + "0" * 5000, "-1", "nan"])
@pytest.mark.parametrize(
    ("command", "option"),
    [
        *((["train", "testbed"], option) for option in ("--sink-size", "--recent-size", "--flush-size")),
        (["train", "testbed"], "--pruning-ratio"),
        *((["evaluate", "x"], option) for option in ("-n", "--batch-size", "--length")),
        *((["evaluate-text", "x"], option) for option in ("--prefix-tokens", "--num-tokens")),
        (["analyze", "x"], "-n"),
    ],
    ids=lambda value: value if isinstance(value, str) and len(value) < 20 else "",
)
def test_a_number_beyond_all_measure_is_refused_by_its_option(command, option, value):
    told = rejected(*command, f"{option}={value}" if option[1] == "-" else option + value)
    assert len(told) < 500
    assert f"error: invalid value for `{option}`" in told


@pytest.mark.parametrize("command", [["train", "testbed"], ["evaluate", "x"], ["analyze", "x"]])
def test_a_seed_has_63_bits(command):
    assert "invalid value for `--seed`" in rejected(*command, "--seed", 2**63)


@pytest.fixture
def run_where(tmp_path):
    """Runs a command where modules of these names hold what is given."""

    def run(arguments, **modules):
        for name, code in modules.items():
            (tmp_path / f"{name}.py").write_text(code)
        path = os.pathsep.join([str(tmp_path), *sys.path])
        return run_python("-m", "leank_convert", *arguments, env={**os.environ, "PYTHONPATH": path})

    return run


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "testbed", "--recipe", "/dev/zero"], "is a folder, a pipe or a device"),
        (["train", "testbed", "--set", "data.haystack.source=absent.txt"], "source` is 'absent"),
        (["export", "testbed", "--set", "windows.sink_size=-1"], "`windows.sink_size` is -1"),
        (["export", "testbed", "--recipe", "absent.yaml"], "neither a file nor a packaged recipe"),
        (["evaluate", "absent"], "`absent"),
        (
            ["evaluate", "CHECKPOINT", "--recipe", "quickstart", "--set", "data.max_length=x"],
            "`data.max_length` is 'x'",
        ),
    ],
)
def test_bad_recipes_and_options_are_refused_before_torch_is_imported(
    run_where, tmp_path, shipped_checkpoint, arguments, message
):
    given = [shipped_checkpoint if argument == "CHECKPOINT" else argument for argument in arguments]
    modules = {name: f"raise SystemExit('{name} was imported')\n" for name in ("torch", "transformers")}
    done = run_where([*given, "-o", tmp_path / "out"], **modules)
    assert (done.returncode, done.stdout) == (2, "")
    assert message in done.stderr
    assert not (tmp_path / "out").exists()


# As transformers does where torch lacks what one of its modules names.
LAZY = """
def __getattr__(name):
    try:
        raise AttributeError("module 'torch' has no attribute 'float8_e8m0fnu'")
    except AttributeError as error:
        raise ModuleNotFoundError(f"Could not import module '{name}'. Are its requirements met?") from error
"""
CASES = {
    "too old a torch": (LAZY, "Could not import module '"),
    "too old a transformers": ("", "cannot import name '"),
    "a library of its own is missing": ("import a_library_of_its_own", "No module named 'a_library_of_its"),
    "a shared object is missing": ("raise OSError('libcudart.so.12: cannot open')", "libcudart.so.12: canno"),
}


@pytest.mark.parametrize(("code", "message"), CASES.values(), ids=CASES)
def test_a_failing_import_is_one_sentence_with_the_versions_seen(code, message, run_where, tmp_path):
    for name, version in (("torch", "2.6.0"), ("transformers", "5.10.0")):
        folder = tmp_path / f"{name}-{version}.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    done = run_where(["analyze", "testbed"], transformers=code)
    error, hint = done.stderr.splitlines()
    assert error.startswith(f"error: transformers 5.10.0 cannot be imported with torch 2.6.0: {message}")
    assert re.match("hint: pip install -U .*torch.* .*transformers", hint)
    assert (done.returncode, done.stdout) == (2, "")
