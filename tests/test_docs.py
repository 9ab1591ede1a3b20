"""The documentation: its tables equal the code's, its links resolve, its commands compose."""

import re
import shutil
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import ssl_sec
from docs import tables
from ssl_sec import losses
from ssl_sec.edges.composition.compose import compose
from ssl_sec.edges.study.arms import read_arms
from ssl_sec.edges.study.plan import read_study
from ssl_sec.edges.submit.orders import expand_sweep
from ssl_sec.edges.tune.space import read_search
from ssl_sec.papers import list_papers
from ssl_sec.recipes.registry import RECIPES
from ssl_sec.settings import from_values
from tests.documented import commands_in

ROOT = Path(__file__).parents[1]
DOCS = sorted((ROOT / "docs").glob("*.md"))
PAGES = [*DOCS, *sorted(ROOT.glob("*.md")), *sorted(ROOT.glob("benchmarks/*.md")), *sorted(ROOT.glob("jobs/**/*.md"))]


def name_of(path):
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("page", DOCS, ids=name_of)
def test_generated_tables_are_up_to_date(page):
    text = page.read_text(encoding="utf-8")
    assert tables.filled(text) == text, "python -m docs.tables"


def test_a_table_of_searches_has_the_best_of_the_trials_that_were_trained_longest(tmp_path, monkeypatch):
    measured = ((1, 40.0, 10), (2, 50.0, 5), (3, 46.0, 10))
    rows = [f"sec,,{number},{metric},{epochs},4 trials of seed,,seed={number}" for number, metric, epochs in measured]
    header = "arm,point,trial,metric,epochs,space,config,overrides"
    (tmp_path / "mine-searches.csv").write_text("\n".join([header, *rows]))
    monkeypatch.setattr(tables, "STUDIES", tmp_path)
    assert tables.study_searches("mine").splitlines()[-1] == "|  | sec | 3 of 4 | `seed=3` | 46.00 |"


def test_every_generated_table_is_on_a_page():
    found = re.findall(r"<!-- generated: ([\w-]+) -->", "".join(page.read_text() for page in DOCS))
    assert sorted(found) == sorted(tables.TABLES)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_and_pictures_lead_to_files(page):
    targets = re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8"))
    local = [target.partition("#")[0] for target in targets if not target.startswith(("http://", "https://", "#"))]
    assert [target for target in local if not (page.parent / target).exists()] == []


def commands():
    """Each command once, with the last page that has it."""
    found = {
        (job, tuple(overrides)): f"{name_of(page)}: {job} {' '.join(overrides)}"
        for page in PAGES
        if page.name != "CHANGELOG.md"  # has those of earlier versions
        for job, overrides in commands_in(page.read_text(encoding="utf-8"))
    }
    return [pytest.param(job, list(overrides), id=name) for (job, overrides), name in found.items()]


@pytest.mark.parametrize(("job", "overrides"), commands())
def test_documented_commands_compose(job, overrides):
    overrides = [override for override in overrides if not override.startswith("resume=")]
    if job == "tune":
        assert read_search(overrides).space
        return
    if job == "study":
        if "study=mine.yaml" not in overrides:
            assert read_study(overrides).arms
        return
    for point, _ in expand_sweep(overrides):
        if job == "ablate":
            assert read_arms(point)
            continue
        values = compose(job, point)
        if job == "finetune" and values["run"] is not None:
            values.setdefault("data", {"name": "digits"})  # that of the run
        if job in RECIPES:
            from_values(RECIPES[job].config, values)


def test_documented_make_targets_exist():
    makefile = (ROOT / "Makefile").read_text()
    typed = {target for page in PAGES for target in re.findall(r"^make ([\w-]+)", page.read_text(), re.MULTILINE)}
    assert typed and {target for target in typed if not re.search(rf"^{target}:", makefile, re.MULTILINE)} == set()


def test_make_ui_works_in_a_folder_with_a_space():
    assert '"sqlite:///$(CURDIR)/runs/mlflow.db"' in (ROOT / "Makefile").read_text()


def test_tests_named_in_faults_exist():
    named = re.findall(r"`(test_\w+\.py)(?:::(\w+))?`", (ROOT / "docs" / "faults.md").read_text())
    tests = list((ROOT / "tests").rglob("test_*.py"))
    assert len(named) > 40
    for file, test in named:
        texts = [path.read_text() for path in tests if path.name == file]
        assert any(f"def {test}(" in text or not test for text in texts), f"{file}::{test}"


def referred(part):
    """Module -> the names of it that are listed, None for all, in a part of the reference."""
    entries = re.findall(r"^::: ([\w.]+)\n(?:    options:\n(?:      members: \[(.*)\])?)?", part, re.MULTILINE)
    return {module: listed.split(", ") if listed else None for module, listed in entries}


def test_every_name_of_the_package_is_in_the_reference():
    members = referred((ROOT / "docs" / "reference.md").read_text())
    for name in set(ssl_sec.__all__) - {"__version__"}:
        home = getattr(ssl_sec, name).__module__
        offered = [module for module in members if home == module or home.startswith(f"{module}.")]
        assert any(
            name in (members[module] or getattr(import_module(module), "__all__", [name])) for module in offered
        ), f"{home}.{name}"


def test_every_name_of_the_reference_is_in_the_package():
    _, *parts = (ROOT / "docs" / "reference.md").read_text().split("\n## ")
    for part in parts:
        title = part.partition("\n")[0]
        for place, listed in {} if title == "Configuration of a run" else referred(part).items():
            module = import_module(place)
            own = [name for name, value in vars(module).items() if getattr(value, "__module__", None) == place]
            names = listed or getattr(module, "__all__", [name for name in own if not name.startswith("_")])
            offering = [ssl_sec, losses] if title == "Losses" and ".generators." not in place else [ssl_sec]
            for name in names:
                assert all(getattr(package, name) is getattr(module, name) for package in offering), (place, name)


@pytest.mark.parametrize("paper", list_papers())
def test_every_item_of_a_paper_has_a_place_and_a_state(paper):
    states = ("as in the paper", "deviates: ", "runs, not measured", "not here: ")
    for item in tables.items_of(paper):
        assert set(item) <= {"item", "what", "names", "command", "state"}, item
        assert item["state"].startswith(states), item
        for name in item["names"]:
            module, _, attribute = name.rpartition(".")
            assert hasattr(import_module(module), attribute), name


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150


def test_the_site_is_built_without_a_warning_or_a_network(tmp_path):
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    shutil.copy(ROOT / "zensical.toml", tmp_path)
    (tmp_path / "ssl_sec").symlink_to(ROOT / "ssl_sec")
    done = subprocess.run(
        [sys.executable, "-m", "zensical", "build", "--strict"], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    built = {path.parent.name for path in (tmp_path / "site").glob("*/index.html")}
    assert {page.stem for page in DOCS} - {"index"} <= built
    home = (tmp_path / "site" / "index.html").read_text()
    assert re.findall(r'(?:src|href)="(?:https?:)?//(?!arxiv\.org|zensical\.org)[^"]*', home) == []
