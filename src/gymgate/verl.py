"""NeMo Gym environments in verl: what its config names as `gymgate.verl.NAME`. Needs the extras `nemogym` and `verl`."""

try:
    from gymgate.integrations.verl.dataset import NeMoGymDataset
    from gymgate.integrations.verl.loop import NeMoGymAgentLoop
    from gymgate.integrations.verl.replay_buffer import NeMoGymReplayBuffer, NeMoGymReplayBufferAsync
except ModuleNotFoundError as error:
    if (error.name or "").startswith("gymgate"):
        raise
    from gymgate.core.errors import MissingExtraError
    from gymgate.core.extras import install_command

    told = f"{error.name} is not installed: {install_command('nemogym,verl')} (verl needs Python < 3.13)"
    raise MissingExtraError(told) from error

__all__ = ["NeMoGymAgentLoop", "NeMoGymDataset", "NeMoGymReplayBuffer", "NeMoGymReplayBufferAsync"]
