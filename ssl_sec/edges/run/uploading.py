"""Uploads the results of a run to MLflow: plots, weights, its data, and the scores of its encoder."""

import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from mlflow.entities.lifecycle_stage import LifecycleStage
from mlflow.tracking import MlflowClient

from ssl_sec.edges.folder.commands import replay_command
from ssl_sec.edges.folder.encoder import TrainedNetwork, load_network
from ssl_sec.edges.folder.names import weights_digest
from ssl_sec.edges.folder.record import EVALUATION, TRAINING, data_set
from ssl_sec.edges.masking import masked
from ssl_sec.edges.patience import ANSWER_S, NoAnswer, Patience
from ssl_sec.edges.pictures import save_picture
from ssl_sec.edges.run.spec import RunSpec
from ssl_sec.edges.tracking.checkpoints import log_checkpoints
from ssl_sec.edges.tracking.deferred import DeferredRun
from ssl_sec.edges.tracking.scores import (
    PROTOCOL_TAG,
    copy_probe_metrics,
    describe_versions,
    mark_best,
    model_name,
    probe_protocol,
)
from ssl_sec.edges.tracking.store import find_run, is_answer, long_requests, refusals
from ssl_sec.edges.tracking.tracker import TrackedRun
from ssl_sec.errors import counted, first_line
from ssl_sec.figures import NUMBERS
from ssl_sec.metrics import RESULT_GROUPS
from ssl_sec.recipes.config import TrainingConfig
from ssl_sec.recipes.probing.config import ProbeJobConfig

if TYPE_CHECKING:
    from matplotlib.figure import Figure

logger = logging.getLogger("ssl_sec")

# Tag of a run with the digest of the weights that were registered last.
_REGISTERED_TAG = "registered.weights"
# Tag of a run with the last file, but without others: why they are missing.
_MISSING_TAG = "upload.missing"
# How long the end of a run may still take in MLflow if it did not answer before.
_END_S = 10.0


