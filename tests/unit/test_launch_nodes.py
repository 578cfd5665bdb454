"""The start-up scripts, for real: several Ray nodes on this machine, started as docker, Slurm and KubeRay
start them, a program that joins them, asked to stop, that finds all of them alive while it saves.

Stand-ins: docker, srun and scontrol, which run or note what they are given; the program, which is a driver
with one actor a node and does in three seconds what a step and a checkpoint take. Ray's processes need
minutes to start on a busy machine, hence `full`.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import yaml

ROOT = Path(__file__).parents[2]
LAUNCH = ROOT / "examples" / "launch"
START_S = 300
CONFIG = "examples/quickstart/config.yaml"  # any file

pytestmark = pytest.mark.full

PROGRAM = f"""#!{sys.executable}
import os, signal, sys, time, ray
from megatron_tree.cluster import running_ray

def note(line):
    with open(os.environ["NOTES"], "a") as file:
        file.write(line + "\\n")

class Engine:
    def ping(self):
        return ray.get_runtime_context().get_node_id()

stops = []
with running_ray():
    signal.signal(signal.SIGTERM, lambda *_: stops.append(note("SIGTERM")))
    nodes = sum(node["Alive"] for node in ray.nodes())
    actors = [ray.remote(Engine).options(num_cpus=1).remote() for _ in range(nodes)]
    homes = set(ray.get([actor.ping.remote() for actor in actors]))
    note(f"{{' '.join(sys.argv[1:])}} on {{len(homes)}} nodes")
    while not stops:
        time.sleep(0.1)
    time.sleep(3)
    ray.get([actor.ping.remote() for actor in actors])
    note("saved")
