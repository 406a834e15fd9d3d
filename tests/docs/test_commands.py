"""README.md and docs/: every command parses, and every block runs or says why it does not.

Fenced blocks of `bash` and `python` are code that a reader copies. HTML comments in front of a block say how
it is tested here:

    <!-- not run: REASON -->          it is only parsed
    <!-- run first: SHELL -->         what it needs; several commands between `;`
    <!-- run with: OPTIONS -->        appended to its first command and to all of the same name: less work

The blocks of a page run in order in one temporary folder, `leank-convert` and `bin/benchmark` within this
process, on few samples where a page asks for many. A `yaml` or `python` block whose first line is
`# NAME.yaml` or `# NAME.py` is written to that file; YAML has to be a recipe.
"""

import ast
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from unittest.mock import patch

import click
import pytest
from click.testing import CliRunner

from bin.benchmarks.__main__ import benchmark
from leank_convert.cli import main
from leank_convert.export import export_checkpoint
from leank_convert.mask import ChannelMask
from leank_convert.methods import METHODS
from leank_convert.recipe import Recipe, known_keys
from leank_convert.recipe_file import load_recipe
from tests.tiny_families import random_mask, tiny_folder

ROOT = Path(__file__).parent.parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
OTHERS = [ROOT / name for name in ("SECURITY.md", "runtime/README.md")]
CODE = ("bash", "python")
COMMAND_LINES = {"leank-convert": main, "leank_convert": main, "bin/benchmark": benchmark}  # the second by -m
DIRECTIVES = ("not run", "run first", "run with")
SHORT = ["held_out_samples=1", "calibration_prompts=2", "data.max_length=300"]  # of every recipe
LESS_WORK = {"train": [f"--set={change}" for change in SHORT], "evaluate": ["-n", "2"]}  # appended to these
FILE = re.compile(r"# (\S+\.(?:yaml|py))\n")
LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)")


@dataclass(frozen=True)
class Block:
    """A fenced block, and the comments in front of it."""

    page: Path
    line: int
    language: str
    text: str
    directives: dict[str, str] = field(default_factory=dict)

    def __str__(self):
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def read_blocks(page):
    """Return the fenced blocks of a page; a comment belongs to the block that follows it at once."""
    blocks, lines = [], page.read_text(encoding="utf-8").splitlines()
    above: list[str] = []
    fence: tuple[int, str] | None = None
    inside: list[str] = []
    for number, line in enumerate(lines, start=1):
        if line.lstrip().startswith("```"):
            if fence is None:
                fence, inside = (number, line.strip().removeprefix("```")), []
                continue
            blocks.append(Block(page, fence[0], fence[1], "\n".join(inside), read_directives(above)))
            fence, above = None, []
        elif fence is not None:
            inside.append(line)
        elif line.startswith("<!--") or (above and not above[-1].endswith("-->")):
            above.append(line)
        else:
            above = []
    assert fence is None, f"{page}: the block of line {fence} does not end"
    return blocks


def read_directives(comments):
    """Read `<!-- name: value -->` comments."""
    found = {}
    for comment in re.findall(r"<!--\s*(.*?)\s*-->", "\n".join(comments), re.DOTALL):
        name, _, value = comment.partition(":")
        assert name in DIRECTIVES, f"`{name}` is none of {DIRECTIVES}"
        assert value.strip(), f"`{name}` says nothing"
        found[name] = " ".join(value.split())
    return found


def split_commands(shell):
    """Split a shell block into commands; `;` separates, too."""
    for line in shell.replace("\\\n", " ").splitlines():
        lexer = shlex.shlex(line, posix=True, punctuation_chars=";")
        lexer.whitespace_split, lexer.commenters = True, "#"
        command: list[str] = []
        for word in lexer:
            if set(word) == {";"}:
                yield command
                command = []
            else:
                command.append(word)
        if command:
            yield command


def find_own(command):
    """The command line of ours that is called, also under a launcher, and its arguments; None for others."""
    for place, word in enumerate(command):
        if word in COMMAND_LINES:
            return COMMAND_LINES[word], command[place + 1 :]
    return None


BLOCKS = [block for page in PAGES for block in read_blocks(page)]
TESTED_PAGES = [
    page
    for page in PAGES
    if any(b.language in CODE and "not run" not in b.directives for b in read_blocks(page))
]
COMMANDS = [
    pytest.param(*own, id=f"{block} {' '.join(own[1])[:60]}")
    for block in BLOCKS
    if block.language == "bash"
    for command in split_commands(block.text)
    if (own := find_own(command)) is not None
]


def check_parses(command, arguments):
    """Parse a command line as the command would, and check the recipe keys that it sets."""
    while isinstance(command, click.Group):
        names = [argument for argument in arguments if not argument.startswith("-")]
        if not names:
            return
        assert names[0] in command.commands, f"`{names[0]}` is none of {sorted(command.commands)}"
        command = command.commands[names[0]]
        arguments = arguments[arguments.index(names[0]) + 1 :]
    if not arguments:
        return  # the command's name alone
    context = command.make_context(command.name, list(arguments))
    known = set(known_keys(Recipe))
    for override in context.params.get("overrides") or ():
        assert override.partition("=")[0] in known, f"`--set {override}`: no such key"


