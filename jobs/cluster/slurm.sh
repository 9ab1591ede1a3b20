#!/usr/bin/env bash
# A pretraining run on Slurm: one Ray node on each machine, saved before the time limit, put back in the queue, resumed.
# Not yet run: there was no Slurm where this was written.
#
#   sbatch jobs/cluster/slurm.sh experiment=cifar10_sec_100 data.root=/shared/data
#   OUTPUT_DIR=/scratch/$USER/runs sbatch --nodes=4 --gpus-per-node=8 jobs/cluster/slurm.sh experiment=cifar10_sec_100
#
# The arguments are overrides of `ssl-sec pretrain`. OUTPUT_DIR must be on storage that all nodes share; the package must
# be installed in the Python that PATH names on all of them (or put a container before the command that srun starts).
#SBATCH --job-name=ssl-sec
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
# Whole machines: ray symmetric-run refuses to start beside another Ray, and stops every Ray of its user when it ends.
#SBATCH --exclusive
#SBATCH --gpus-per-node=1
#SBATCH --cpus-per-task=8
#SBATCH --mem=64G
#SBATCH --time=04:00:00
#SBATCH --output=%x-%j.out
# A job that is started again goes on in the same file.
#SBATCH --open-mode=append
# After a node's failure, or a preemption, Slurm puts the job back in the queue by itself.
#SBATCH --requeue
# Ten minutes before the time limit, to this script alone (B:): a signal to the steps would end Ray beneath the run.
#SBATCH --signal=B:USR1@600
set -euo pipefail

output_dir=${OUTPUT_DIR:-/shared/runs}
run_name=slurm-$SLURM_JOB_ID # the id outlives a requeue
overrides=("$@" "output_dir=$output_dir" "run_name=$run_name" "runtime=ray" "resume=auto")

# Whoever reaches the head's port could run code as this user.
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH=${RAY_AUTH_TOKEN_PATH:-$HOME/.ray/auth_token}
[[ -s $RAY_AUTH_TOKEN_PATH ]] || (umask 077 && ray get-auth-token --generate >/dev/null)

# A stop is asked for as Ctrl-C does it: the workers see this file after a step, save, and the job ends with 130.
# shellcheck disable=SC2329  # the trap calls it
ask_for_a_stop() {
    echo "$(date --iso-8601=seconds) the time is nearly up: the state is saved and the job goes back in the queue"
    asked=yes
    # The folder is <output_dir>/<recipe>/<run_name>; only the job itself knows its recipe.
    for run_folder in "$output_dir"/*/"$run_name"; do
        [[ ! -d $run_folder ]] || touch "$run_folder/stop"
    done
}
asked=""
trap ask_for_a_stop USR1

nodes=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
head=${nodes%%$'\n'*}
# Ray would give its workers the least priority.
export RAY_worker_niceness=${RAY_worker_niceness:-0}
export RAY_SYMMETRIC_RUN_CLUSTER_WAIT_TIMEOUT=${RAY_SYMMETRIC_RUN_CLUSTER_WAIT_TIMEOUT:-300}

# In the background, since bash runs a trap only between commands or while it waits.
srun --kill-on-bad-exit=0 --cpus-per-task="${SLURM_CPUS_PER_TASK:-1}" ray symmetric-run \
    --address "$head:6379" \
    --min-nodes "$SLURM_JOB_NUM_NODES" \
    --num-cpus "${SLURM_CPUS_PER_TASK:-1}" \
    --num-gpus "${SLURM_GPUS_ON_NODE:-0}" \
    -- python -m ssl_sec pretrain "${overrides[@]}" &
step=$!
code=0
wait "$step" || code=$?
if [[ -n $asked ]]; then # the first wait ended with the signal, not with the step
    code=0
    wait "$step" || code=$?
fi

if [[ -n $asked && $code -ne 0 ]]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
