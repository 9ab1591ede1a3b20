"""Which run in MLflow a job makes."""

from collections.abc import Mapping

from ssl_sec.edges.folder.descriptions import RunIdentity
from ssl_sec.edges.folder.names import user_tags
from ssl_sec.edges.tracking.store import tracking_uri, workspace_of
from ssl_sec.errors import ConfigError, shown
from ssl_sec.recipes.tracking import TrackingConfig


def identity_of(
    tracking: TrackingConfig,
    output_dir: str,
    *,
    recipe: str,
    job: str,
    name: str,
    code: Mapping[str, str],
    tags: Mapping[str, str],
) -> RunIdentity:
    """The run of a job: in the configured store, in the experiment of the recipe unless another one is configured.

    Of equal keys, `tags` take precedence over the tags of the user, and these over those of the code.

    Raises:
        ConfigError: for a scheme of the store's address that MLflow does not support.
        StorageError: for a sqlite file that is a folder, or no database.
    """
    uri = tracking_uri(tracking, output_dir)
    return RunIdentity(
        uri=uri,
        workspace=workspace_of(uri),
        experiment=tracking.experiment or recipe,
        name=name,
        tags={**code, **user_tags(tracking), **tags, "recipe": recipe, "job": job},
        parent_run_id=tracking.parent_run,
    )


def require_workspace(identity: RunIdentity) -> None:
    """Refuses another workspace than that of a run, in which alone MLflow's server finds it.

    Raises:
        ConfigError: if MLFLOW_WORKSPACE is another one.
    """
    if identity.workspace not in (None, found := workspace_of(identity.uri)):
        raise ConfigError(
            f"MLFLOW_WORKSPACE: found {shown(found)}, but run {identity.name} is in a workspace of {identity.uri}; "
            f"allowed: MLFLOW_WORKSPACE={identity.workspace}"
        )
