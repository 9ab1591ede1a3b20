import re

import pytest

from ssl_sec.edges.command_line import run_job
from ssl_sec.edges.composition.compose import composed, experiments, options_of
from ssl_sec.edges.composition.help_text import help_text
from ssl_sec.edges.composition.keys import keys_of, keys_of_entry, kind_of, listed_kinds
from ssl_sec.edges.composition.options import values_of_option
from ssl_sec.exporting import FORMATS
from ssl_sec.papers import list_papers
from ssl_sec.settings import flattened

JOBS = (
    "ablate",
    "study",
    "align",
    "embed",
    "export",
    "face",
    "finetune",
    "metric_learning",
    "neighbours",
    "pretrain",
    "preview",
    "probe",
    "replay",
    "report",
    "select",
    "transfer",
    "tune",
)
BY_NAME = ("data", "encoder", "head", "constraint", "loss", "transform", "split", "sampler", "optimiser", "runtime")


def every_configuration(job: str) -> list[dict[str, object]]:
    """A job's configurations, each with a different option of one group."""
    first = composed(job, [])
    others = {group: names for group, names in options_of(job).items() if group != "experiment"}
    swapped = [
        {**first, group: values_of_option(group, name, job)} for group, found in others.items() for name in found
    ]
    return [first, *swapped]


@pytest.mark.parametrize("job", JOBS)
def test_every_key_of_every_option_is_explained(job):
    for values in every_configuration(job):
        explained = {key.name: key for key in keys_of(kind_of(job), values)}
        expected = {key for key in flattened(values) if not (key.endswith(".name") and key.split(".")[0] in BY_NAME)}
        assert expected <= explained.keys()
        for name, key in explained.items():
            assert len(key.explanation) > 8, name
            assert "None" not in key.explanation and "`" not in key.explanation, name
            assert key.allowed, name
            if "." not in name or name.split(".")[0] not in BY_NAME:
                assert key.value == flattened(values)[name]


def test_the_entries_of_a_list_are_explained():
    kinds = listed_kinds(kind_of("face"), "test_sets")
    assert len(kinds) == 7
    for kind in kinds:
        for key in keys_of_entry(kind):
            assert key.name == "name" or len(key.explanation) > 8, (kind, key.name)


def test_a_key_that_entries_of_a_list_share_is_explained_once():
    entries = " ".join(help_text("face", []).partition("is a list of:")[2].split())
    assert entries.count("kept in memory") == 1
    assert "{name: lfw_pairs} A list of pairs in LFW's format. As above: title, resident_limit_mib." in entries
    # Its title has another value.
    assert "{name: blufr} LFW by BLUFR. As above: resident_limit_mib." in entries and "title: blufr its name" in entries


@pytest.mark.parametrize(("job", "columns"), [(job, 60) for job in JOBS] + [("pretrain", 200)])
def test_help_fits_80_to_100_columns(job, columns, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(columns))
    text = help_text(job, [])
    # What one types, and single words, are not broken.
    prose = [line for line in text.splitlines() if "jobs." not in line and " " in line.strip()]
    assert max(map(len, prose)) <= min(100, max(80, columns))


def test_help_explains_the_keys_of_the_options_that_are_chosen():
    text = help_text("pretrain", ["data=folder", "encoder=timm"])
    assert re.search(r"^  data.root=<needed> +the folder that holds the images", text, re.M)
    assert re.search(r"^  encoder.model=<needed> +timm's name of the model", text, re.M)
    assert "encoder.stem" not in text
    assert re.search(r"^  \* folder ", text, re.M) and not re.search(r"^  \* digits ", text, re.M)


def test_help_on_an_experiment_shows_what_it_is_and_its_values():
    text = help_text("metric_learning", ["experiment=cars196_triplet_sec"])
    assert "experiment=cars196_triplet_sec, of configs/table/sec_10.yaml" in text
    assert "recall_at_1 67.89" in text
    assert re.search(r"^  constraint.eta=0.5 ", text, re.M)


def test_help_does_not_repeat_a_range_that_the_allowed_values_have():
    text = re.sub(r"\s+", " ", help_text("pretrain", ["augment=simclr"]))
    assert "augment.flip_probability=0.5 probability of a horizontal flip [number ≥ 0 and ≤ 1]" in text
    assert "optimiser.weight_decay=0.0001 weight decay [number ≥ 0 and ≤ 1e+06]" in text
    assert "T > 0, the divisor of the similarities [number]" in text  # its range is nowhere else


@pytest.mark.parametrize("job", ["pretrain", "finetune", "metric_learning", "face"])
def test_help_names_every_experiment_with_the_papers_figure(job, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    text = help_text(job, [])
    assert all(re.search(rf"(?<![\w.]){re.escape(name)}(?![\w.])", text) for name in experiments(job))
    assert text.count("\n") < 520
    if job == "pretrain":
        assert "cifar10_sec_100 86.87" in text


def test_help_of_an_export_has_a_line_for_each_format():
    text = help_text("export", [])
    for name, form in FORMATS.items():
        assert re.search(rf"^    {name} +{re.escape(form.__doc__[:40])}", text, re.M)


def test_help_of_a_report_names_the_papers():
    text = help_text("report", [])
    assert all(re.search(rf"^    {name} ", text, re.M) for name in list_papers())


@pytest.mark.parametrize("flag", ["--help", "-h"])
def test_a_mistake_with_help_is_an_error(flag, capsys):
    assert run_job("pretrain", str, ["encoder=resnet51", flag]) == 2
    output = capsys.readouterr()
    assert output.out == "" and "did you mean 'resnet50'" in output.err


@pytest.mark.parametrize("key", ["epoch", "optimiser.rate"])
def test_help_refuses_a_key_that_was_added_and_does_not_exist(key, capsys):
    assert run_job("pretrain", str, [f"+{key}=1", "--help"]) == 2
    output = capsys.readouterr()
    assert output.out == "" and f"error: {key}: unknown key" in output.err
