"""Which transport a run takes on two hosts, told as JSON: `python -m tests.e2e.hosts FOLDER SHARED`.

Two Ray nodes on one machine. The second is in a mount namespace of its own, where FOLDER is another file
system, as on another host, and SHARED is the same. Ranks are placed on the first, the engine on the second.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from megatron_tree import cluster
from megatron_tree.config import EngineConfig
from megatron_tree.placement import place
from megatron_tree.publishing import with_transport
from tests.e2e.nodes import Site, config

OTHER = "127.0.0.3"


def other_host(address: str, folder: str) -> subprocess.Popen[bytes]:
    ray = Path(sys.executable).with_name("ray")
    start = f"{ray} start --address={address} --node-ip-address={OTHER} --num-cpus=1 --num-gpus=1 --block"
    apart = ["unshare", "--mount", "sh", "-c", f"mount -t tmpfs none {folder} && exec {start}"]
    return subprocess.Popen(apart, stdout=sys.stderr, start_new_session=True)


def chosen(places: cluster.Places, engine: EngineConfig) -> str:
    said: list[str] = []
    try:
        engine = with_transport(engine, places, said.append)
    except ValueError as error:
        return str(error)
    return "; ".join([engine.transport, *said])


def told(folder: str, shared: str) -> dict[str, Any]:
    deadline = time.monotonic() + 60
    while not any(node.host == OTHER for node in cluster.nodes()):
        assert time.monotonic() < deadline, "the second node does not join"
        time.sleep(0.2)
    settings = config()
    places = cluster.Places(place(settings, cluster.nodes()), settings.train.parallel.layout)
    hosts = [places.rank(0).node.host, places.engine(0).node.host]

    def case(transport: str, image_dir: str) -> str:
        changes = {"transport": transport, "image_dir": image_dir}
        return chosen(places, settings.engine.model_copy(update=changes))

    return {
        "hosts": hosts,
        "blind": places.blind(folder),
        "left": os.listdir(folder),
        "auto": case("auto", folder),
        "shm": case("shm", folder),
        "stream": case("stream", folder),
        "auto, shared": case("auto", shared),
        "no folder": case("auto", f"{folder}/none"),
    }


def main() -> None:
    folder, shared = sys.argv[1:]
    site = Site()
    site.add("127.0.0.2", 2)
    other = other_host(site.address, folder)
    try:
        with cluster.running_ray(site.address):
            print(json.dumps(told(folder, shared)))
    finally:
        os.killpg(other.pid, signal.SIGTERM)
        other.wait()
        site.close()


if __name__ == "__main__":
    main()
