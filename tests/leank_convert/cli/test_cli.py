"""Commands from end to end; what is refused: in one style, before torch is imported."""

import errno
import json
import os
import pty
import re
import shlex
import signal
import subprocess
import sys
from unittest.mock import Mock

import pytest

from leank_convert.cli import main
from leank_convert.testbed import MODEL_DIR
from tests.checks import done, edit_json, rejected, run, run_python, snapshot

SHORT = shlex.split("--set data.min_length=160 --set data.max_length=170 --set held_out_samples=2")


HELPS = [["--help"], *([command, "--help"] for command in sorted(main.commands))]
OWN, MEASURING = "leank_convert.cli import main", "bin.benchmarks.__main__ import benchmark as main"


@pytest.mark.parametrize(("command", "helps"), [(OWN, HELPS), (MEASURING, [["kernel", "--help"]])])
def test_help_imports_no_heavy_library(command, helps):
    code = (
        f"import sys; from {command}\n"
        f"for arguments in {helps!r}:\n"
        "    try: main(arguments)\n"
        "    except SystemExit: pass\n"
        "print([m for m in ('torch', 'transformers', 'pydantic', 'rich', 'yaml') if m in sys.modules])"
    )
    done = run_python("-c", code)
    assert done.stdout.count("Usage:") == len(helps)
    assert done.stdout.splitlines()[-1] == "[]"
    assert all(len(line) <= 80 and not re.match("  .*\\.\\.\\.$", line) for line in done.stdout.splitlines())


@pytest.mark.parametrize(
    "arguments",
    ["recipes", "recipes --keys", "masks", "inspect testbed", "inspect OUT", "verify OUT", "analyze OUT"],
)
def test_tables_fit_a_terminal_without_breaking_words(arguments, shipped_checkpoint, monkeypatch):
    asked = arguments.replace("OUT", str(shipped_checkpoint)).split()
    shown = done(*asked)
    assert all(len(line) <= 80 for line in shown.splitlines() if "/" not in line)
    monkeypatch.setattr("leank_convert.tables.WIDTH", 10_000)
    assert done(*asked).split() == shown.split()


def test_a_terminal_is_told_that_a_slow_command_loads():
    code = (
        "import time, click\nfrom leank_convert.cli import main\n"
        "@main.command()\ndef slow():\n    time.sleep(1.5)\n    print('done')\nmain(['slow'])"
    )
    ours, theirs = pty.openpty()
    done = subprocess.run(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=theirs, text=True, check=True
    )
    assert os.read(ours, 1000).decode().strip() == "loading torch, transformers and the files"
    assert done.stdout == "done\n"
    assert not run_python("-c", code).stderr


def test_debug_shows_the_traceback(tmp_path):
    result = run("--debug", "inspect", tmp_path / "absent.safetensors")
    assert type(result.exception).__name__ == "LeanKError"


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ((errno.ENOSPC, "No space left", "out/leank/log.jsonl"), "`out/leank/log.jsonl`: No space left"),
        (("a library found no file\nand says more",), "a library found no file"),
    ],
)
def test_a_full_disk_or_a_missing_file_is_told_in_one_line(given, told, tmp_path, monkeypatch):
    monkeypatch.setattr("leank_convert.convert.train_masks", Mock(side_effect=OSError(*given)))
    assert rejected("train", "testbed", "-o", tmp_path / "out") == f"error: {told}\n"


def test_window_flags_reach_the_checkpoint(out):
    sizes = ["--sink-size", "1", "--recent-size", "2", "--flush-size", "3", "--prune", "deferred"]
    done("export", "testbed", "--all-channels", *sizes, "-o", out)
    facts = json.loads(done("inspect", out, "--json"))
    assert facts["windows"] == {"sink_size": 1, "recent_size": 2, "flush_size": 3, "prune": "deferred"}


def test_what_cannot_be_exported_is_refused_before_it_is_trained(
    shipped_checkpoint, copy_of, tmp_path, monkeypatch
):
    monkeypatch.setattr("leank_convert.convert.train_masks", lambda *_, **__: pytest.fail("training began"))
    quantized, made, foreign = copy_of(MODEL_DIR), copy_of(shipped_checkpoint), tmp_path / "mine"
    edit_json(quantized / "config.json", quantization_config={"load_in_4bit": True})
    foreign.mkdir()
    (foreign / "thesis.tex").write_text("precious")
    before = snapshot(tmp_path)
    for model, out, options, message in (
        (quantized, tmp_path / "new", [], "without a `quant_method`"),
        (MODEL_DIR, MODEL_DIR / "out", [], "overlaps"),
        ("testbed", made, [], "already holds an export"),  # that no run made
        ("testbed", made, ["--resume"], "already holds an export"),
        ("testbed", foreign, [], "`thesis.tex`"),
    ):
        assert message in rejected("train", model, "-o", out, "--recipe", "quickstart", *options)
    assert snapshot(tmp_path) == before


