"""Results beside the papers': python -m jobs.report table=5, figure=6 or compare <run> <run>."""

import sys

from ssl_sec.edges.command_line import run_job
from ssl_sec.edges.report import run_report

if __name__ == "__main__":
    sys.exit(run_job("report", run_report))
