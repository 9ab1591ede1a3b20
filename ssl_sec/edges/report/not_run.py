"""How to run what a table of a paper lacks."""

from collections.abc import Collection

from ssl_sec.edges.composition.compose import composed, job_of
from ssl_sec.edges.composition.experiments import load
from ssl_sec.edges.packaging import command
from ssl_sec.papers import Row, Table
from ssl_sec.settings import flattened


def how_to_run(table: Table, missing: Collection[str]) -> str:
    """The command that fills the cells of a table, and the names of its experiments, in one line.

    Names that differ in their data set are written as a shell would: {cub,sop}_triplet.

    Args:
        table: the table, whose recipes are experiments of one job.
        missing: those of its recipes that lack a result, one or more.
    """
    recipes = [recipe for recipe in table.recipes() if recipe in missing]
    job = job_of(recipes[0])
    assert job is not None
    experiment = f"experiment={recipes[0]}"
    required = [f"{key}=<value>" for key, value in flattened(composed(job, [experiment])).items() if value == "???"]
    # Only a probe has the accuracies of a pretraining.
    probe = ["probe.enabled=true"] if any(metric.startswith("probe/") for _, metric, _ in table.cells()) else []
    files = dict.fromkeys(found.file.shown for recipe in recipes if (found := load(recipe)) is not None)
    names = dict.fromkeys(name for row in table.rows if (name := _names(table, row, missing)))
    return (
        f"not run: {' '.join([command(job), 'experiment=<name>', *required, *probe])}, where <name> is "
        f"{', '.join(names)}; what else it needs: {' and '.join(files)}"
    )


def _names(table: Table, row: Row, missing: Collection[str]) -> str:
    """The names of a row's recipes that lack a result, such as {cub,sop}_triplet; "" if none does."""
    lacking = {table.recipe(row, column): column.data for column in table.columns}
    places = {recipe: data for recipe, data in lacking.items() if recipe in missing}
    if len(places) < 2 or row.recipe is None:
        return next(iter(places), "") or ""
    return row.recipe.replace("{data}", f"{{{','.join(str(data) for data in places.values())}}}")
