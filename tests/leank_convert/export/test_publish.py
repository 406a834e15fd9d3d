import fcntl
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from leank_convert.errors import LeanKError
from leank_convert.export import publish
from leank_convert.export.publish import check_replaceable, recover, staged_folder


def write(folder: Path, **files: str) -> Path:
    for name, content in files.items():
        path = folder / name.replace("__", "/").replace("_json", ".json").replace(
            "_safetensors", ".safetensors"
        )
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return folder


def content(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}


def stage(out: Path, text: str = "new", *, overwrite: bool = False) -> None:
    with staged_folder(out, overwrite=overwrite) as partial:
        write(partial, config_json=f'{{"leank": "{text}"}}')


NEW = {"config.json": '{"leank": "new"}'}
OLD = {"config.json": '{"leank": "old"}'}


def test_a_new_folder_appears_with_its_parents(tmp_path: Path) -> None:
    stage(tmp_path / "a" / "b" / "out")
    assert content(tmp_path) == {"a/b/out/config.json": NEW["config.json"]}


def test_nothing_is_there_before_the_block_ends(tmp_path: Path) -> None:
    with staged_folder(tmp_path / "out", overwrite=False) as partial:
        assert partial == tmp_path / "out.partial"
        assert not (tmp_path / "out").exists()
    assert content(tmp_path) == {}
    assert (tmp_path / "out").is_dir()


def test_an_empty_folder_and_a_training_run_are_taken_over(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    stage(tmp_path / "empty")
    out = write(tmp_path / "out", leank__log="a", leank__deep__state="b", channel_mask_safetensors="c")
    inode = (out / "leank" / "log").stat().st_ino
    stage(out)
    assert content(out) == {**NEW, "leank/log": "a", "leank/deep/state": "b"}
    assert (out / "leank" / "log").stat().st_ino == inode
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "out"]


def test_a_training_run_is_copied_where_links_are_not_possible(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: str) -> None:
        raise OSError(1, "Operation not permitted")

    monkeypatch.setattr("os.link", fail)
    out = write(tmp_path / "out", leank__log="a")
    stage(out)
    assert content(out) == {**NEW, "leank/log": "a"}


def test_a_checkpoint_is_replaced_only_if_asked(tmp_path: Path) -> None:
    out = write(tmp_path / "out", config_json='{"leank": "old"}', leank__log="a")
    with pytest.raises(LeanKError, match="already holds a checkpoint") as caught:
        stage(out)
    assert "--overwrite" in str(caught.value.hint)
    assert content(out) == {**OLD, "leank/log": "a"}
    stage(out, overwrite=True)
    assert content(out) == {**NEW, "leank/log": "a"}


@pytest.mark.parametrize("overwrite", [False, True])
def test_other_peoples_files_are_never_replaced(tmp_path: Path, overwrite: bool) -> None:
    out = write(tmp_path / "out", config_json='{"model_type": "llama"}', thesis="years of work")
    before = content(tmp_path)
    with pytest.raises(LeanKError, match=r"holds other files, such as `config\.json`"):
        stage(out, overwrite=overwrite)
    write(tmp_path, file="x")
    with pytest.raises(LeanKError, match="is a file"):
        stage(tmp_path / "file", overwrite=overwrite)
    assert content(tmp_path) == {**before, "file": "x"}


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_failed_block_leaves_everything_as_it_was(tmp_path: Path, error: type[BaseException]) -> None:
    out = write(tmp_path / "out", config_json='{"leank": "old"}')
    with pytest.raises(error), staged_folder(out, overwrite=True) as partial:
        write(partial, config_json="half")
        raise error
    assert content(tmp_path) == {"out/config.json": OLD["config.json"]}


def test_a_failed_swap_is_undone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = write(tmp_path / "out", config_json='{"leank": "old"}')
    real = Path.rename

    def rename(path: Path, target: Path) -> Path:
        if path.name == "out.partial":
            raise OSError(5, "Input/output error")
        return real(path, target)

    monkeypatch.setattr(Path, "rename", rename)
    with pytest.raises(OSError, match="Input/output"):
        stage(out, overwrite=True)
    assert content(tmp_path) == {"out/config.json": OLD["config.json"]}