def test_verify_reports_and_its_exit_code_tells(shipped_checkpoint, copy_of):
    assert json.loads(done("verify", shipped_checkpoint, "--source", "testbed", "--json"))["ok"] is True
    damaged = copy_of(shipped_checkpoint)
    (damaged / "cache_leank.py").write_text("raise SystemExit\n")
    result = run("verify", damaged)
    assert result.exit_code == 1
    assert "FAIL  digest of cache_leank.py" in result.stdout


@pytest.mark.parametrize(("memory", "expected"), [("40GiB", 40 << 30), ("1.5 GB", 1_500_000_000), ("9B", 9)])
def test_inspect_reads_an_amount_of_memory(memory, expected):
    facts = json.loads(done("inspect", "llama-3.1-8b-instruct", "--memory", memory, "--json"))
    assert (facts["capacity"]["memory_bytes"], facts["capacity"]["tokens"]) == (expected, 8192)


@pytest.mark.usefixtures("without_report")
def test_mask_only_training_then_export_into_the_same_folder(out):
    settings = ["--set", "stage1.steps=1", "--set", "stage2.steps=1", *SHORT]
    done("train", "testbed", "-o", out, *settings, "--mask-only")
    assert not (out / "config.json").exists()
    done("export", MODEL_DIR, "-o", out)
    assert (out / "config.json").exists()
    assert (out / "leank" / "log.jsonl").exists()
    done("export", "testbed", "-o", out, "--mask", "testbed-70-v50", "--overwrite")
    told = rejected("train", "testbed", "-o", out, *settings, "--mask-only", "--resume")
    assert f"`{out}` holds a checkpoint of another mask" in told
    told = rejected("train", "testbed", "-o", out, *settings)
    assert f"`{out / 'leank'}` already holds a training run" in told and "by `--resume`" in told


@pytest.mark.usefixtures("without_report")
def test_converting_without_training_leaves_checkpoints_of_every_ratio(tmp_path, out):
    ratios = ["--pruning-ratio", "0.5", "--pruning-ratio", "0.75", "--kv-dtype", "fp8"]
    options = ["--method", "static-norm", "--budget", "global", "--set", "calibration_prompts=2"]
    printed = done("train", "testbed", "-o", out, *options, *ratios, *SHORT)
    folders = [out / "ratio-0.5", out / "ratio-0.75"]
    assert printed == "".join(f"{folder}\n" for folder in folders)
    exporting = ("export", "testbed", "-o", tmp_path / "new", "--mask")
    for command in (("inspect",), ("analyze",), ("evaluate",), exporting):
        assert f"name `{folders[0]}` or `{folders[1]}`" in rejected(*command, out)
    for folder, ratio in zip(folders, (0.5, 0.75), strict=True):
        assert "cache scales: 8 tensors, of " in done("verify", folder, "--source", "testbed")
        facts = json.loads(done("inspect", folder, "--json"))
        assert facts["provenance"]["method"] == "static-norm"
        assert facts["pruning_ratio"] == ratio
        assert '# --set budget="global"' in facts["provenance"]["recipe"]


@pytest.mark.parametrize(
    ("number", "code", "told"), [("SIGINT", 130, "interrupted"), ("SIGTERM", 143, "ended by SIGTERM")]
)
def test_a_signal_ends_a_command_and_leaves_nothing_half_written(number, code, told, monkeypatch, tmp_path):
    """Ctrl-C, and what schedulers send."""
    monkeypatch.setattr(
        "leank_convert.export.read_runtime_files", lambda *_: signal.raise_signal(signal.Signals[number])
    )
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where a shell runs jobs aside
    try:
        result = run("export", "testbed", "--all-channels", "-o", tmp_path / "out")
    finally:
        signal.signal(signal.SIGINT, before)
    assert (result.exit_code, result.stderr) == (code, f"error: {told}\n")
    assert list(tmp_path.iterdir()) == []


def test_home_is_found_where_shells_leave_it_to_the_command(retriever_folder, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert done("export", "testbed", "--out=~/out") == f"{tmp_path / 'out'}\n"
    assert "every shard carries" in done("verify", "~/out")
    assert json.loads(done("inspect", "~/out", "--json"))["path"] == str(tmp_path / "out")
    (tmp_path / "r.yaml").write_text("seed: 3\n")
    assert "seed: 3" in done("recipes", "~/r.yaml")
    done("analyze", "testbed-70", "--out=~/page")
    assert (tmp_path / "page").is_dir() and not (tmp_path / "~").exists()
    done("analyze", "testbed-70", "--out=./~/page")  # a folder of that name, to shells
    assert (tmp_path / "~" / "page").is_dir()
    (tmp_path / "~model").symlink_to(retriever_folder)
    (tmp_path / "r.yaml").rename("~r.yaml")
    done("export", "./~model", "--all-channels", "--recipe=./~r.yaml", "--out=./~out")
    assert "./~out" in done("analyze", "./~out")


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
def test_what_would_do_nothing_or_fail_late_is_refused_at_once(command, message, out):
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
