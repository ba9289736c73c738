"""NeMo Gym environments in verl: what its config names as `gymgate.verl.NAME`. Needs the extra `verl`."""

from gymgate.integrations.versions import failed_import, warn_if_untested

warn_if_untested("verl")  # first, because its import may fail for this reason

try:
    from gymgate.integrations.verl.dataset import NeMoGymDataset
    from gymgate.integrations.verl.loop import NeMoGymAgentLoop
    from gymgate.integrations.verl.replay_buffer import NeMoGymReplayBuffer, NeMoGymReplayBufferAsync
except ImportError as error:
    raise failed_import("verl", error, "verl needs Python < 3.13") from error

__all__ = ["NeMoGymAgentLoop", "NeMoGymDataset", "NeMoGymReplayBuffer", "NeMoGymReplayBufferAsync"]
