"""What holds before anything is loaded: offline, and no files outside temporary folders."""

import atexit
import os
import shutil
import tempfile

# Read when huggingface_hub is imported, so they are set before anything imports it.
_HF_HOME = tempfile.mkdtemp(prefix="leank-test-hf-")
atexit.register(shutil.rmtree, _HF_HOME, ignore_errors=True)
os.environ["HF_HOME"] = _HF_HOME
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"


def pytest_addoption(parser):
    group = parser.getgroup("fuzzing", "tests/integration/test_fuzzing.py")
    group.addoption("--fuzz-cases", type=int, default=500, help="how many mutated inputs are tried")
    group.addoption("--fuzz-seed", type=int, default=0, help="what they are drawn from")


def pytest_configure(config):
    """Load what tests share where they run: xdist's own process would keep its workers waiting for it."""
    if "PYTEST_XDIST_WORKER" in os.environ or not config.getoption("numprocesses", None):
        config.pluginmanager.import_plugin("tests.fixtures")
