"""All that is measured on a GPU, in parts, each in a process of its own; what is done is done once.

    python -m benchmarks.campaign --data <Parquet or images> --minutes 26 --output <folder>   # and again, to go on
    python -m benchmarks.campaign --rehearse --output <folder>         # all of it on a CPU, at a tiny size
    python -m benchmarks.campaign --report <folder>                    # README.md's and LOG.md's rows from its results
    python -m benchmarks.campaign --pack <folder> --data <Parquet>     # what a machine without a network needs

Needs neither Ray, MLflow, Hydra, OmegaConf, git nor a network. In this order: the tests that need a GPU; the speed of
pretraining ResNet-50 and ResNet-18 beside lightly's recipe and a plain loop; the paper's runs on CIFAR-10 with their
probes, ResNet-50 and then ResNet-18 with three seeds; views, choices, growth and evaluation.

A process that outlives the command does the work, and the command shows what it says, until the time is over or all is
done. Another call with the same --output follows that process, or goes on where it stopped: finished parts are skipped,
a training run takes up its last checkpoint. When the time is over, a training run saves and stops, within a minute. The
folder has results/<part>.json (written as they come), status.json, log.txt, and the caches of Inductor and Triton;
checkpoints are in --checkpoints.
"""

import argparse
import os
import sys
import time
from pathlib import Path

from benchmarks.campaign.sheet import Plan
from ssl_sec.errors import UserError

MINUTES = 26.0


def main() -> int:
    """Starts a worker or follows it; or reports, or packs."""
    options = _command_line().parse_args()
    if options.report is not None:
        from benchmarks.campaign.report import report

        return report(options.report)
    if options.pack is not None:
        from benchmarks.campaign.packing import pack

        return pack(options.pack, options.data)
    if options.output is None or (options.data is None and not options.rehearse):
        raise SystemExit("--output and --data are needed; or --output and --rehearse; or --report; or --pack")
    output = options.output.resolve()
    checkpoints = (options.checkpoints or output / "runs").resolve()
    environment = {
        **os.environ,
        **({"SSL_SEC_COMMIT": options.commit} if options.commit else {}),
        "TORCHINDUCTOR_CACHE_DIR": str(output / "cache" / "inductor"),
        "TRITON_CACHE_DIR": str(output / "cache" / "triton"),
        # Looking for a GPU must not initialise CUDA in the worker, from which the parts are forked.
        "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
    }
    if not options.work:
        from benchmarks.campaign.data import prepared

        output.mkdir(parents=True, exist_ok=True)
        plan = Plan(
            output=str(output),
            checkpoints=str(checkpoints),
            data=prepared(options.data, output),
            rehearsal=options.rehearse,
        )
        plan.keep()
        return _follow(plan, options, environment)
    return _work(output, options)


def _follow(plan: Plan, options: argparse.Namespace, environment: dict[str, str]) -> int:
    from benchmarks.campaign.running import GRACE_S, deadline, follow, is_worked_on, set_deadline

    if options.minutes is not None or not is_worked_on(plan.folder):
        set_deadline(plan.folder, MINUTES if options.minutes is None else options.minutes)
    until = time.time() + 60 * options.follow if options.follow is not None else deadline(plan.folder) + GRACE_S
    code = follow(plan, [sys.executable, "-m", "benchmarks.campaign", *sys.argv[1:], "--work"], environment, until)
    print((plan.folder / "status.json").read_text() if (plan.folder / "status.json").exists() else "")
    return code


def _work(output: Path, options: argparse.Namespace) -> int:
    from benchmarks.campaign.parts import of_names
    from benchmarks.campaign.running import work

    plan = Plan.kept(output)
    parts = of_names(plan, options.parts)
    again = {part.name for part in of_names(plan, options.again)} if options.again else set()
    work(plan, parts, tuple(again))
    return 0


def _command_line() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.campaign", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, help="the campaign's folder")
    parser.add_argument(
        "--data", type=Path, help="a folder with train*.parquet and test*.parquet, or of images, or a .tar.gz of images"
    )
    parser.add_argument(
        "--minutes", type=float, help=f"until the work stops, from now on; {MINUTES:g} for a new worker"
    )
    parser.add_argument("--follow", type=float, metavar="MINUTES", help="how long this call shows what the worker says")
    parser.add_argument("--checkpoints", type=Path, help="folder of the training runs; <output>/runs if not given")
    parser.add_argument(
        "--parts", nargs="+", default=[], metavar="PATTERN", help="a new worker does these alone, as 'speed-*'"
    )
    parser.add_argument(
        "--again",
        nargs="+",
        default=[],
        metavar="PATTERN",
        help="a new worker does these too if they are done or failed",
    )
    parser.add_argument("--commit", help="of the code, where git or the history is not there")
    parser.add_argument(
        "--rehearse", action="store_true", help="all of it at a tiny size; without --data on random images"
    )
    parser.add_argument(
        "--report", type=Path, metavar="FOLDER", help="put a campaign's results into README.md and LOG.md"
    )
    parser.add_argument(
        "--pack", type=Path, metavar="FOLDER", help="put wheels and data for a machine without network here"
    )
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    try:
        sys.exit(main())
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
