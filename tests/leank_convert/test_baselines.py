"""Published baselines: named by the package, and found in a checkout alone."""

import pytest
from click.testing import CliRunner

from bin.baselines import VARIANTS
from leank_convert import baselines
from leank_convert.cli import main
from leank_convert.errors import LeanKError


def test_a_checkout_has_all_that_are_named():
    assert set(baselines.load_baselines(["kivi"])) == set(VARIANTS) == set(baselines.NAMES)


def test_nothing_is_loaded_where_none_is_asked_for(tmp_path, monkeypatch):
    monkeypatch.setattr(baselines, "_CHECKOUT", tmp_path)
    assert baselines.load_baselines(["window", "int4"]) == {}


def test_a_wheel_refuses_them_and_names_the_checkout(tmp_path, monkeypatch):
    monkeypatch.setattr(baselines, "_CHECKOUT", tmp_path)
    with pytest.raises(LeanKError, match="only a checkout"):
        baselines.load_baselines(["window", "leank+quest"])
    result = CliRunner().invoke(main, ["evaluate", "absent", "--also", "window", "--also", "kivi"])
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("error: `kivi` is a published baseline, and only a checkout of")
