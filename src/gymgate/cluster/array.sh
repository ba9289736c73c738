#!/bin/bash
@sbatch@
set -euo pipefail
again() {
  if [ "${SLURM_RESTART_COUNT:-0}" -lt @requeues@ ]; then
    scontrol requeue "${SLURM_ARRAY_JOB_ID}_${SLURM_ARRAY_TASK_ID}"
    sleep 60  # Slurm ends this step
  fi
  exit 75
}
# Slurm sends SIGUSR1 before the walltime ends: start no new rollouts, finish those under way.
drain=
trap 'drain=1' USR1
@setup@
[ -z "$drain" ] || again
@command@ &
runner=$!
trap 'kill -USR1 "$runner" 2>/dev/null || true' USR1
trap 'kill -TERM "$runner" 2>/dev/null || true' TERM
[ -z "$drain" ] || kill -USR1 "$runner" 2>/dev/null || true  # it came meanwhile
# A signal ends `wait`, not the run, whose exit status bash keeps.
while kill -0 "$runner" 2>/dev/null; do wait "$runner" || true; done
code=0
wait "$runner" || code=$?
[ "$code" -ne 138 ] || code=75  # SIGUSR1 ended it before it could handle signals
[ "$code" -ne 75 ] || again
exit "$code"
