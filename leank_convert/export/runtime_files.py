"""Runtime files of a checkpoint: found as data, copied flat, never imported."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

from leank_convert.errors import LeanKError
from leank_convert.families import Architecture
from leank_convert.files import write_atomically

CONFIGURATION_FILE = "configuration_leank.py"
MODELING_FILE = "modeling_leank.py"


def read_runtime_files() -> dict[str, bytes]:
    """Read every file of the runtime that travels with a checkpoint, by name.

    Raises:
        LeanKError: If this installation lacks them.
    """
    found = {
        entry.name: entry.read_bytes()
        for entry in sorted(files("leank_convert._runtime").iterdir(), key=lambda entry: entry.name)
        if entry.name.endswith("_leank.py")
    }
    for name in (CONFIGURATION_FILE, MODELING_FILE):
        if name not in found:
            raise LeanKError(
                f"this installation of leank-convert lacks the runtime file `{name}`",
                hint="install it again",
                exit_code=1,
            )
    return found


def copy_runtime_files(folder: Path) -> list[str]:
    """Copy the runtime's files into a folder.

    Returns:
        Their names.
    """
    contents = read_runtime_files()
    for name, content in contents.items():
        write_atomically(folder / name, content)
    return list(contents)


def auto_map(architecture: Architecture) -> dict[str, str]:
    """The classes that transformers' auto classes find in a checkpoint of this family."""
    configuration, modeling = Path(CONFIGURATION_FILE).stem, Path(MODELING_FILE).stem
    return {
        "AutoConfig": f"{configuration}.LeanK{architecture.config_class}",
        "AutoModel": f"{modeling}.LeanK{architecture.base_class}",
        "AutoModelForCausalLM": f"{modeling}.LeanK{architecture.causal_lm_class}",
    }