def test_a_stale_partial_folder_is_cleared(tmp_path: Path) -> None:
    write(tmp_path / "out.partial", shard="half")
    (tmp_path / "out.partial" / publish.MARKER_NAME).touch()
    stage(tmp_path / "out")
    assert content(tmp_path) == {"out/config.json": NEW["config.json"]}


@pytest.mark.parametrize(("text", "existing"), [('{"leank": "mine"}', True), ("{}", False)])
@pytest.mark.parametrize("suffix", ["partial", "previous"])
def test_folders_of_others_beside_it_are_left_alone(
    suffix: str, existing: bool, text: str, tmp_path: Path
) -> None:
    write(tmp_path / f"out.{suffix}", config_json=text)
    if existing:
        write(tmp_path / "out", config_json='{"leank": "old"}')
    before = content(tmp_path)
    for run in (recover, lambda out: stage(out, overwrite=True)):
        with pytest.raises(LeanKError, match=rf"`.*out\.{suffix}` is in the way") as caught:
            run(tmp_path / "out")
        assert "move" in str(caught.value.hint)
        assert content(tmp_path) == before


KILLED = """
import os, shutil, signal, sys
from pathlib import Path
from leank_convert.export.publish import staged_folder

def stopping(function, when):
    def wrapper(path, *rest, **options):
        if path.name == sys.argv[2] and sys.argv[4] == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        result = function(path, *rest, **options)
        if path.name == sys.argv[2]:
            os.kill(os.getpid(), signal.SIGKILL)
        return result
    return wrapper

setattr(Path, sys.argv[3], stopping(getattr(Path, sys.argv[3]), sys.argv[4]))
with staged_folder(Path(sys.argv[1]), overwrite=True) as partial:
    (partial / "config.json").write_text('{"leank": "new"}')
"""


@pytest.mark.parametrize(
    ("name", "step", "when", "expected"),
    [
        ("out", "rename", "after", OLD),
        ("out.partial", "rename", "after", NEW),
        ("a-first", "unlink", "after", NEW),
        ("out.previous", "rmdir", "before", NEW),
    ],
)
def test_a_killed_swap_is_finished_or_undone(
    name: str, step: str, when: str, expected: dict[str, str], tmp_path: Path
) -> None:
    out = write(tmp_path / "out", config_json='{"leank": "old"}', leank__log="a")
    (out / "a-first").touch()  # of the previous folder's files, the one whose removal is seen
    arguments = [str(out), name, step, when]
    killed = subprocess.run([sys.executable, "-c", KILLED, *arguments], check=False)
    assert killed.returncode == -signal.SIGKILL
    recover(out)
    found = content(out)
    found.pop("a-first", None)
    assert found == {**expected, "leank/log": "a"}
    stage(out, "newer", overwrite=True)
    assert content(tmp_path) == {"out/config.json": '{"leank": "newer"}', "out/leank/log": "a"}


def test_a_marker_does_not_make_a_training_run_irreplaceable(tmp_path: Path) -> None:
    out = write(tmp_path / "out", leank__log="a")
    (out / publish.MARKER_NAME).touch()
    check_replaceable(out, overwrite=False)
    recover(out)
    assert content(out) == {"leank/log": "a"}


def test_recovery_leaves_what_no_export_touched(tmp_path: Path) -> None:
    recover(tmp_path / "a" / "out")
    write(tmp_path, file="x")
    recover(tmp_path / "file")
    write(tmp_path / "out", thesis="x")
    recover(tmp_path / "out")
    assert content(tmp_path) == {"file": "x", "out/thesis": "x"}


def test_a_running_export_is_not_disturbed(tmp_path: Path) -> None:
    write(tmp_path / "out.partial", shard="half")
    descriptor = os.open(tmp_path / "out.partial" / publish.MARKER_NAME, os.O_RDWR | os.O_CREAT)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    with pytest.raises(LeanKError, match="another export is writing"):
        stage(tmp_path / "out")
    assert (tmp_path / "out.partial" / "shard").read_text() == "half"
    os.close(descriptor)
    stage(tmp_path / "out")


def test_a_link_to_a_folder_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "disk" / "real").mkdir(parents=True)
    (tmp_path / "out").symlink_to(tmp_path / "disk" / "real")
    stage(tmp_path / "out")
    assert (tmp_path / "out").is_symlink()
    assert content(tmp_path / "disk") == {"real/config.json": NEW["config.json"]}
