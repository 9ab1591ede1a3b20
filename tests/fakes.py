"""Fakes of the runtime, the clock and the store of a run, in memory."""

import io
from pathlib import Path

import torch

from ssl_sec.training.step import Request


class FakeRuntime:
    """Records the calls of a recipe.

    Attributes:
        reports: (step, metrics, norms) of each report.
        saves: (step, bytes of the state) of each save, as torch writes them.
        stop_at: asked after this many reports, it wants a stop.
        save_at: asked after as many reports as one of these, it wants a save.
    """

    def __init__(self, rank=0, world_size=1, stop_at=None, save_at=()):
        self.rank = rank
        self.world_size = world_size
        self.device = torch.device("cpu")
        self.stop_at = stop_at
        self.save_at = save_at
        self.reports = []
        self.saves = []

    def report(self, step, metrics, norms=None):
        self.reports.append((step, dict(metrics), norms))

    def save(self, step, state):
        file = io.BytesIO()
        torch.save(dict(state), file)
        self.saves.append((step, file.getvalue()))

    def request(self):
        if self.stop_at is not None and len(self.reports) >= self.stop_at:
            return Request.STOP
        return Request.SAVE if len(self.reports) in self.save_at else Request.NONE

    def series(self, name):
        """The values of one metric by step."""
        return {step: metrics[name] for step, metrics, _ in self.reports if name in metrics}

    def last_state(self):
        return loaded(self.saves[-1][1])


def loaded(content):
    return torch.load(io.BytesIO(content), weights_only=True)


class FakeClock:
    """Stands for the module `time` of a module that measures; each reading takes a microsecond."""

    def __init__(self):
        self.seconds = 0.0

    def perf_counter(self):
        self.seconds += 1e-6
        return self.seconds

    def sleep(self, seconds):
        self.seconds += seconds


class FakeStore:
    """Keeps files in a folder and records other calls."""

    def __init__(self, folder: Path, state=None):
        self.encoder_path = folder / "encoder.safetensors"
        self.features_path = folder / "features.pt"
        self.views_path = folder / "views.pt"
        self.check_path = folder / "check.json"
        self.head_path = folder / "head.safetensors"
        self.examples_path = folder / "examples.pt"
        self.initial_path = folder / "initial.safetensors"
        self.confusion_path = folder / "confusion.json"
        self.state = state
        self.described = []
        self.forgotten = []

    def test_set_path(self, title):
        folder = self.encoder_path.parent / "test_sets"
        folder.mkdir(exist_ok=True)
        return folder / f"{title}.pt"

    def watched_path(self, steps_taken):
        folder = self.encoder_path.parent / "watched"
        folder.mkdir(exist_ok=True)
        return folder / f"{steps_taken:08d}.safetensors"

    def describe_data(self, image_set, *, is_resumed=False):
        self.described.append((image_set.name, len(image_set)))

    def describe_test_data(self, image_sets):
        self.tested = {name: len(image_set) for name, image_set in image_sets.items()}

    def forget_records_from(self, step):
        self.forgotten.append(step)

    def newest_step(self):
        return None if self.state is None else self.state["step"]

    def restored_state(self, device, held=None):
        return self.state


def assert_identical(one, other):
    """Nested states that are equal in every bit."""
    torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)
