"""Who may import whom, read from the source: the toolkit's layers, and the runtime that travels alone."""

import ast
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
# A module may import those of its own rank's packages and of lower ranks, within leank_convert. `methods` is
# the table alone, `methods.*` the modules of that folder.
RANKS = [
    {"errors", "methods", "release"},
    {
        "files",
        "windows",
        "fields",
        "rope",
        "families",
        "architectures",
        "config_class",
        "recipe",
        "recipe_problems",
        "head_layout",
        "safetensors_file",
        "text_part",
        "device",
        "progress",
        "held_out",
        "tables",
    },
    {
        "checkpoint_io",
        "config_overrides",
        "digests",
        "leank_block",
        "folders",
        "testbed",
        "masks",
    },
    {"hub", "tokenizer", "recipe_file", "recipe_listing"},
    {"mask", "mask_provenance", "mask_tensor", "mask_listing", "kv_scales", "unpack", "value_weights"},
    {"data", "report"},
    {"train", "methods.*", "export", "vllm"},
    {"onnx", "trust"},
    {"prune"},
    {"convert", "estimate", "verify", "inspection", "evaluate", "analyze", "warmup"},
    {"cli"},
    {"__main__"},
]
NEVER_EACH_OTHER = [
    ("train", "export"),
    ("methods.*", "export"),
    ("train", "vllm"),
    ("export", "vllm"),
    ("train", "onnx"),
    ("methods.*", "onnx"),
    ("verify", "evaluate"),
    ("recipe", "architectures"),
]
# Of the lowest four ranks all but these are loaded without torch, and so is what a command begins with.
LOADS_TORCH = {"device", "head_layout", "leank_block"}
BEGINS = {"evaluate/request", "cli", "__main__", "__init__"}
WITHOUT_TORCH = sorted(BEGINS.union(*RANKS[:4]) - LOADS_TORCH)
# The wall is one-way: the toolkit reads and writes checkpoints by these files of the runtime, and the runtime
# never imports the toolkit. An engine runs no checkpoint's code, and a model that is pruned in memory has
# none: the plugin and `prune_model` take the whole runtime.
PURE_RUNTIME = {"configuration_leank", "fp8_leank", "layout_leank", "tools", "windows_leank"}
IMPORTS_RUNTIME = {"vllm", "prune"}
RUNTIME_LIBRARIES = {"torch", "transformers", "safetensors"}  # the last comes with transformers
# May be absent; transformers asks for whatever remote code imports outside `try`.
OPTIONAL_LIBRARIES = {"tilelang"}

# Most lines of Python in a part. What is new makes room in the same change, or raises the budget by what it
# adds, with a line in CHANGELOG; what shrinks lowers it.
BUDGETS = {"leank_convert": 26_652, "runtime": 8_821, "tests": 28_783, "bin": 6_698}

TOOLKIT = sorted((ROOT / "leank_convert").rglob("*.py"))
RUNTIME = sorted((ROOT / "runtime").glob("*.py"))


def _is_for_types(node):
    return isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"


def _imports(path, *, top_level_only=False, besides=_is_for_types):
    """Absolute names of imported modules, and the relative ones with their leading dots.

    Without those in the bodies of some statements, such as what is for types alone.
    """
    tree = ast.parse(path.read_text())
    passed_over = {
        id(inner)
        for node in filter(besides, ast.walk(tree))
        for statement in node.body
        for inner in ast.walk(statement)
    }
    nodes = tree.body if top_level_only else ast.walk(tree)
    for node in nodes:
        if id(node) in passed_over:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            folder = ROOT.joinpath(*module.split("."))
            submodules = [alias.name for alias in node.names if (folder / f"{alias.name}.py").exists()]
            yield from (f"{module}.{name}" for name in submodules)
            if len(submodules) < len(node.names):
                yield module


def _component(module):
    """`leank_convert.export.plan` -> `export`; `leank_convert.methods.make` -> `methods.*`."""
    _, component, *inner = [*module.split("."), "__init__"] if "." not in module else module.split(".")
    starred = f"{component}.*"
    return starred if inner and any(starred in members for members in RANKS) else component


