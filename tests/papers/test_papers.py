import re

import pytest

from ssl_sec.edges.composition.compose import compose, experiments
from ssl_sec.errors import ConfigError
from ssl_sec.papers import Table, find_reported, list_papers, load
from ssl_sec.settings import from_values

TABLES = {"angular": range(1, 6), "normface": range(1, 6), "sec": range(1, 13), "sft": range(1, 7)}
TABLE = {"number": 1, "title": "t", "columns": [{"label": "a", "metric": "probe/top1"}], "rows": []}


def cells(paper: str, *numbers: int):
    """(recipe, metric) -> the values of these tables."""
    found: dict[tuple[str, str], set] = {}
    for number in numbers:
        for recipe, metric, value in load(paper).table(number).cells():
            if value is not None:
                found.setdefault((recipe, metric), set()).add(value)
    return found


def numbers_of(value):
    return value if isinstance(value, tuple) else (value,) if isinstance(value, float) else ()


def test_every_table_of_every_paper_exists():
    assert {name: [table.number for table in load(name).tables] for name in list_papers()} == {
        name: list(numbers) for name, numbers in TABLES.items()
    }


@pytest.mark.parametrize(("part", "whole"), [(3, 10), (4, 11), (5, 12)])
def test_the_papers_tables_are_rows_of_the_appendix_s(part, whole):
    shared, everything = cells("sec", part), cells("sec", whole)
    assert shared.items() < everything.items()
    extended = {recipe for recipe, _ in everything.keys() - shared.keys()}
    assert extended
    assert all("sec_ema" in recipe for recipe in extended)
    few, many = load("sec").table(part), load("sec").table(whole)
    assert few.columns == many.columns
    assert [row.values for row in few.rows] == [row.values for row in many.rows if "EMA" not in row.label]


def test_a_cell_in_two_tables_is_the_same_except_where_the_paper_differs():
    for name, numbers in TABLES.items():
        differing = {recipe for (recipe, _), values in cells(name, *numbers).items() if len(values) > 1}
        assert differing == ({"cars196_triplet"} if name == "sec" else set()), name
    assert cells("sec", 2, 3, 10)["cars196_triplet", "retrieval/nmi"] == {56.66}
    assert cells("sec", 8, 9)["cars196_triplet", "retrieval/nmi"] == {56.49}


@pytest.mark.parametrize(
    ("paper", "number", "row", "column", "value"),
    [
        ("sec", 1, "In-Shop", "images test", 26830),
        ("sec", 2, "η = 1.5", "Cars196 R@8", 87.43),
        ("sec", 3, "Semihard triplet + SEC", "In-Shop R@50", 99.21),
        ("sec", 4, "Arcface + SEC", "MegaFace 10⁶ distractors", 90.91),
        ("sec", 6, "multi-similarity", "decay at iteration", "3,000 and 6,000"),
        ("sec", 7, "SOP", "multi-similarity L²-reg", 5e-4),
        ("sec", 9, "ρ = 0.1", "final norm mean", 2.60),
        ("sec", 10, "Multi-similarity + SEC (EMA, ρ = 0.01)", "CUB200-2011 NMI", 74.22),
        ("angular", 3, "N-pair and angular", "R@1000", 98.0),
        ("angular", 5, "angular (α = 45°)", "R@1", 66.4),
        ("normface", 1, "Euclidean distance", "after normalisation", 98.95),
        ("normface", 2, "C-triplet", "accuracy", (99.11, 0.008)),
        ("normface", 3, "C-contrastive", "rank 1 at 1 % false alarms", 68.14),
        ("normface", 5, "C-triplet and centre loss", "with HIK-SVM", 94.58),
        ("sft", 1, "multi-similarity + SFT", "CUB-200-2011 F1", 40.4),
        ("sft", 4, "ArcFace", "at 0.001 %", None),
        ("sft", 5, "SFT with the unbalanced scheme", "few images", 82.32),
    ],
)
def test_a_cell_has_the_papers_value(paper, number, row, column, value):
    table = load(paper).table(number)
    place = [other.heading for other in table.columns].index(column)
    assert value in [found.values[place] for found in table.rows if found.label == row]


