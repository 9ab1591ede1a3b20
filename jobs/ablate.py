"""One recipe under several constraints and seeds: python -m jobs.ablate experiment=digits [seeds=[0,1,2]]."""

import sys

from ssl_sec.edges.ablation import run_ablation
from ssl_sec.edges.command_line import run_job

if __name__ == "__main__":
    sys.exit(run_job("ablate", run_ablation, supervise=True))
