"""NeMo Gym as it is installed: its catalog, rows, runtime and data. `gym.inside` is all code that runs in its interpreter."""
