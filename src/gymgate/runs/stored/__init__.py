"""One rollout as a run keeps it, and the files of a run."""