sys.exit(130)
"""
DOCKER = """#!/usr/bin/env bash
until [[ $1 == megatron-tree ]]; do shift; done
shift
exec "$@"
"""
SRUN = """#!/usr/bin/env bash
while [[ $1 == --* ]]; do
  [[ $1 != --nodes=* ]] || nodes=${1#*=}
  shift
done
for ((i = 0; i < nodes; i++)); do
  "$@" &
  pids+=($!)
done
trap 'kill -TERM "${pids[@]}"' TERM
until wait; do :; done
"""
SCONTROL = """#!/usr/bin/env bash
echo "scontrol $*" >> "$NOTES"
"""


class Site:
    """A machine with the stand-ins first on PATH; everything it started is gone when it closes."""

    def __init__(self, folder: Path) -> None:
        self.notes = folder / "notes"
        self._folder = folder
        self._started: list[subprocess.Popen[bytes]] = []
        for name, text in (
            ("megatron-tree", PROGRAM),
            ("docker", DOCKER),
            ("srun", SRUN),
            ("scontrol", SCONTROL),
        ):
            (folder / name).write_text(text)
            (folder / name).chmod(0o755)
        self.environment = os.environ | {
            "PATH": f"{folder}:{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "NOTES": str(self.notes),
            "RAY_TMPDIR": str(folder / "ray"),
            "RAY_AUTH_TOKEN": "0123456789abcdef" * 3,
            "MEGATRON_TREE_HEAD": f"127.0.0.1:{_free_port()}",
            "MEGATRON_TREE_DATA": str(folder),
            "MEGATRON_TREE_LOGS": str(folder / "logs"),
            "MEGATRON_TREE_JOIN_TIMEOUT_S": str(START_S),
            "MEGATRON_TREE_RAY_ARGS": "--num-cpus=1 --object-store-memory=100000000",
        }

    def start(self, *command: str | Path, **more: str) -> subprocess.Popen[bytes]:
        with (self._folder / f"{len(self._started)}.log").open("wb") as log:
            process = subprocess.Popen(
                [str(word) for word in command],
                cwd=ROOT,
                env=self.environment | more,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        self._started.append(process)
        return process

    def wait_for(self, line: str) -> list[str]:
        """The notes, once one of them holds `line`."""
        deadline = time.monotonic() + START_S
        while True:
            noted = self.notes.read_text().splitlines() if self.notes.exists() else []
            if any(line in one for one in noted):
                return noted
            assert time.monotonic() < deadline, f"{line!r} not in {noted}: {self.logs()}"
            assert any(process.poll() is None for process in self._started), self.logs()
            time.sleep(0.2)

    def logs(self) -> str:
        return "\n".join(path.read_text()[-3000:] for path in sorted(self._folder.glob("*.log")))

    def close(self) -> None:
        for process in self._started:
            family = [process, *_children(process.pid)]
            for member in family:
                member.kill()
            process.wait()


def _children(pid: int) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


@pytest.fixture
def site() -> Iterator[Site]:
    folder = Path(tempfile.mkdtemp(prefix="mt-", dir="/tmp"))  # short: Ray's sockets lie below it
    made = Site(folder)
    yield made
    made.close()
    shutil.rmtree(folder, ignore_errors=True)


def ended(site: Site, process: subprocess.Popen[bytes]) -> int:
    try:
        return process.wait(timeout=START_S)
    except subprocess.TimeoutExpired:
        pytest.fail(site.logs())


def test_docker(site: Site) -> None:
    """Head and two workers as containers. One worker is asked to go first: it stays until the program has
    saved. The head is asked twice, the program once."""
    start = LAUNCH / "docker" / "start.sh"
    nodes = {"MEGATRON_TREE_NODES": "3"}
    workers = [site.start(start, "worker", **nodes) for _ in range(2)]
    head = site.start(start, "head", CONFIG, "run.seed=1", **nodes)
    assert site.wait_for("nodes") == [f"train {CONFIG} run.seed=1 --resume on 3 nodes"]
    workers[0].send_signal(signal.SIGTERM)
    head.send_signal(signal.SIGTERM)
    site.wait_for("SIGTERM")
    head.send_signal(signal.SIGTERM)
    assert ended(site, head) == 130
    assert site.wait_for("saved")[1:] == ["SIGTERM", "saved"]
    assert ended(site, workers[0]) == 0
    workers[1].send_signal(signal.SIGTERM)  # else it waits for another head
    assert ended(site, workers[1]) == 0


def test_slurm(site: Site) -> None:
    """The warning before the time limit: save, stop, queue again."""
    script = shutil.copy(LAUNCH / "slurm" / "train.sbatch", site.notes.with_name("slurm_script"))
    job = {"SLURM_SUBMIT_DIR": str(ROOT), "SLURM_JOB_ID": "77", "SLURM_JOB_NUM_NODES": "2"}
    batch = site.start("bash", script, CONFIG, **job)
    assert site.wait_for("nodes") == [f"train {CONFIG} --resume on 2 nodes"]
    batch.send_signal(signal.SIGUSR1)
    assert ended(site, batch) == 130
    assert site.wait_for("saved")[1:] == ["SIGTERM", "saved", "scontrol requeue 77"]


def test_kuberay(site: Site) -> None:
    """Head and worker as KubeRay starts them, the manifest's entrypoint as a Ray job, and the preStop hooks
    of both pods at once."""
    job = yaml.safe_load((LAUNCH / "kuberay" / "rayjob.yaml").read_text())["spec"]
    cluster = job["rayClusterSpec"]
    head_pod, worker_pod = (
        group["template"]["spec"]["containers"][0]
        for group in (cluster["headGroupSpec"], cluster["workerGroupSpecs"][0])
    )
    variables = {variable["name"]: variable["value"] for variable in head_pod["env"]}
    address, dashboard = site.environment["MEGATRON_TREE_HEAD"], str(_free_port())
    variables |= {"RAY_AUTH_MODE": "token", "RAY_API_SERVER_ADDRESS": f"http://127.0.0.1:{dashboard}"}
    node = ["ray", "start", "--num-cpus=1", "--object-store-memory=100000000", "--block"]
    port = address.rpartition(":")[2]
    # one machine: ports that would be the same on every host
    agents = [f"--dashboard-agent-listen-port={_free_port()}" for _ in range(2)]
    site.start(*node, agents[0], "--head", f"--port={port}", f"--dashboard-port={dashboard}", **variables)
    _until(lambda: _answers(int(port)), "the head's port", site)
    site.start(*node, agents[1], f"--address={address}", **variables)
    counted = site.start(
        sys.executable, LAUNCH / "wait_for_nodes.py", "2", str(START_S), RAY_ADDRESS=address, **variables
    )
    assert ended(site, counted) == 0, site.logs()
    name, entrypoint = job["jobId"], job["entrypoint"]
    submit = ["ray", "job", "submit", "--no-wait", "--submission-id", name, "--", *entrypoint.split()]
    # as KubeRay's submitter, until the agent of the head's node is there
    _until(lambda: ended(site, site.start(*submit, **variables)) == 0, "ray job submit", site)
    noted = site.wait_for("nodes")
    assert noted == [f"{entrypoint.removeprefix('exec megatron-tree ')} on 2 nodes"]
    hooks = [pod["lifecycle"]["preStop"]["exec"]["command"] for pod in (head_pod, worker_pod)]
    stop, hold = (site.start(*hook, **variables) for hook in hooks)
    assert ended(site, stop) == 0, site.logs()
    assert site.wait_for("saved")[1:] == ["SIGTERM", "saved"]
    assert ended(site, hold) == 0


def _answers(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def _until(true: Callable[[], bool], what: str, site: Site) -> None:
    deadline = time.monotonic() + START_S
    while not true():
        assert time.monotonic() < deadline, f"{what}: {site.logs()}"
        time.sleep(0.5)
