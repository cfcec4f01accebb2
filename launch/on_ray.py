"""A job on a Ray cluster, one process on each of some machines.

python launch/on_ray.py --processes 2 --gpus 8 -- --config gpt_d24 run.directory=/shared/runs
"""

import argparse
import socket
import subprocess
import sys

import ray
from ray.util import get_node_ip_address
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy


@ray.remote
class Host:
    """One machine of the job."""

    def address(self) -> str:
        """Where the coordinator may listen on this machine."""
        with socket.create_server(("", 0)) as server:
            return f"{get_node_ip_address()}:{server.getsockname()[1]}"

    def train(self, arguments: list[str]) -> int:
        """The exit code of the process."""
        return subprocess.call([sys.executable, "-u", "-m", "jaxtrain.main", *arguments])


def main(argv: list[str]) -> int:
    cut = argv.index("--") if "--" in argv else len(argv)
    parser = argparse.ArgumentParser(usage="on_ray.py --processes N [--gpus G] -- ARGUMENTS")
    parser.add_argument("--processes", type=int, required=True, help="machines")
    parser.add_argument("--gpus", type=int, default=8, help="of each machine")
    asked = parser.parse_args(argv[:cut])
    ray.init()
    bundles = [{"GPU": asked.gpus, "CPU": 1}] * asked.processes
    bundle = placement_group(bundles, strategy="STRICT_SPREAD")
    hosts = [
        Host.options(
            num_gpus=asked.gpus,
            scheduling_strategy=PlacementGroupSchedulingStrategy(
                placement_group=bundle, placement_group_bundle_index=i
            ),
        ).remote()
        for i in range(asked.processes)
    ]
    place = ["--coordinator", ray.get(hosts[0].address.remote())]
    place += ["--processes", str(asked.processes), "--process"]
    codes = [h.train.remote([*argv[cut + 1 :], *place, str(i)]) for i, h in enumerate(hosts)]
    return max(map(abs, ray.get(codes)))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
