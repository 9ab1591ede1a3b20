"""The view of an experiment's scores."""

import json

import pytest

from ssl_sec.edges.tracking.pages import scores_view
from ssl_sec.recipes.registry import RECIPES


@pytest.mark.parametrize("job", [job for job, row in RECIPES.items() if row.view_metrics])
def test_the_view_tells_the_arms_of_an_ablation_apart(job):
    (view,) = scores_view(job).values()
    columns = json.loads(json.loads(view)["state"])["selectedColumns"]
    tags = [column for column in columns if column.startswith("tags.")]
    assert tags[:3] == ["tags.`arm`", "tags.`constraint`", "tags.`seed`"]
