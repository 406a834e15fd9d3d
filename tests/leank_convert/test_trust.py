"""What a checkpoint's folder may hold before its code is imported."""

import re
import shutil
from pathlib import Path

import pytest

from leank_convert.trust import check_code, check_config
from tests.checks import append, edit_json, refusal, remove, write


@pytest.fixture
def folder(shipped_checkpoint, tmp_path):
    """A checkpoint without its weights: nothing here reads them."""
    ignored = shutil.ignore_patterns("model*.safetensors")
    return Path(shutil.copytree(shipped_checkpoint, tmp_path / "out", ignore=ignored))


def set_config(**changes):
    return lambda folder: edit_json(folder / "config.json", **changes)


def link_a_file(folder):
    other = folder.parent / "other.py"
    other.write_text("")
    (folder / "cache_leank.py").unlink()
    (folder / "cache_leank.py").symlink_to(other)


def link_a_folder(folder):
    write("elsewhere/generate.py")(folder.parent)
    (folder / "custom_generate").symlink_to(folder.parent / "elsewhere")


OTHER_REPOSITORY = {"AutoConfig": "me/other--configuration_leank.LeanKLlamaConfig"}


@pytest.mark.parametrize(
    ("plant", "named"),
    [
        (append("cache_leank.py"), "cache_leank.py' in `FOLDER` is no runtime file"),
        (write("evaluate_me.py"), "evaluate_me.py' in `FOLDER` is no runtime file"),
        # transformers runs it in place of `generate`, without a word in any config.
        (write("custom_generate/generate.py"), "generate.py' in `FOLDER` is no runtime file"),
        (link_a_file, "cache_leank.py' in `FOLDER` is no runtime file"),
        (link_a_folder, "'custom_generate' in `FOLDER` is a link to a folder"),
        (remove("cache_leank.py"), "lacks the runtime file `cache_leank.py`, wh"),
        (write("adapter_config.json", "{}"), "adapter_config.json`: transformers would load an adapter"),
        (set_config(auto_map=OTHER_REPOSITORY), "config.json`: `auto_map` is {'AutoConfig': 'me/other--"),
        (set_config(configuration_files=["config.5.0.0.json"]), "`configuration_files` is ['config.5.0.0"),
        (set_config(transformers_weights="x.safetensors"), "`transformers_weights` is 'x.safetensors'"),
        (set_config(attn_implementation="me/kernel"), "`attn_implementation` is 'me/kernel', a kernel"),
        (
            lambda folder: edit_json(folder / "tokenizer_config.json", auto_map={"AutoTokenizer": "a.B"}),
            "tokenizer_config.json`: `auto_map` names code",
        ),
    ],
)
def test_what_no_release_wrote_is_refused_by_name(plant, named, folder):
    check_code(folder)
    plant(folder)
    with refusal(re.escape(named.replace("FOLDER", str(folder)))):
        check_code(folder)
    check_code(folder, trust=True)


def test_what_runs_nothing_is_let_be(folder):
    write("__pycache__/cache_leank.cpython-311.pyc")(folder)
    write("leank/notes.txt")(folder)
    shutil.move(folder / "cache_leank.py", folder.parent / "blob")
    (folder / "cache_leank.py").symlink_to(folder.parent / "blob")  # as the hub's cache keeps files
    edit_json(folder / "config.json", _name_or_path="me/source", attn_implementation="sdpa")
    check_code(folder)


def test_a_model_that_is_compared_with_brings_no_kernels_either(source):
    check_config(source)
    edit_json(source / "config.json", attn_implementation="me/kernel")
    with refusal("`attn_implementation` is 'me/kernel', a kernel"):
        check_config(source)