@pytest.mark.parametrize(("command", "arguments"), COMMANDS)
def test_a_command_parses(command, arguments):
    check_parses(command, arguments)


def test_commands_and_options_named_in_a_sentence_or_a_table_exist():
    """`leank-convert …` and `bin/benchmark …` in inline code; what stands for something else is left out."""
    for page in PAGES:
        text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
        for code in re.findall(r"(?<!`)`((?:leank-convert|bin/benchmark) [^`]+)`(?!`)", text):
            if "…" not in code and "COMMAND" not in code:
                name, *arguments = shlex.split(code)
                check_parses(COMMAND_LINES[name], arguments)


class Page:
    """Runs the blocks of a page in a folder."""

    def __init__(self, folder):
        self.folder = folder
        self.names: dict[str, object] = {"__name__": "__main__"}

    def run(self, block):
        for command in split_commands(block.directives.get("run first", "")):
            self.run_command(command, block)
        if block.language == "python":
            exec(compile(block.text, str(block), "exec"), self.names)
            return
        commands = list(split_commands(block.text))
        added = shlex.split(block.directives.get("run with", ""))
        for command in commands:
            same = command[:2] == commands[0][:2]
            self.run_command([*command, *(added if same else [])], block)

    def run_command(self, command, block):
        if command[0] not in COMMAND_LINES:
            if command[0] == "python":
                command = [sys.executable, *command[1:]]
            options = {"cwd": self.folder, "capture_output": True, "text": True, "check": False}
            done = subprocess.run(["bash", "-c", shlex.join(command)], **options)
            assert done.returncode == 0, f"{block}: {shlex.join(command)}\n{done.stdout}{done.stderr}"
            return
        command = [*command, *LESS_WORK.get(command[1], [])]
        result = CliRunner().invoke(COMMAND_LINES[command[0]], command[1:])
        said = f"{block}: {shlex.join(command)}\n{result.output}"
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise AssertionError(said) from result.exception
        assert result.exit_code == 0, said


@pytest.mark.parametrize("path", TESTED_PAGES, ids=lambda path: path.stem)
def test_the_blocks_of_a_page_run(path, tmp_path, monkeypatch, request, testbed_tokenizer):
    if path.stem != "getting-started":  # of all reports one is drawn
        request.getfixturevalue("without_report")
    if path.stem == "onnx":  # a graph takes seconds for each layer, of which a trained checkpoint has four
        source = tiny_folder(tmp_path / "model", testbed_tokenizer, num_hidden_layers=1)
        export_checkpoint(source, ChannelMask(random_mask([[7, 0]])), tmp_path / "out")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.setattr("leank_convert.load_recipe", lambda name, keys: load_recipe(name, [*keys, *SHORT]))
    modules = set(sys.modules)
    page = Page(tmp_path)
    with patch.dict(METHODS):  # a page adds a row
        for block in read_blocks(path):
            if named := FILE.match(block.text):
                (tmp_path / named[1]).write_text(block.text, encoding="utf-8")
                if block.language == "yaml":
                    load_recipe(tmp_path / named[1])
            elif block.language in CODE and "not run" not in block.directives:
                page.run(block)
    for name in set(sys.modules) - modules:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]


@pytest.mark.parametrize("page", [*PAGES, *OTHERS], ids=lambda page: str(page.relative_to(ROOT)))
def test_relative_links_lead_to_files_and_headings(page):
    for link in LINK.findall(page.read_text(encoding="utf-8")):
        target, _, anchor = link.partition("#")
        if "://" in target:
            continue
        path = page.parent / target if target else page
        assert path.exists(), f"there is no file at `{link}`"
        headings = re.findall(r"^#+ (.*)$", path.read_text(encoding="utf-8"), re.MULTILINE) if anchor else []
        anchors = [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings]
        assert not anchor or anchor in anchors, f"there is no heading at `{link}`"


@pytest.mark.parametrize("page", [*PAGES, *OTHERS], ids=lambda page: str(page.relative_to(ROOT)))
def test_files_of_the_repository_that_a_page_names_exist(page):
    text = page.read_text(encoding="utf-8").replace("\\_", "_")
    for name in re.findall(r"(?<![\w/.])(?:leank_convert|runtime|recipes|tests|bin|examples)/[\w./-]*", text):
        assert (ROOT / name.rstrip(".")).exists(), f"there is no `{name}`"


def message_texts():
    """Every string literal of the toolkit and the runtime, `…` for what is filled in."""
    texts = []
    for folder in ("leank_convert", "runtime"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.JoinedStr):
                    parts = [part.value if isinstance(part, ast.Constant) else "…" for part in node.values]
                    texts.append("".join(parts))
                elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                    texts.append(node.value)
    return "\n".join(texts)


def test_messages_on_the_troubleshooting_page_are_those_of_the_code():
    page = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    known = re.sub(r"…|`", "", message_texts())
    pieces = []
    for table in re.findall(r"\| message \|.*?\n\n", page, re.DOTALL):
        for row in table.strip().splitlines()[2:]:
            first = row.split("|")[1].strip()
            if not first.startswith("`"):
                continue
            pieces += [piece.removeprefix("FAIL").strip() for piece in first.replace("`", "").split("…")]
    assert len(pieces) > 20
    assert [piece for piece in pieces if len(piece) >= 8 and piece not in known] == []
