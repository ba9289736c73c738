"""What runs in a stack's daemon: leases as it holds them, environments and their processes, rollouts."""
