#!/usr/bin/env bash
# Train with verl on NeMo Gym: examples/verl/train.sh math|workplace|multi|megatron [HYDRA_OVERRIDE ...]
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
name=${1:?name a config: math, workplace, multi or megatron}
shift
exec python -m verl.trainer.main_ppo --config-path "$here" --config-name "$name" \
    "actor_rollout_ref.rollout.agent.agent_loop_config_path=$here/agents/$name.yaml" "$@"
