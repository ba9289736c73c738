#!/bin/bash
@sbatch@
set -euo pipefail
@setup@
code=0
gymgate aggregate @aggregate@ || code=$?
gymgate report @report@
exit "$code"
