#!/bin/bash
set -euo pipefail
id=$(sbatch --parsable @array@)
id=${id%%;*}
sbatch --parsable --dependency="afterany:$id" @aggregate@
echo "array $id" >&2
