#!/bin/bash
#SBATCH --job-name=train_gpt
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --signal=B:USR1@300
# A recipe (RECIPE, 124M) on the machines that Slurm gives, one process a GPU, started by srun:
#
#   RECIPE=350M sbatch --nodes=1 --time=12:00:00 scripts/run_slurm.sh [OPTION OF train_gpt ...]
#
# Five minutes before the time is up Slurm sends SIGUSR1, which makes the program write a checkpoint and end. The next
# job goes on from there: submit several with --dependency=singleton; those that find the run complete end at once.
# SRUN_MPI is how MPI's processes find each other (srun --mpi=list names what there is); empty: without MPI, by a port of
# rank 0. doc/multi-node.md.
set -euo pipefail
cd "${SLURM_SUBMIT_DIR:-$(dirname "$0")/..}" && source scripts/run_common.sh
defaults RECIPE=124M SRUN_MPI=pmix
[[ -x scripts/run_$RECIPE.sh ]] || recipe_die "RECIPE '$RECIPE': there is no scripts/run_$RECIPE.sh"
defaults RANKS="${SLURM_NTASKS:-16}" LAUNCH="srun${SRUN_MPI:+ --mpi=$SRUN_MPI}"
export RANKS LAUNCH
exec "scripts/run_$RECIPE.sh" "$@"