class Upload:
    """The upload of the results at the end of a run. Its errors do not fail the run; they are reported once."""

    def __init__(self, spec: RunSpec, tracking: DeferredRun) -> None:
        self._spec = spec
        self._errors: list[str] = []
        self._was_refused = False
        self._tracking = tracking
        self.patience = Patience(ANSWER_S, tracking.ping, is_answer)
        self.num_lost = 0
        self._has_shown_start = False

    def record_loss(self, count: int) -> None:
        """Records how many records of metrics MLflow did not accept."""
        self.num_lost = count

    def upload_start(self, tracked: TrackedRun) -> None:
        """Draws and uploads, once, the plots that exist before a run's end; the upload of the results repeats them."""
        if self._has_shown_start or (draw := self._spec.recipe.draw_at_start) is None:
            return
        if not (figures := draw(self._spec.folder)):
            return
        self._has_shown_start = True
        try:
            for plot in save_figures(self._spec.folder.path, figures):
                tracked.log_file(plot, "plots")
        except Exception as error:  # metrics are more important
            logger.warning("MLflow: %s", first_line(error))

    @long_requests()
    def upload_results(self, tracked: TrackedRun | None) -> None:
        """Draws the plots, and uploads all files of the run, also if MLflow refuses some of them."""
        spec, folder = self._spec, self._spec.folder
        logger.info("drawing the plots")
        plots = self._drawn()
        if tracked is None or self.num_lost:  # MLflow does not even accept metrics
            return
        logger.info("uploading plots and weights to MLflow")
        for plot in plots:
            self._try(lambda plot=plot: tracked.log_file(plot, "plots"))
        self._try(lambda: tracked.log_file(folder.config_path))
        if isinstance(spec.config, TrainingConfig):
            folder.norms_path.write_text(json.dumps([asdict(histogram) for histogram in folder.histograms()]))
            compared = sorted({folder.path / each.artifact for each in spec.recipe.comparisons.values()})
            for path in (*compared, folder.head_path, folder.confusion_path):
                if path.is_file():  # an evaluation leaves some of them
                    self._try(lambda path=path: tracked.log_file(path))
            if spec.config.tracking.register_model:
                name, shape = model_name(spec.group), folder.data().image_shape
                logger.info("registering the network in MLflow as %s", name)
                network = load_network(spec.recipe, spec.config, shape, folder.path)
                _prepare_tracing()
                self._try(lambda: self._register(tracked, network, shape, name))
            where = tracked.experiment_id, tracked.run_id
            self._try(lambda: log_checkpoints(tracked.client, *where, spec.recipe, folder))
        missing = next(iter(self._errors), None)
        self._try(lambda: self._upload_last(tracked, missing))

    def _drawn(self) -> list[Path]:
        """Saves what the run's pages show; an error in drawing does not keep the weights from being uploaded."""
        folder, recipe = self._spec.folder, self._spec.recipe
        try:
            if recipe.measure is not None:
                (folder.path / NUMBERS).write_text(json.dumps(recipe.measure(folder)))
            return save_figures(folder.path, recipe.draw(folder))
        except OSError:
            raise
        except Exception as error:
            logger.debug("the plots cannot be drawn", exc_info=True)
            self._errors.append(f"the plots cannot be drawn: {type(error).__name__}: {first_line(error)}")
            return []

    def _upload_last(self, tracked: TrackedRun, missing: str | None) -> None:
        """Uploads the last file. A tag shows a replay that others are missing, and why."""
        client, run_id = tracked.client, tracked.run_id
        if missing is not None:
            client.set_tag(run_id, _MISSING_TAG, masked(missing))
        tracked.log_file(self._spec.folder.path / self._spec.recipe.last_artifact)
        if missing is None:
            if _MISSING_TAG in client.get_run(run_id).data.tags:
                client.delete_tag(run_id, _MISSING_TAG)
            self._spec.folder.not_uploaded_path.unlink(missing_ok=True)

    def is_whole(self, tracked: TrackedRun) -> bool:
        """Whether MLflow has all files of the run, and not those that it had before it was extended."""
        folder, recipe = self._spec.folder, self._spec.recipe
        has_last = not folder.not_uploaded_path.exists() and tracked.has_file(recipe.last_artifact)
        return has_last and _MISSING_TAG not in tracked.client.get_run(tracked.run_id).data.tags

    def _register(self, tracked: TrackedRun, network: TrainedNetwork, image_shape: tuple[int, ...], name: str) -> None:
        """Registers the network, unless the run's newest version has its weights, as at a replay."""
        digest = weights_digest(self._spec.folder.encoder_path)
        if tracked.client.get_run(tracked.run_id).data.tags.get(_REGISTERED_TAG) != digest:
            refused = (
                f"tracking.register_model: found true, but MLflow lets this user register no version of {name!r}; "
                "allowed: false, or the permission EDIT for that model"
            )
            with refusals(refused):
                tracked.log_network(network.whole, image_shape, network.dim, name)
            tracked.client.set_tag(tracked.run_id, _REGISTERED_TAG, digest)

    def end(self, tracked: TrackedRun, status: str, reason: str | None, end_ms: int | None = None) -> None:
        """Ends the run in MLflow, at a time or now; if it has finished, compares its encoder with others."""
        self._try(lambda: self._log_data(tracked))
        last_try = Patience(_END_S, self._tracking.ping) if self.patience.is_exhausted else None
        self._try(lambda: tracked.end(status, self._with_earlier_results(tracked, status, reason), end_ms), last_try)
        if status == "FINISHED":
            self._try(lambda: self._compare(tracked))

    def forget_folder(self, tracked: TrackedRun) -> None:
        """Removes the tag with the run's folder, which is removed."""
        self._try(lambda: tracked.client.delete_tag(tracked.run_id, "folder"))

    def _with_earlier_results(self, tracked: TrackedRun, status: str, reason: str | None) -> str | None:
        """The reason of an end, and whose results MLflow shows if a finished run was not extended to its end."""
        folder = self._spec.folder
        if status == "FINISHED" or not folder.holds_run:
            return reason
        metrics = tracked.client.get_run(tracked.run_id).data.metrics
        earlier = {key.partition("/")[0] for key in metrics.keys() - folder.last_metrics().keys()} & RESULT_GROUPS
        if not earlier:
            return reason
        shown = (
            f"{' and '.join(f'{group}/*' for group in sorted(earlier))} are results of its earlier, shorter training"
        )
        return shown if reason is None else f"{reason}; {shown}"

    def _log_data(self, tracked: TrackedRun) -> None:
        """Logs the training set and the test sets as inputs of the run; for a probe the test set, and the protocol."""
        config, folder = self._spec.config, self._spec.folder
        if not folder.holds_data:
            return
        data = folder.data()
        if isinstance(config, ProbeJobConfig):
            images = config.data or folder.probed().data
            title, split, context = images.title, "test", EVALUATION
            tracked.client.set_tag(tracked.run_id, PROTOCOL_TAG, probe_protocol(config.probe, images, data))
        else:
            assert isinstance(config, TrainingConfig)
            title, split, context = config.data.title, "train", TRAINING
            if data.num_checked:
                for what, number in (("duplicates", data.num_duplicates), ("unreadable", data.num_unreadable)):
                    tracked.client.set_tag(tracked.run_id, f"data.{what}", f"{number:,} of {data.num_checked:,}")
                tracked.log_file(folder.check_path)
            for name, tested in folder.test_data().items():
                tracked.log_data(data_set(tested, name), EVALUATION)
        tracked.log_data(data_set(data, f"{title}/{split}"), context)

    def _compare(self, tracked: TrackedRun) -> None:
        """Copies the metrics of a probe to the run that it probed, and finds the best registered encoder."""
        spec, client, trained_id = self._spec, tracked.client, tracked.run_id
        if isinstance(spec.config, ProbeJobConfig):
            # MLflow does not have the run that was probed, or the probe is not of its last encoder.
            if spec.identity.parent_run_id is None or spec.config.checkpoint != "last":
                return
            trained_id = spec.identity.parent_run_id
            if trained_id != spec.config.run or not self._takes_results(client, trained_id):  # else a sweep
                return
            copy_probe_metrics(client, trained_id, spec.folder.probed(), spec.config, client.get_run(tracked.run_id))
        describe_versions(client, spec.group, trained_id)
        mark_best(client, spec.group)

    def _takes_results(self, client: MlflowClient, trained_id: str) -> bool:
        """Whether MLflow still has the run that was probed; one that can be restored is named."""
        run = find_run(client, trained_id)
        if run is None:
            return False
        if run.info.lifecycle_stage != LifecycleStage.DELETED:
            return True
        logger.warning(
            "MLflow: the run %s was deleted, so it does not get the results of its probe; after `mlflow runs restore "
            "--run-id %s` it gets them by: %s",
            *(trained_id, trained_id, replay_command(self._spec.folder)),
        )
        return False

    def _try(self, call: Callable[[], object], patience: Patience | None = None) -> None:
        try:
            (patience or self.patience).call(call)
        except NoAnswer:
            pass
        except Exception as error:
            self._errors.append(first_line(error))
            self._was_refused |= is_answer(error)

    @property
    def missing(self) -> str | None:
        """What is missing in MLflow and the command that uploads it, in a line; None if nothing is."""
        if self.patience.is_exhausted and not self._was_refused:
            what = f"MLflow did not answer for {self.patience.limit_s:g} s; upload what is missing with"
        elif self.num_lost:
            what = f"MLflow lacks {counted(self.num_lost, 'record')} of metrics; upload what is missing with"
        elif self._errors:
            what = f"MLflow: {self._errors[0]}; upload what is missing with"
        else:
            return None
        return f"{what}: {replay_command(self._spec.folder)}"


def save_figures(folder: Path, figures: "Mapping[str, Figure]") -> list[Path]:
    """Saves the plots of a run in its folder; returns the files."""
    plots = folder / "plots"
    plots.mkdir(exist_ok=True)
    paths: list[Path] = []
    for name, figure in figures.items():
        paths.append(plots / f"{name}.png")
        save_picture(paths[-1], figure)
    return paths


def _prepare_tracing() -> None:
    """Lets other threads trace networks; called in one that outlives them.

    torch 2.11 for CUDA crashes without a GPU when a thread traces after the first one that did has ended.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode  # takes part of a second to import

    with FakeTensorMode():
        pass
