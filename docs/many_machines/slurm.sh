#!/bin/bash
# Default runs on nodes of one kind, one record each. In a clone that has its .venv on a shared disk:
#     sbatch --constraint=KIND --array=0-4 docs/many_machines/slurm.sh KIND
#SBATCH --job-name=twinbench
#SBATCH --nodes=1
#SBATCH --ntasks=1
#SBATCH --cpus-per-task=2
#SBATCH --hint=nomultithread
#SBATCH --exclusive
#SBATCH --time=02:00:00
#SBATCH --output=%x-%A-%a.out
set -euo pipefail
kind=$1
folder=results/$kind/$SLURM_ARRAY_TASK_ID
cd "$SLURM_SUBMIT_DIR"

# Submit the same element of the array again to continue an interrupted run.
again=()
if [ -e "$folder/latest/state.json" ]; then
    again=(--resume "$folder/latest")
fi
srun --cpus-per-task="$SLURM_CPUS_PER_TASK" \
    .venv/bin/pytest bench/ --benchmark-only --results "$folder" "${again[@]}"
