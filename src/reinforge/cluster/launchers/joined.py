"""`python -m reinforge.cluster.launchers.joined NODES SECONDS`: waits until a Ray cluster has that
many nodes; exit code 1 if it never does.
"""

from __future__ import annotations

import sys
import time


def joined(nodes: int, seconds: float) -> int:
    """How many nodes are alive, when enough are or the time is over.

    The address and the token are in the environment.
    """
    import ray

    ray.init(log_to_driver=False, logging_level="ERROR")
    until = time.monotonic() + seconds
    while (
        alive := sum(bool(node["Alive"]) for node in ray.nodes())
    ) < nodes and time.monotonic() < until:
        time.sleep(1.0)
    ray.shutdown()
    return alive


def main(argv: list[str]) -> int:
    wanted = int(argv[0])
    seconds = float(argv[1])
    alive = joined(wanted, seconds)
    print(f"{alive} of {wanted} nodes of Ray are there", flush=True)
    return 0 if alive >= wanted else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
