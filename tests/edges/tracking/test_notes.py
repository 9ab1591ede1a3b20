"""Descriptions of runs."""

from ssl_sec.edges.tracking.notes import describe_end, description, resumed, with_cluster, with_end, with_table

TAGS = {
    "command": "python -m jobs.pretrain",
    "data": "digits",
    "mlflow.source.git.commit": "abc",
    "git.dirty": "true",
    "ran_on": "node1",
}


def test_a_description_has_the_runs_origin_and_end():
    note = with_end(description(TAGS), describe_end("FAILED", "the disk is full"))
    assert note.splitlines() == [
        "- ended: failed: the disk is full",
        "- command: `python -m jobs.pretrain`",
        "- data: digits",
        "- code: commit abc, changed: see `code.diff`",
        "- ran on: node1",
    ]
    assert describe_end("KILLED", None) == "stopped"


def test_user_notes_are_kept_and_the_end_is_stated_once():
    note = with_end(description(TAGS) + "\nmine", "stopped")
    assert with_end(note, "finished").splitlines()[0] == "- ended: finished"
    assert with_end(note, "finished").count("ended") == 1 and "\nmine" in with_end(note, "finished")


def test_a_resume_with_another_command_or_code_is_added():
    note = with_end(description(TAGS), "stopped")
    assert resumed(note, TAGS) == description(TAGS)
    again = resumed(note, {**TAGS, "mlflow.source.git.commit": "def", "git.dirty": "false"})
    assert "ended" not in again and again.count("- resumed:") == 1 and "commit def" in again


def test_the_commands_of_a_resumed_run_are_for_the_folder_that_it_was_moved_to():
    tags = {**TAGS, "job": "pretrain", "folder": "/scratch/digits/it"}
    note = description(tags) + "\nmine: `ls /scratch`"
    assert resumed(note, tags) == note
    moved = resumed(note, {**tags, "folder": "/shared/digits/it"}).splitlines()
    assert moved[-1] == "mine: `ls /scratch`" and len(moved) == len(note.splitlines())
    assert all("=/shared/digits/it" in line for line in moved[-4:-1])


def test_a_cluster_is_stated_once_after_the_machine_and_resumes():
    note = with_cluster(description(TAGS) + "\nmine", "2 nodes at http://me:secret@head")
    assert note.splitlines()[3:] == ["- ran on: node1", "- cluster: 2 nodes at http://***@head", "mine"]
    assert with_cluster(note, "2 nodes at http://me:secret@head") == note
    again = with_cluster(resumed(note, {**TAGS, "command": "other"}), "4 nodes").splitlines()
    assert again[-2].startswith("- resumed: ") and again[-1] == "- cluster: 4 nodes"


def test_a_table_comes_first_and_replaces_an_earlier_one():
    note = with_table(
        with_table(description(TAGS) + "\nmine", "| arm |\n| --- |\n| old |"), "| arm |\n| --- |\n| new |"
    )
    assert note == f"\n| arm |\n| --- |\n| new |\n\n{description(TAGS)}\nmine"


def test_a_training_run_says_how_to_continue_and_a_probe_does_not():
    tags = {**TAGS, "job": "pretrain", "folder": "/shared/my runs/it"}
    assert description(tags).splitlines()[4:] == [
        "- resume: `python -m jobs.pretrain 'resume=/shared/my runs/it'`",
        "- probe: `python -m jobs.probe 'run=/shared/my runs/it'`",
        "- export: `python -m jobs.export 'run=/shared/my runs/it' format=safetensors`",
    ]
    assert not any("probe" in line for line in description({**tags, "job": "face"}).splitlines())
    assert description({**tags, "job": "probe"}) == description(TAGS)
    assert "secret" not in description({**tags, "folder": "s3://me:secret@store/it"})
