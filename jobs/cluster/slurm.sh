#!/usr/bin/env bash
# A pretraining run on Slurm with one Ray node per machine; saves before the time limit, requeues itself and resumes.
# Not yet run: no Slurm was available.
#
#   sbatch jobs/cluster/slurm.sh experiment=cifar10_sec_100 data.root=/shared/data
#   OUTPUT_DIR=/scratch/$USER/runs sbatch -N 4 -c 64 --gpus-per-node=8 jobs/cluster/slurm.sh experiment=cifar10_sec_100
#
# The arguments are overrides of `ssl-sec pretrain`. OUTPUT_DIR must be on storage shared by all nodes. The package must
# be installed for the `python` in PATH on all nodes (or prefix the command that srun starts with a container).
#SBATCH --job-name=ssl-sec
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
# Whole machines: ray symmetric-run does not start next to another Ray, and stops all Rays of its user at its end.
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
# Ten minutes before the time limit, only to this script (B:): a signal to the steps would end Ray during the run.
#SBATCH --signal=B:USR1@600
set -euo pipefail

output_dir=${OUTPUT_DIR:-/shared/runs}
if [[ $output_dir == *://* ]]; then # a stop is requested by a file in the run's folder
    echo "error: OUTPUT_DIR: found $output_dir, must be a folder that all nodes share" >&2
    exit 2
fi
run_name=slurm-$SLURM_JOB_ID # the id stays the same after a requeue
overrides=("$@" "output_dir=$output_dir" "run_name=$run_name" "runtime=ray" "resume=auto")

# Without a token, anyone who reaches the head's port could run code as this user.
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH=${RAY_AUTH_TOKEN_PATH:-$HOME/.ray/auth_token}
# `ray get-auth-token --generate` fails where the variable names a file that does not exist.
if [[ ! -s $RAY_AUTH_TOKEN_PATH ]]; then
    (umask 077 && mkdir -p "$(dirname "$RAY_AUTH_TOKEN_PATH")" &&
        python -c 'import secrets; print(secrets.token_hex(32))' >"$RAY_AUTH_TOKEN_PATH")
fi

# Stops the run like Ctrl-C: the workers see the file after a step and save, and the job ends with exit code 130.
request_stop() {
    # The folder is <output_dir>/<recipe>/<run_name>; only the job itself knows its recipe.
    for run_folder in "$output_dir"/*/"$run_name"{,-probe}; do
        [[ ! -d $run_folder ]] || touch "$run_folder/stop"
    done
}
# shellcheck disable=SC2329  # the trap calls it
on_time_limit() {
    echo "$(date --iso-8601=seconds) the time limit is near: saving the state and requeueing the job"
    stop_requested=yes
}
stop_requested=""
trap on_time_limit USR1

nodes=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
head=${nodes%%$'\n'*}
# Ray's default gives its workers the lowest priority.
export RAY_worker_niceness=${RAY_worker_niceness:-0}
export RAY_SYMMETRIC_RUN_CLUSTER_WAIT_TIMEOUT=${RAY_SYMMETRIC_RUN_CLUSTER_WAIT_TIMEOUT:-300}

# `ray symmetric-run` ends with 0 where its Ray did not start, so the run itself writes how it ended.
mkdir -p "$output_dir"
outcome=$output_dir/.$run_name.exit
rm -f "$outcome"
# shellcheck disable=SC2016  # the shell on the node expands it
with_outcome='"${@:2}"; code=$?; echo "$code" >"$1"; exit "$code"'

# In the background, since bash runs traps only between commands or in `wait`.
srun --kill-on-bad-exit=0 --cpus-per-task="${SLURM_CPUS_PER_TASK:-1}" ray symmetric-run \
    --address "$head:6379" \
    --min-nodes "$SLURM_JOB_NUM_NODES" \
    --num-cpus "${SLURM_CPUS_PER_TASK:-1}" \
    --num-gpus "${SLURM_GPUS_ON_NODE:-0}" \
    -- bash -c "$with_outcome" run "$outcome" python -m ssl_sec pretrain "${overrides[@]}" &
step=$!
code=0
wait "$step" || code=$?
if [[ -n $stop_requested ]]; then # the signal ended the first wait, not the step
    while kill -0 "$step" 2>/dev/null; do # again, for a run or a probe that is still starting
        request_stop
        sleep 2
    done
    code=0
    wait "$step" || code=$?
fi
if [[ $code -eq 0 && ! -s $outcome ]]; then
    echo "Ray did not start, see above: nothing was run"
    code=1
fi
rm -f "$outcome"

if [[ -n $stop_requested && $code -ne 0 ]]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
