"""What runs in the process that uses a stack: its leases, the daemons that it starts, finds and ends."""
