"""Face recognition: python -m jobs.face experiment=casia_arcface_sec data.root=<folder>."""

import sys
from collections.abc import Sequence

from ssl_sec.edges.command_line import run_job
from ssl_sec.edges.composition import compose
from ssl_sec.edges.driver import run_face
from ssl_sec.edges.summary import summary
from ssl_sec.face_config import FaceConfig
from ssl_sec.settings import from_values


def face(overrides: Sequence[str]) -> str:
    """Runs the job and tells its results."""
    return summary(run_face(from_values(FaceConfig, compose("face", overrides))))


if __name__ == "__main__":
    sys.exit(run_job("face", face, supervise=True))
