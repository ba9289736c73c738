"""Plot the rewards of a run: `python examples/trl/plot.py RUN/checkpoint-N/trainer_state.json OUT.png` (needs matplotlib)."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt


def main(state: Path, picture: Path) -> None:
    steps = [entry for entry in json.loads(state.read_text())["log_history"] if "reward" in entry]
    figure, axes = plt.subplots(figsize=(6, 3.2), layout="constrained")
    axes.plot([step["step"] for step in steps], [step["reward"] for step in steps], marker=".")
    axes.set(
        xlabel="optimizer step",
        ylabel="mean reward",
        ylim=(0, 1.05),
        title="letter_share, random 2-layer policy, GRPO",
    )
    axes.grid(alpha=0.3)
    figure.savefig(picture, dpi=110)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