def test_results_are_percentages_and_metrics_have_valid_names():
    metric = re.compile(r"(probe|retrieval|face)/[a-z0-9_-]+")
    for name in list_papers():
        for table in load(name).tables:
            for place, column in enumerate(table.columns):
                if column.metric is None:
                    continue
                for row in table.rows:
                    assert metric.fullmatch(table.metric(row, column) or ""), (name, table.number, row, column)
                    assert all(0 <= number <= 100 for number in numbers_of(row.values[place])), (name, row)


def test_recall_does_not_fall_with_more_neighbours():
    """A number in the wrong column would break the order."""
    for name in list_papers():
        for table in load(name).tables:
            for row in table.rows:
                by_data: dict[str | None, list[tuple[int, float]]] = {}
                for column, value in zip(table.columns, row.values, strict=True):
                    neighbours = re.fullmatch(r"retrieval/recall_at_(\d+)", column.metric or "")
                    if neighbours and isinstance(value, float):
                        by_data.setdefault(column.data, []).append((int(neighbours[1]), value))
                for data, pairs in by_data.items():
                    recalls = [value for _, value in sorted(pairs)]
                    assert recalls == sorted(recalls), (name, table.number, row.label, data)


def test_a_recipe_belongs_to_one_paper():
    owners: dict[str, set[str]] = {}
    for name in list_papers():
        for table in load(name).tables:
            for recipe in table.recipes():
                assert "{" not in recipe
                owners.setdefault(recipe, set()).add(name)
    assert {recipe: papers for recipe, papers in owners.items() if len(papers) > 1} == {}


def test_table_5_and_its_experiments_have_the_same_recipes():
    shown = {name for name, text in experiments("pretrain").items() if text.startswith("the paper's: ")}
    assert shown == set(load("sec").table(12).recipes())
    for name in shown:
        assert compose("pretrain", [f"experiment={name}"])["recipe"] == name


@pytest.mark.parametrize(("job", "metrics", "least"), [("metric_learning", "retrieval/", 102), ("face", "face/", 28)])
def test_recipes_and_experiments_are_the_same(job, metrics, least):
    named = {
        recipe
        for paper in list_papers()
        for table in load(paper).tables
        for recipe, metric, _ in table.cells()
        if metric.startswith(metrics)
    }
    shown = {name for name, text in experiments(job).items() if text.startswith("the paper's: ")}
    assert shown == named
    assert len(shown) >= least


def test_reported_values_of_a_recipe():
    assert find_reported("cifar100_sec_ema_200") == {"probe/top1": 66.59, "probe/top5": 90.41}
    assert find_reported("cars196_triplet")["retrieval/nmi"] == 56.66
    assert find_reported("digits") == {}


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: load("esc"), "paper: found 'esc'; did you mean 'sec'"),
        (lambda: load("../sec"), "paper: found"),
        (lambda: load("sec").table(13), "table: found 13, but .* has 1, 2, 3"),
    ],
)
def test_a_missing_paper_or_table_is_refused(call, message):
    with pytest.raises(ConfigError, match=message):
        call()


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"label": "x", "values": [1.0, 2.0]}, "must be 1 value"),
        ({"label": "x", "values": [[1.0, 2.0, 3.0]]}, "pairs of mean and standard deviation"),
        ({"label": "x", "values": [1.0], "recipe": "{dta}_sec"}, "data} as the only placeholder"),
        ({"label": "x", "values": [1.0], "recipe": "{data}_sec"}, "have no data"),
        ({"label": "x", "vlaues": [1.0]}, "did you mean 'values'"),
        ({"label": "x", "values": [1.0], "recipe": "a", "measure": "b"}, "x, measure: found 'b', must be none, as no "),
    ],
)
def test_a_mistake_in_a_file_is_refused(row, message):
    with pytest.raises(ConfigError, match=message):
        from_values(Table, {**TABLE, "rows": [row]})


def test_a_row_without_its_metric_is_refused():
    columns = [{"label": "a", "metric": "face/lfw_{measure}"}]
    with pytest.raises(ConfigError, match="x, measure: found null, must be given, for the columns' metrics"):
        from_values(Table, {**TABLE, "columns": columns, "rows": [{"label": "x", "values": [1.0], "recipe": "a"}]})
