#!/usr/bin/env bash
# Trains on the machines of a SLURM allocation: one `accelerate launch` per machine, so that DeepSpeed sees all GPUs.
# What follows the script's name goes behind `accelerate launch`. From the root of the repository:
#
#   sbatch --nodes 2 --gpus-per-node 8 launch/slurm.sh launch/finetune.py my_recipe.yaml
#   sbatch --nodes 2 --gpus-per-node 8 launch/slurm.sh -m oomb_accel run --oomb.chunk_tokens 8192 my_script.py
#   ACCELERATE_CONFIG=configs/accelerate/zero2.yaml sbatch --nodes 4 --gpus-per-node 8 launch/slurm.sh ...
#
# Environment, data, model and output folder must be at the same paths on every machine. Activate the Python
# environment before sbatch, which hands it on, or name its interpreter in PYTHON.
#
#SBATCH --job-name=oomb
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --output=%x-%j.log
set -euo pipefail

if [ "$#" -eq 0 ] || [ -z "${SLURM_JOB_ID:-}" ]; then
  echo "usage: sbatch --nodes 2 --gpus-per-node 8 launch/slurm.sh launch/finetune.py RECIPE.yaml [--key value ...]" >&2
  exit 2
fi

# "8", or "h200:8" as the option may be written.
gpus="${SLURM_GPUS_PER_NODE:-${SLURM_GPUS_ON_NODE:-}}"
gpus="${gpus##*:}"
if ! [[ "$gpus" =~ ^[1-9][0-9]*$ ]]; then
  echo "SLURM does not say how many GPUs each machine has." >&2
  echo "  Got SLURM_GPUS_PER_NODE='${SLURM_GPUS_PER_NODE:-}' and SLURM_GPUS_ON_NODE='${SLURM_GPUS_ON_NODE:-}'." >&2
  echo "  Add --gpus-per-node to sbatch, for example --gpus-per-node 8." >&2
  exit 2
fi
machines="$SLURM_JOB_NUM_NODES"
cores="$SLURM_CPUS_ON_NODE"
# Unset, Accelerate takes 1: too few for tokenising and for an optimizer in host memory.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-$((cores >= gpus ? cores / gpus : 1))}"

hosts="$(scontrol show hostnames "$SLURM_JOB_NODELIST")"
first="${hosts%%$'\n'*}"
# One that another job on this machine is unlikely to have.
port="${MASTER_PORT:-$((20000 + SLURM_JOB_ID % 10000))}"
config="${ACCELERATE_CONFIG:-configs/accelerate/zero3.yaml}"
echo "job $SLURM_JOB_ID: $machines machine(s) of $gpus GPU(s), first $first:$port, $config"

# Only a task knows SLURM_NODEID, hence the inner shell. srun by itself would give a task one core, and would let the
# other machines wait for one that has failed.
# shellcheck disable=SC2016
srun --ntasks="$machines" --ntasks-per-node=1 --cpus-per-task="$cores" --kill-on-bad-exit=1 \
  bash -c 'exec "$0" -m accelerate.commands.launch --machine_rank "$SLURM_NODEID" "$@"' "${PYTHON:-python}" \
  --config_file "$config" --num_machines "$machines" --num_processes "$((machines * gpus))" \
  --main_process_ip "$first" --main_process_port "$port" "$@"
