"""Runs all measurements on a GPU, in parts; each runs in its own process, and finished parts are skipped.

    python -m benchmarks.campaign --data <Parquet or images> --minutes 26 --output <folder>   # repeat to continue
    python -m benchmarks.campaign --rehearse --output <folder>         # everything on a CPU, at a tiny size
    python -m benchmarks.campaign --report <folder>                    # writes its results to the pages
    python -m benchmarks.campaign --pack <folder> --data <Parquet>     # the files for a machine without a network

Does not need Ray, MLflow, Hydra, OmegaConf, git or a network. The order: the speed of pretraining ResNet-50 and
ResNet-18 at batch 256, compared with lightly's recipe and a plain loop; the tests that need a GPU; the runs of seconds
of the studies for CPUs, several at once; the paper's runs of NT-Xent and SEC on CIFAR-10 with their probes, ResNet-18
with three seeds and then ResNet-50, also with SupContrast's settings; the settings that others tuned for ResNet-18; the
speed at batch 1,024; the paper's other arms; views, options, growth and evaluation; the study of norms, each arm's
search before its runs.

A background process does the work. The command shows its output until the time is up or all parts are done. Another
call with the same --output follows that process, which keeps its deadline, or continues for --minutes if it has ended:
finished parts are skipped, and a training run resumes from its last checkpoint. When the time is up, a training run
saves and stops within a minute. The folder has results/<part>.json, status.json, log.txt, and the caches of Inductor
and Triton; checkpoints are in --checkpoints.
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
    """Starts a worker or follows it, writes a report, or packs files; returns the exit code."""
    options = _make_parser().parse_args()
    if options.report is not None:
        from benchmarks.campaign.report import report

        return report(options.report)
    if options.pack is not None:
        from benchmarks.campaign.packing import pack

        return pack(options.pack, options.data)
    if options.output is None or (options.data is None and not options.rehearse):
        raise SystemExit("give --output and --data, or --output and --rehearse, or --report, or --pack")
    output = options.output.resolve()
    checkpoints = (options.checkpoints or output / "runs").resolve()
    environment = {
        **os.environ,
        **({"SSL_SEC_COMMIT": options.commit} if options.commit else {}),
        "TORCHINDUCTOR_CACHE_DIR": str(output / "cache" / "inductor"),
        "TRITON_CACHE_DIR": str(output / "cache" / "triton"),
        # The worker forks a process for each part, so its check for a GPU must not initialise CUDA.
        "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
    }
    if not options.work:
        from benchmarks.campaign.data import prepare_data

        output.mkdir(parents=True, exist_ok=True)
        plan = Plan(
            output=str(output),
            checkpoints=str(checkpoints),
            data=prepare_data(options.data, output),
            rehearsal=options.rehearse,
        )
        plan.save()
        return _follow(plan, options, environment)
    return _work(output, options)


def _follow(plan: Plan, options: argparse.Namespace, environment: dict[str, str]) -> int:
    from benchmarks.campaign.running import GRACE_S, follow, has_worker, read_deadline, set_deadline

    if not has_worker(plan.folder):
        set_deadline(plan.folder, options.minutes)
    until = time.time() + 60 * options.follow if options.follow is not None else read_deadline(plan.folder) + GRACE_S
    code = follow(plan, [sys.executable, "-m", "benchmarks.campaign", *sys.argv[1:], "--work"], environment, until)
    print((plan.folder / "status.json").read_text() if (plan.folder / "status.json").exists() else "")
    return code


def _work(output: Path, options: argparse.Namespace) -> int:
    from benchmarks.campaign.parts import select_parts
    from benchmarks.campaign.running import work

    plan = Plan.load(output)
    parts = select_parts(plan, options.parts)
    again = {part.name for part in select_parts(plan, options.again)} if options.again else set()
    work(plan, parts, tuple(again))
    return 0


def _make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.campaign", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, help="the campaign's folder")
    parser.add_argument(
        "--data",
        type=Path,
        help="a folder with train*.parquet and test*.parquet, a folder with a subfolder per class, or a .tar.gz of one",
    )
    parser.add_argument(
        "--minutes",
        type=float,
        default=MINUTES,
        help=f"stop a worker that this call starts after this time; default: {MINUTES:g}",
    )
    parser.add_argument("--follow", type=float, metavar="MINUTES", help="how long to show the worker's output")
    parser.add_argument("--checkpoints", type=Path, help="folder of the training runs; default: <output>/runs")
    parser.add_argument("--parts", nargs="+", default=[], metavar="PATTERN", help="run only these parts, as 'speed-*'")
    parser.add_argument(
        "--again",
        nargs="+",
        default=[],
        metavar="PATTERN",
        help="run these parts again: a training run that is done from its start, one that failed from its checkpoint",
    )
    parser.add_argument("--commit", help="commit of the code, if git or its history is missing")
    parser.add_argument(
        "--rehearse", action="store_true", help="run everything at a tiny size; without --data on random images"
    )
    parser.add_argument("--report", type=Path, metavar="FOLDER", help="write a campaign's results to the documentation")
    parser.add_argument(
        "--pack", type=Path, metavar="FOLDER", help="write wheels and data for a machine without a network"
    )
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    try:
        sys.exit(main())
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
