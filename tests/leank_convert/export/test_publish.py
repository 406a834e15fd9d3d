import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from unittest.mock import Mock

import pytest

from leank_convert.errors import LeanKError
from leank_convert.export import publish
from leank_convert.export.publish import recover, staged_folder
from tests.checks import refusal, run_python


def write(folder, **files):
    for name, content in files.items():
        path = folder / re.sub("_(json|safetensors)$", r".\1", name.replace("__", "/"))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return folder


def content(folder):
    return {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}


def stage(out, text="new", *, overwrite=False, **files):
    with staged_folder(out, overwrite=overwrite) as partial:
        write(partial, config_json=f'{{"leank": "{text}"}}', **files)


NEW = {"config.json": '{"leank": "new"}'}


def test_a_checkpoint_is_replaced_only_if_asked(tmp_path):
    out = write(tmp_path / "out", config_json='{"leank": "old"}', leank__log="a")
    with refusal("already holds an export", "--overwrite"):
        stage(out)
    assert content(out) == {"config.json": '{"leank": "old"}', "leank/log": "a"}
    stage(out, overwrite=True)
    assert content(out) == {**NEW, "leank/log": "a"}


def test_a_checkpoint_that_is_whole_is_no_failure_where_its_scaffold_stays(tmp_path, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr(Path, "rmdir", Mock(side_effect=PermissionError(13, "Permission denied")))
        stage(tmp_path / "out")
    assert content(tmp_path / "out") == NEW and (tmp_path / "out.partial").exists()
    stage(tmp_path / "out", "newer", overwrite=True)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("overwrite", [False, True])
def test_other_peoples_files_are_never_replaced(tmp_path, overwrite):
    write(tmp_path / "out", config_json='{"model_type": "llama"}', thesis="years of work")
    before = content(tmp_path)
    write(tmp_path, file="x")
    for name, message in (("out", r"holds other files, such as `config\.json`"), ("file", "is a file")):
        with refusal(message):
            stage(tmp_path / name, overwrite=overwrite)
    assert content(tmp_path) == {**before, "file": "x"}


@pytest.mark.parametrize(("text", "existing"), [('{"leank": "mine"}', True), ("{}", False)])
def test_a_folder_of_others_beside_it_is_left_alone(existing, text, tmp_path):
    write(tmp_path / "out.partial", config_json=text)
    if existing:
        write(tmp_path / "out", config_json='{"leank": "old"}')
    before = content(tmp_path)
    for run in (recover, lambda out: stage(out, overwrite=True)):
        with refusal(r"`.*out\.partial` is in the way", "move"):
            run(tmp_path / "out")
        assert content(tmp_path) == before


KILLED = """
import hashlib, json, os, signal, sys
from pathlib import Path
from leank_convert.export.publish import recover, staged_folder

EVENTS = {"open", "os.chmod", "os.mkdir", "os.remove", "os.rename", "os.rmdir", "os.scandir"}

def stage(out, text):
    with staged_folder(out, overwrite=True) as partial:
        (partial / "config.json").write_text(f'{{"leank": "{text}"}}')
        (partial / "model.safetensors").write_text(text)
        (partial / f"tokenizer_{text}.json").write_text(text)
        digest = hashlib.sha256(text.encode()).hexdigest()
        files = {"model.safetensors": digest, f"tokenizer_{text}.json": digest}
        (partial / "leank_digests.json").write_text(json.dumps({"files": files}))

def dies_at(moment, out):
    # Whether a child comes to its system call of this number, at which it is killed.
    child = os.fork()
    if child == 0:
        calls = iter(range(moment))
        def die(event, arguments):
            if event in EVENTS and next(calls, None) is None:
                os.kill(os.getpid(), signal.SIGKILL)
        sys.addaudithook(die)
        stage(out, "new")
        os._exit(0)
    return os.WIFSIGNALED(os.waitpid(child, 0)[1])

def content(folder):
    return {
        path.relative_to(folder).as_posix(): os.readlink(path) if path.is_symlink() else path.read_text()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != ".leank-lock"
    }

out = Path(sys.argv[1])
stage(out, "old")
(out / "plots" / "deep").mkdir(parents=True)
(out / "leank").mkdir()
for name in ("notes.txt", "plots/deep/a.png", "leank/log"):
    (out / name).write_text(name)
(out / "link").symlink_to("notes.txt")
before = content(out)
after = {name: text for name, text in before.items() if name != "tokenizer_old.json"}
after |= {"config.json": '{"leank": "new"}', "model.safetensors": "new", "tokenizer_new.json": "new"}
old, new = (hashlib.sha256(text).hexdigest() for text in (b"old", b"new"))
after["leank_digests.json"] = before["leank_digests.json"].replace("old", "new").replace(old, new)
moment, found = 0, set()
while dies_at(moment, out):
    # Whatever loads a folder asks for its config.json first.
    assert not (out / "config.json").exists() or content(out) in (before, after), moment
    recover(out)
    result = content(out)
    assert result in (before, after), (moment, result)
    found.add(result["config.json"])
    stage(out, "old")
    assert content(out) == before
    assert os.listdir(out.parent) == ["out"]
    moment += 1
print(moment, len(found))
"""


def test_a_swap_killed_at_any_moment_is_finished_or_undone_and_no_file_is_lost(tmp_path):
    num_moments, num_results = run_python("-c", KILLED, tmp_path / "out").stdout.split()
    assert int(num_moments) > 30
    assert int(num_results) == 2


def test_of_two_at_once_the_second_is_refused_and_disturbs_nothing(tmp_path):
    write(tmp_path / "out", config_json='{"leank": "old"}')
    with staged_folder(tmp_path / "out", overwrite=True) as partial, ThreadPoolExecutor(1) as other:
        write(partial, config_json='{"leank": "new"}', shard="half")
        before = content(tmp_path)
        for run in (recover, lambda out: stage(out, overwrite=True)):
            with pytest.raises(LeanKError, match=r"another process is writing to `.*/out`"):
                other.submit(run, tmp_path / "out").result()
        assert content(tmp_path) == before
    assert content(tmp_path) == {"out/config.json": NEW["config.json"], "out/shard": "half"}


def test_of_many_that_race_one_wins_and_the_others_leave_nothing(tmp_path):
    start = Barrier(8)

    def race(number, out):
        start.wait()
        try:
            stage(out, str(number))
        except LeanKError:
            return False
        return True

    with ThreadPoolExecutor(8) as pool:
        for turn in range(20):
            folder = tmp_path / f"new-{turn}"
            won = [*pool.map(race, range(8), [folder / "out"] * 8)]
            assert sum(won) == 1
            assert content(folder) == {"out/config.json": f'{{"leank": "{won.index(True)}"}}'}


def test_a_link_to_a_folder_stays_a_link(tmp_path):
    (tmp_path / "disk" / "real").mkdir(parents=True)
    (tmp_path / "out").symlink_to(tmp_path / "disk" / "real")
    stage(tmp_path / "out")
    assert (tmp_path / "out").is_symlink()
    assert content(tmp_path / "disk") == {"real/config.json": NEW["config.json"]}


@pytest.mark.parametrize("is_removed", [False, True])
def test_a_file_that_cannot_be_moved_is_named_and_the_next_run_goes_on(is_removed, tmp_path, monkeypatch):
    """Unless what had been moved is gone: the rest is no export."""
    out = write(tmp_path / "out", config_json='{"leank": "old"}', notes="mine")
    with monkeypatch.context() as patched:
        replace = publish.Path.replace

        def fail(path, target):
            if path.name == "config.json":
                raise OSError(5, "Input/output error", str(path))
            return replace(path, target)

        patched.setattr(publish.Path, "replace", fail)
        patched.setattr(publish, "write_atomically", lambda path, text: path.write_bytes(text))
        with pytest.raises(LeanKError, match=r"config\.json` cannot be put in place: .* nothing loads"):
            stage(out, overwrite=True, weights_safetensors="new")
    assert content(out) == {"notes": "mine", "weights.safetensors": "new"}
    if is_removed:
        (out / "weights.safetensors").unlink()
    recover(out)
    new = {} if is_removed else {"out/config.json": NEW["config.json"], "out/weights.safetensors": "new"}
    assert content(tmp_path) == {"out/notes": "mine", **new}
