from dataclasses import replace

import pytest

from ssl_sec.edges.study.plan import num_comparisons, points_of, read_study
from ssl_sec.errors import ConfigError
from tests.jobs import study

FILE = """
shared: [experiment=digits, runtime=local, epochs=2]
baseline: none
arms:
  none: [constraint=none]
  sec: [constraint=sec, constraint.eta=0.5]
seeds: [0, 1]
"""
OVER = "over: {global_batch_size: [64, 128+optimiser.learning_rate=0.6], loss: [dcl]}\n"
SEARCHED = """
shared: [experiment=digits, runtime=local, epochs=8]
arms: {none: [constraint=none, 'optimiser.learning_rate=interval(0.1,1)'], sec: [constraint=sec]}
search: [trials=3, seed=100]
seeds: [0]
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(FILE)
    return path


def read(file, *overrides):
    return read_study([f"study={file}", *overrides])


def test_cells_are_arms_times_seeds_seed_by_seed(file):
    made = read(file)
    assert (made.name, made.baseline) == ("mine", "none")
    cells = made.cells({})
    assert [cell.key for cell in cells] == [("none", "", 0), ("sec", "", 0), ("none", "", 1), ("sec", "", 1)]
    assert [cell.name for cell in cells] == ["none-s0", "sec-s0", "none-s1", "sec-s1"]
    config = cells[3].config
    assert (config.seed, config.epochs, config.constraint.eta, config.recipe) == (1, 2, 0.5, "mine")
    assert (config.resume, config.probe.enabled) == ("auto", True)
    assert config.tracking.tags == {"arm": "sec", "cell": cells[3].digest}


def test_points_are_the_values_of_each_key_one_key_at_a_time(file):
    file.write_text(FILE + OVER)
    made = read(file, "seeds=[5]", "epochs=3", "tracking.tags={team: vision}")
    assert [point.name for point in made.points] == ["global_batch_size=64", "global_batch_size=128", "loss=dcl"]
    assert num_comparisons(made.file) == 3
    cells = made.cells({})
    ats = ("global_batch_size_64", "global_batch_size_128", "loss_dcl")  # 0.5 may be a value of two keys
    assert [cell.name for cell in cells] == [f"{at}-{arm}-s5" for at in ats for arm in ("none", "sec")]
    got = [(c.config.global_batch_size, c.config.optimiser.learning_rate, c.config.loss.name) for c in cells[::2]]
    assert got == [(64, 0.3, "ntxent"), (128, 0.6, "ntxent"), (256, 0.3, "dcl")]
    assert {cell.config.epochs for cell in cells} == {3}
    tags = {"team": "vision", "arm": "none", "point": "global_batch_size=64", "cell": cells[0].digest}
    assert cells[0].config.tracking.tags == tags


def test_some_arms_are_compared_to_the_baseline(file):
    file.write_text(FILE.replace("seeds:", "  l2reg: [constraint=l2reg]\nseeds:"))
    made = read(file, "arms=[l2reg]")
    assert [arm.arm for arm in made.arms] == ["none", "l2reg"]
    assert num_comparisons(made.file) == 2  # those of the whole study


def test_some_points_are_run_under_the_names_of_all(file):
    file.write_text(FILE + OVER)
    every = [cell.name for cell in read(file, "seeds=[0]").cells({})]
    made = read(file, "seeds=[0]", "points=[loss=dcl,global_batch_size=128]")
    assert [point.name for point in made.points] == ["global_batch_size=128", "loss=dcl"]
    assert [cell.name for cell in made.cells({})] == every[2:]
    with pytest.raises(ConfigError, match="points: found 'loss=dlc'; did you mean 'loss=dcl'"):
        read(file, "points=[loss=dlc]")
    file.write_text(FILE)
    with pytest.raises(ConfigError, match="points: found 'loss=dcl'; allowed: null, since the study has no over"):
        read(file, "points=[loss=dcl]")


def test_the_digest_covers_the_settings_that_decide_the_result(file, tmp_path):
    def digests(*overrides):
        return [cell.digest for cell in read(file, *overrides).cells({})]

    first = digests()
    assert first[0] == first[2] != first[1] == first[3]  # an arm's seeds
    assert digests(f"output_dir={tmp_path}", "tracking.system_metrics=false", "concurrent=3") == first
    assert not set(digests("epochs=3")) & set(first)
    assert not set(digests("global_batch_size=128")) & set(first)


def test_the_folder_of_image_files_is_not_in_the_digest(file):
    def digest(*names):
        return read(file, "data=parquet", f"data.train=[{','.join(names)}]").cells({})[0].digest

    first = digest("a.parquet", "b.parquet")
    assert digest("/here/a.parquet", "s3://bucket/there/b.parquet") == first
    assert digest("a.parquet") != first != digest("a.parquet", "c.parquet")


def test_a_setting_as_by_default_is_not_in_the_digest_which_a_later_setting_may_not_change(file):
    listed = FILE.replace("constraint.eta=0.5", "constraint.eta=0.5, constraint.ramp=linear, head.num_layers=2")
    before = [cell.digest for cell in read(file).cells({})]
    file.write_text(listed)
    assert [cell.digest for cell in read(file).cells({})] == before
    file.write_text(listed.replace("linear", "constant"))
    assert read(file).cells({})[1].digest != before[1]


def test_one_key_names_its_runs_by_its_values(file):
    file.write_text(FILE + "over: {loss.temperature: [0.2, 5e-1]}\n")
    assert [cell.name for cell in read(file, "seeds=[0]", "arms=[none]").cells({})] == ["0.2-none-s0", "5e_1-none-s0"]


def test_points_with_the_same_value_are_named_with_their_other_changes(file):
    file.write_text(FILE + "over: {epochs: [3, 4, 4+global_batch_size=64, 4+global_batch_size=128+loss=dcl]}\n")
    made = read(file, "seeds=[0]", "arms=[none]", "points=[epochs=4,epochs=4+global_batch_size=128+loss=dcl]")
    assert [point.name for point in made.points] == ["epochs=4", "epochs=4+global_batch_size=128+loss=dcl"]
    cells = made.cells({})
    assert [cell.name for cell in cells] == ["4-none-s0", "4_global_batch_size_128_loss_dcl-none-s0"]
    assert [(cell.config.epochs, cell.config.global_batch_size) for cell in cells] == [(4, 256), (4, 128)]
    assert [point.value for point in points_of(made.file)][0] == "3"


@pytest.mark.parametrize("asked", ["probe.enabled=true", "probe.enabled=True", "probe.enabled=false"])
def test_a_search_is_not_probed_whatever_the_runs_are(file, asked):
    file.write_text(SEARCHED)
    made = read(file, asked)
    assert made.arms[0].search is not None and not made.arms[0].search.config.probe.enabled
    (cell,) = [cell for cell in made.cells({}) if cell.arm == "sec"]
    assert cell.config.probe.enabled is (asked != "probe.enabled=false")


def test_runs_are_probed_unless_the_file_says_otherwise_or_the_command(file):
    file.write_text(FILE.replace("epochs=2]", "epochs=2, probe.enabled=false]"))
    assert not any(cell.config.probe.enabled for cell in read(file).cells({}))
    assert all(cell.config.probe.enabled for cell in read(file, "probe.enabled=true").cells({}))


def test_encoders_are_registered_only_where_the_file_or_the_command_says_so(file):
    assert not any(cell.config.tracking.register_model for cell in read(file).cells({}))
    assert all(cell.config.tracking.register_model for cell in read(file, "tracking.register_model=true").cells({}))
    file.write_text(FILE.replace("epochs=2]", "epochs=2, tracking.register_model=true]"))
    assert all(cell.config.tracking.register_model for cell in read(file).cells({}))


def test_a_search_uses_the_metric_of_its_study_if_the_monitor_measures_it(file):
    def metric(text):
        file.write_text(text)
        search = read(file).arms[0].search
        assert search is not None
        return search.metric, search.tune.mode

    assert metric(SEARCHED) == ("val/knn_top1", "max")
    assert metric(SEARCHED + "metric: val/uniformity\n") == ("val/uniformity", "min")
    given = SEARCHED.replace("seed=100]", "seed=100, metric=val/probe_top1]")
    assert metric(given + "metric: val/rankme\n") == ("val/probe_top1", "max")


def test_arms_with_sweeps_are_searched_first(file):
    file.write_text(SEARCHED)
    made = read(file)
    none, sec = made.arms
    assert sec.search is None and none.search is not None
    assert (none.search.tune.trials, none.search.config.seed, none.search.config.run_name) == (3, 100, "none-search")
    assert list(none.search.space) == ["optimiser.learning_rate"]
    assert not none.search.config.probe.enabled
    assert [cell.name for cell in made.cells({})] == ["sec-s0"]
    cells = made.cells({("none", ""): ("optimiser.learning_rate=0.25",)})
    assert [cell.name for cell in cells] == ["none-s0", "sec-s0"]
    assert cells[0].config.optimiser.learning_rate == 0.25
    assert cells[0].config.seed == 0  # that of the search is its own


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("arms: [sec]\nseeds: [0]", "mine.yaml: arms: found .'sec'., must be a group of keys"),
        ("arms: {}\nseeds: [0]", "mine.yaml: arms: found {}, must be one arm or more"),
        ("arms: {sec: constraint=sec}\nseeds: [0]", "mine.yaml: arms.sec: found 'constraint=sec', must be a list"),
        ("arms: {sec: [constraint=sce]}\nseeds: [0]", "arms.sec: constraint: found 'sce'; did you mean 'sec'"),
        (
            "arms: {sec: [seed=3]}\nseeds: [0]",
            "mine.yaml: arms.sec: found 'seed=3'; seed is the study's; allowed: seeds",
        ),
        (
            "shared: [recipe=other]\narms: {sec: []}\nseeds: [0]",
            "mine.yaml: shared: found 'recipe=other'; recipe is the study's; allowed: the name of the file, or recipe",
        ),
        (
            "arms: {sec: [output_dir=x]}\nseeds: [0]",
            "mine.yaml: arms.sec: found 'output_dir=x'; output_dir is the study's; allowed: output_dir in",
        ),
        ("shared: [++seed=3]\narms: {sec: []}\nseeds: [0]", "mine.yaml: shared: found '..seed=3'; seed is the study's"),
        (
            "arms: {sec: []}\nover: {epochs: [2, 3+run_name=x]}\nseeds: [0]",
            "mine.yaml: over.epochs: found 'run_name=x'; run_name is the study's; allowed: nothing",
        ),
        ("search: [resume=true]\narms: {sec: []}\nseeds: [0]", "mine.yaml: search: found 'resume=true'; resume is the"),
        ("arms: {sec: []}\nseeds: []", "mine.yaml: seeds: found .*, must be one value or more"),
        ("arms: {sec: []}\nseeds: [0]\nbaseline: none", "mine.yaml: baseline: found 'none'; allowed: sec"),
        ("arms: {sec: []}\nseeds: [0]\nover: {seed: []}", "mine.yaml: over.seed: found .*, must be one value or more"),
        ("arms: {sec: []}\nseed: [0]", "mine.yaml: .*seed"),
        ("arms: {sec: ['epochs=choice(1,2)']}\nseeds: [0]", "mine.yaml: arms.sec: epochs: found several values"),
        (
            "arms: {none: [], a b: [], a_b: []}\nseeds: [0]",
            "mine.yaml: arms: found 'a b' and 'a_b', .* both be named 'a_b'",
        ),
        (
            "arms: {sec: []}\nseeds: [0]\nover: {epochs: ['4+loss=dcl', '4+loss=dcl']}",
            "mine.yaml: over: found '4.loss=dcl' and '4.loss=dcl'",
        ),
        (
            "arms: {sec: [], sec: []}\nseeds: [0]",
            "study: .* line 1: key 'sec' is given twice",
        ),
        ("arms: {sec: [}", "study: .*mine.yaml cannot be read: not YAML in line 1: "),
        ("{[a]: b}: c", "study: .*mine.yaml cannot be read: not YAML in line 1: "),
        ("[]", "mine.yaml: "),
    ],
)
def test_a_wrong_file_is_one_line_that_names_it(file, text, message):
    file.write_text(text)
    with pytest.raises(ConfigError, match=message):
        read(file)


def test_a_missing_study_is_named_with_the_available_ones(tmp_path):
    with pytest.raises(ConfigError, match="study: found 'digts'; did you mean 'digits'.* or the path of a YAML file"):
        read_study(["study=digts"])
    with pytest.raises(ConfigError, match="study: found '.*none.yaml'"):
        read_study([f"study={tmp_path / 'none.yaml'}"])
    with pytest.raises(ConfigError, match="study: found {'name': 'digits'}, must be a string"):
        read_study(["+study.name=digits"])
    with pytest.raises(ConfigError, match="study: found null, must be a string"):
        read_study(["study=null"])
    with pytest.raises(ConfigError, match="study: missing; give it as study=<value>"):
        study([])


@pytest.mark.parametrize("name", ["digits", pytest.param("sec_cpu", marks=pytest.mark.slow)])
def test_the_studies_of_the_package_can_be_read(name):
    made = read_study([f"study={name}", *(["data.train=[a]", "data.test=[b]"] if name == "sec_cpu" else [])])
    assert made.baseline == "none" and len(made.seeds) >= 5
    assert len({arm.name for arm in made.arms}) == len(made.arms)
    assert replace(made, arms=()).points == []
