"""What a run is to be: its rollouts, settings, pace and prices. Nothing here reads a run or starts one."""
