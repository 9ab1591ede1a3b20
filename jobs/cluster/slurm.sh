#!/usr/bin/env bash
# A pretraining run on Slurm with one Ray node per machine; saves before the time limit, requeues itself and resumes.
# Run with Slurm 22.05.8 on two virtual nodes without GPUs (network namespaces of one machine).
#
#   sbatch jobs/cluster/slurm.sh experiment=cifar10_sec_100 data.root=/shared/data
#   OUTPUT_DIR=/scratch/$USER/runs sbatch -N 4 -c 64 --gpus-per-node=8 jobs/cluster/slurm.sh experiment=cifar10_sec_100
#
# The arguments are overrides of `ssl-sec pretrain`. OUTPUT_DIR must be a bucket, or a folder that all nodes share. The
# package must be installed for the `python` in PATH on all nodes. Without GPUs: sbatch --gpus-per-node=0, with the
# number of workers as an override, runtime.num_workers=2. What Ray itself prints is in <job's name>-<its id>-ray.out.
#SBATCH --job-name=ssl-sec
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
# Whole machines: two Rays on one would use the same ports.
#SBATCH --exclusive
#SBATCH --gpus-per-node=1
# Those of a machine, which its GPUs share.
#SBATCH --cpus-per-task=8
# All memory of each machine.
#SBATCH --mem=0
#SBATCH --time=04:00:00
#SBATCH --output=%x-%j.out
# A requeued job appends to the same file.
#SBATCH --open-mode=append
# Slurm requeues the job after a node failure or a preemption.
#SBATCH --requeue
# Ten minutes before the time limit, only to this script (B:): a signal to the steps would end Ray during the run. Slurm
# may send it a minute earlier.
#SBATCH --signal=B:USR1@600
set -euo pipefail

# The id stays the same after a requeue. The job's own arguments come last: a run_name continues the run of another job.
overrides=("output_dir=${OUTPUT_DIR:-/shared/runs}" "run_name=slurm-$SLURM_JOB_ID" runtime=ray resume=auto "$@")

# Without a token, anyone who reaches the head's port could run code as this user.
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH=${RAY_AUTH_TOKEN_PATH:-$HOME/.ray/auth_token}
# `ray get-auth-token --generate` fails where the variable names a file that does not exist.
if [[ ! -s $RAY_AUTH_TOKEN_PATH ]]; then
    (umask 077 && mkdir -p "$(dirname "$RAY_AUTH_TOKEN_PATH")" &&
        python -c 'import secrets; print(secrets.token_hex(32))' >"$RAY_AUTH_TOKEN_PATH")
fi

# Stops the run like Ctrl-C: it saves, and ends with exit code 130.
# shellcheck disable=SC2329  # the trap calls it
on_time_limit() {
    echo "$(date --iso-8601=seconds) the time limit is near: saving the state"
    stopped_after_s=$SECONDS
    kill "$process" 2>/dev/null || true
}
stopped_after_s=""
process=""
trap on_time_limit USR1

nodes=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
address=${nodes%%$'\n'*}:6379
# Ray's defaults give its workers the lowest priority, colour their lines, and wait half a minute after scancel.
export RAY_worker_niceness=${RAY_worker_niceness:-0} RAY_COLOR_PREFIX=${RAY_COLOR_PREFIX:-0}
export RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S=0

# Runs on each node; this script runs on the first one.
# shellcheck disable=SC2016  # the shell on the node expands it
start_ray='
place=(--head --port "${1##*:}")
if [[ $SLURM_NODEID -ne 0 ]]; then
    until (: <"/dev/tcp/${1%:*}/${1##*:}") 2>/dev/null; do sleep 1; done
    place=(--address "$1")
fi
# Sockets of Ray have paths of up to 107 bytes, and TMPDIR of a job may be too long for them.
[[ -n ${RAY_TMPDIR:-} || ${#TMPDIR} -le 37 ]] || export RAY_TMPDIR=/tmp
ray start "${place[@]}" --block --log-color false \
    --num-cpus "${SLURM_CPUS_PER_TASK:-1}" --num-gpus "${SLURM_GPUS_ON_NODE:-0}" && exit
# Without the head, the other nodes would wait.
[[ $SLURM_NODEID -ne 0 ]] || scancel "$SLURM_JOB_ID.$SLURM_STEP_ID"
exit 1'
ray_output=$SLURM_JOB_NAME-$SLURM_JOB_ID-ray.out
srun --kill-on-bad-exit=0 --label --cpus-per-task="${SLURM_CPUS_PER_TASK:-1}" \
    bash -c "$start_ray" ray "$address" >>"$ray_output" 2>&1 &
ray=$!

wait_for_nodes='
import sys, time, ray
address, nodes = sys.argv[1:]
while True:
    try:
        ray.init(address, ignore_reinit_error=True, log_to_driver=False, logging_level="CRITICAL")
        if sum(node["Alive"] for node in ray.nodes()) >= int(nodes):
            sys.exit()
    except ConnectionError:  # the head is still starting
        pass
    time.sleep(1)'

# In the background, since bash runs traps only between commands or in `wait`; sets `code`.
run() {
    "$@" &
    process=$!
    [[ -z $stopped_after_s ]] || kill "$process"
    while kill -0 "$process" 2>/dev/null; do wait "$process" || true; done # a signal ends a `wait`, not the command
    code=0
    wait "$process" || code=$?
}
timeout --kill-after=2 300 python -c "$wait_for_nodes" "$address" "$SLURM_JOB_NUM_NODES" 2>>"$ray_output" &
process=$!
while kill -0 "$process" 2>/dev/null && kill -0 "$ray" 2>/dev/null; do sleep 1; done
kill "$process" 2>/dev/null || true # where Ray has ended
code=0
wait "$process" || code=$?
if [[ $code -eq 0 ]]; then
    RAY_ADDRESS=$address run python -m ssl_sec pretrain "${overrides[@]}"
elif [[ -z $stopped_after_s ]]; then
    echo "error: Ray did not start on $SLURM_JOB_NUM_NODES nodes, see $ray_output" >&2
    code=1
fi
kill "$ray" 2>/dev/null || true
wait "$ray" || true

if [[ -n $stopped_after_s && $code -ne 0 ]]; then
    if [[ $stopped_after_s -lt 60 ]]; then # with such a limit, each requeue would end before the run has begun
        echo "error: --time: must be longer than the seconds of --signal, 600 by default: nothing would be trained" >&2
        exit 2
    fi
    echo "requeueing the job"
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