def _rank(component):
    ranks = [rank for rank, members in enumerate(RANKS) if component in members]
    assert ranks, f"`{component}` has no rank in {Path(__file__).name}: decide which layer it belongs to"
    return ranks[0]


@pytest.mark.parametrize("path", TOOLKIT, ids=lambda path: str(path.relative_to(ROOT)))
def test_toolkit_modules_import_only_their_own_layer_and_lower_ones(path):
    relative = path.relative_to(ROOT).with_suffix("")
    component = _component(".".join(relative.parts).removesuffix(".__init__"))
    for module in _imports(path):
        if path.stem.startswith("leank_onnx") and module.startswith(".leank_onnx"):
            continue  # files that travel in every ONNX folder, and import each other there, too
        assert not module.startswith("."), f"relative import of `{module}`"
        assert not module.startswith("bin."), "`bin` is not in the wheel"
        assert not module.startswith("runtime"), "an installed package has it as `leank_convert._runtime`"
        if not module.startswith("leank_convert.") or component == "__init__":
            continue
        imported = _component(module)
        if imported == component:
            continue
        if imported == "_runtime":
            name = module.rpartition(".")[2]
            assert component in IMPORTS_RUNTIME or name in PURE_RUNTIME, f"`{name}` is not for the toolkit"
            continue
        assert _rank(imported) <= _rank(component), f"`{component}` is below `{imported}`"
        pair = {component, imported}
        assert not any(pair == set(rule) for rule in NEVER_EACH_OTHER), (
            f"{sorted(pair)} never import each other"
        )


@pytest.mark.parametrize("name", WITHOUT_TORCH)
def test_light_modules_import_no_heavy_library_when_loaded(name):
    seen = set()
    start = ROOT / "leank_convert" / name
    waiting = [start / "__init__.py" if start.is_dir() else start.with_suffix(".py")]
    while waiting:
        path = waiting.pop()
        for module in _imports(path, top_level_only=True):
            assert module.split(".")[0] not in {"torch", "transformers", "matplotlib", "numpy"}, (
                f"{path}: {module}"
            )
            if module.startswith("leank_convert.") and module not in seen:
                seen.add(module)
                local = ROOT.joinpath(*module.replace("leank_convert._runtime", "runtime").split("."))
                waiting.append(local / "__init__.py" if local.is_dir() else local.with_suffix(".py"))


@pytest.mark.parametrize("path", RUNTIME, ids=lambda path: path.name)
def test_runtime_files_import_the_standard_library_torch_transformers_and_each_other(path):
    shipped = {f".{file.stem}" for file in RUNTIME if file.stem.endswith("_leank")}
    for module in _imports(path):
        if module.startswith("."):
            # Only `from .name_leank import x` is followed when transformers copies remote code.
            assert module in shipped, f"`{module}` is not copied into a checkpoint"
        else:
            library = module.split(".")[0]
            known = RUNTIME_LIBRARIES | OPTIONAL_LIBRARIES | set(sys.stdlib_module_names)
            assert library in known, f"`{library}` may be absent"
    outside = _imports(path, besides=lambda node: isinstance(node, ast.Try))  # where nothing catches absence
    optional = OPTIONAL_LIBRARIES.intersection(module.split(".")[0] for module in outside)
    assert not optional, "an optional library is imported outside `try`"


@pytest.mark.parametrize("part", BUDGETS)
def test_a_part_has_no_more_lines_than_its_budget(part):
    lines = sum(path.read_text().count("\n") for path in (ROOT / part).rglob("*.py"))
    assert lines <= BUDGETS[part], f"`{part}` has {lines} lines of Python: make room for what is new"


def test_packaging_lists_every_package():
    text = (ROOT / "pyproject.toml").read_text()
    for folder in {path.parent for path in TOOLKIT}:
        package = ".".join(folder.relative_to(ROOT).parts)
        assert f'"{package}"' in text, f"`{package}` is missing from [tool.setuptools] packages"
