"""verl: an agent loop, a dataset and replay buffers that verl's config names."""

from gymgate.integrations.verl.dataset import NeMoGymDataset
from gymgate.integrations.verl.loop import NeMoGymAgentLoop
from gymgate.integrations.verl.sampler import NeMoGymReplayBuffer, NeMoGymReplayBufferAsync

__all__ = ["NeMoGymAgentLoop", "NeMoGymDataset", "NeMoGymReplayBuffer", "NeMoGymReplayBufferAsync"]
