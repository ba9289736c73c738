"""Train on NeMo Gym environments with SkyRL 0.4, which needs GPUs.

    python examples/skyrl/train.py nemo_gym.environments=[mcqa] data.train_data=[train.jsonl] trainer.policy.model.path=MODEL

Arguments are SkyRL's own, and `nemo_gym` for the fields of `gymgate.skyrl.GeneratorSettings`.
"""

import sys
from dataclasses import dataclass, field
from typing import Any

import ray
from skyrl.train.config import SkyRLTrainConfig
from skyrl.train.entrypoints.main_base import BasePPOExp
from skyrl.train.utils import validate_cfg
from skyrl.train.utils.utils import initialize_ray

from gymgate.skyrl import GeneratorSettings, NeMoGymDataset, NeMoGymGenerator

DEFAULTS = {
    "data.train_data": "[]",
    "data.val_data": "[]",
    "generator.step_wise_trajectories": "true",
    "generator.max_turns": "2",  # any number above 1, so that max_input_length may exceed trainer.max_prompt_length
    "generator.max_input_length": "16384",
}
"""In place of SkyRL's."""


@dataclass
class Config(SkyRLTrainConfig):
    """SkyRL's config and `nemo_gym`."""

    nemo_gym: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def read(cls, arguments: list[str]) -> "Config":
        """Read the command line; `DEFAULTS` hold for what it does not set."""
        named = {argument.partition("=")[0] for argument in arguments}
        defaults = [f"{name}={value}" for name, value in DEFAULTS.items() if name not in named]
        return cls.from_cli_overrides([*defaults, *arguments])


class NeMoGymExp(BasePPOExp):
    """SkyRL's training with the rows and rollouts of NeMo Gym."""

    def get_train_dataset(self) -> NeMoGymDataset:
        dataset, size = self.read(self.cfg.data.train_data), self.cfg.trainer.train_batch_size
        if len(dataset) < size:
            raise SystemExit(
                f"data.train_data has {len(dataset)} rows, fewer than trainer.train_batch_size={size}"
            )
        return dataset

    def get_eval_dataset(self) -> NeMoGymDataset | None:
        evaluates = self.cfg.trainer.eval_interval > 0 and self.cfg.data.val_data
        return self.read(self.cfg.data.val_data) if evaluates else None

    def get_generator(self, cfg: Config, tokenizer: Any, inference_engine_client: Any) -> NeMoGymGenerator:
        return NeMoGymGenerator(cfg, tokenizer, inference_engine_client, self.settings)

    @property
    def settings(self) -> GeneratorSettings:
        return GeneratorSettings.model_validate(self.cfg.nemo_gym)

    def read(self, files: Any) -> NeMoGymDataset:
        """Open rows of a file or of environments, drawn by SkyRL's own seed."""
        return NeMoGymDataset(files, seed=self.cfg.trainer.seed, runtime=self.settings.stack.runtime)


@ray.remote(num_cpus=1)
def train(cfg: Config) -> None:
    """Run outside the head node, as SkyRL's own entrypoint does."""
    NeMoGymExp(cfg).run()


def main() -> None:
    cfg = Config.read(sys.argv[1:])
    validate_cfg(cfg)
    initialize_ray(cfg)
    ray.get(train.remote(cfg))


if __name__ == "__main__":
    main()
