"""Wait until a Ray cluster has so many nodes: `python wait_for_ray.py --nodes 2 --timeout 600` (the address is `RAY_ADDRESS`)."""

from __future__ import annotations

import argparse
import sys
import time

import ray


def nodes_of_cluster() -> int:
    """Nodes that are alive; 0 while nothing answers."""
    try:
        ray.init(address="auto", ignore_reinit_error=True, log_to_driver=False)
    except ConnectionError:
        return 0
    return sum(bool(node["Alive"]) for node in ray.nodes())


def main(wanted: int, timeout_s: float) -> int:
    deadline = time.monotonic() + timeout_s
    while (found := nodes_of_cluster()) < wanted:
        if time.monotonic() > deadline:
            print(f"{found} of {wanted} Ray nodes after {timeout_s:g} s", file=sys.stderr)
            return 1
        time.sleep(2)
    return 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, required=True)
    parser.add_argument("--timeout", type=float, default=600.0)
    args = parser.parse_args()
    sys.exit(main(args.nodes, args.timeout))
