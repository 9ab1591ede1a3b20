"""Jobs that wait for one another, on the cluster; jobs.submit starts it there with --then or for a sweep."""

import json
import sys
from pathlib import Path

from ssl_sec.edges.command_line import exit_code_of
from ssl_sec.edges.pipeline import Plan, run_pipeline
from ssl_sec.settings import from_values

if __name__ == "__main__":
    sys.exit(
        exit_code_of(lambda: run_pipeline(from_values(Plan, json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))))
    )
