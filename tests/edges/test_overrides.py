"""Values outside Hydra's grammar are taken literally."""

import pytest

from ssl_sec.edges.composition.compose import compose
from ssl_sec.edges.overrides import assigned, understood

ODD = ["/tmp/données", "/tmp/mes essais é (1)", "~/runs", "/tmp/a#1", "/tmp/it's", "/tmp/a=b", "/tmp/a&b;c", 'a"b']


@pytest.mark.parametrize("path", ODD)
def test_a_path_needs_no_quotes(path):
    assert compose("pretrain", [f"output_dir={path}"])["output_dir"] == path


@pytest.mark.parametrize("path", [*ODD, "/tmp/a,b", "1", "null", "[a]", "{a}", "a b", "'a'", "/tmp/a\\", " a"])
def test_a_quoted_override_round_trips(path):
    assert compose("pretrain", [assigned("output_dir", path)])["output_dir"] == path


def test_a_plain_override_is_unchanged():
    for override in ("epochs=3", "seed=0,1,2", "probe.learning_rates=[0.1,1.0]", "+a={b:1}", "~encoder.width", "seed="):
        assert understood(override) == override
    assert assigned("output_dir", "/tmp/runs") == "output_dir=/tmp/runs"


def test_values_of_lists_and_sweeps_are_quoted_one_by_one():
    assert understood("data.train=[/tmp/é.parquet,/tmp/b.parquet]") == "data.train=['/tmp/é.parquet',/tmp/b.parquet]"
    assert understood("data.root=/tmp/é,/tmp/b") == "data.root='/tmp/é',/tmp/b"


def test_a_comma_in_parentheses_separates_no_values():
    assert understood("optimiser.learning_rate=logint(1,2)") == "optimiser.learning_rate='logint(1,2)'"
    assert understood("data.train=[/a (1,2).zip,/b(.zip,/c).zip]") == "data.train=['/a (1,2).zip','/b(.zip,/c).zip']"
    assert understood("data.train=[/a(.zip,/b.zip]") == "data.train=['/a(.zip',/b.zip]"


def test_invalid_overrides_stay_invalid():
    for override in ("digits", "epochs=[1", "epochs={1", "output_dir='a"):
        assert understood(override) == override
