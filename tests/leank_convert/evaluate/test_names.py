"""Names of variants, of which published baselines are found in a checkout alone."""

from bin.baselines import VARIANTS
from leank_convert.evaluate import names
from leank_convert.evaluate.variants import OTHERS


def test_a_checkout_has_all_that_are_named():
    assert set(names.load_baselines(["kivi"])) == set(VARIANTS) == set(names.BASELINES)
    assert {*OTHERS, *VARIANTS} == set(names.ALSO)


def test_nothing_is_loaded_where_none_is_asked_for(tmp_path, monkeypatch):
    monkeypatch.setattr(names, "_CHECKOUT", tmp_path)
    assert names.load_baselines(["window", "int4"]) == {}
