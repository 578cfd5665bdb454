"""What launches the product where no cluster is at hand: the KubeRay manifest against Kubernetes' own schema,
the container that docker is asked for, the pins of the image."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import time
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from megatron_tree.config import load
from tools import image_pins
from tools.image_pins import Wheel, closure

ROOT = Path(__file__).parents[2]
LAUNCH = ROOT / "examples" / "launch"


@pytest.fixture(scope="module")
def manifest() -> dict[str, Any]:
    return yaml.safe_load((LAUNCH / "kuberay" / "rayjob.yaml").read_text(encoding="utf-8"))


def pods(manifest: dict[str, Any]) -> list[dict[str, Any]]:
    """Templates of head and workers."""
    cluster = manifest["spec"]["rayClusterSpec"]
    groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    return [group["template"] for group in groups]


def test_pod_templates_are_pods_of_kubernetes(manifest: dict[str, Any]) -> None:
    """Strict: an unknown field is an error."""
    for template in pods(manifest):
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "node"}, **template}
        kubernetes_validate.validate(pod, "1.37", strict=True)
        pod["spec"]["containers"][0]["volumeMount"] = []
        with pytest.raises(kubernetes_validate.ValidationError):
            kubernetes_validate.validate(pod, "1.37", strict=True)
        del pod["spec"]["containers"][0]["volumeMount"]


def test_pods_have_shared_memory_and_time_to_save(manifest: dict[str, Any]) -> None:
    """A medium other than memory, or a grace period below the wait for the program, would lose a run's end.
    Sizes: 28.4 GiB for two images of the 7B model; engines of one worker take no queue."""
    spec = manifest["spec"]
    assert spec["rayClusterSpec"]["rayVersion"] == version("ray")
    program, verb, config, resume = spec["entrypoint"].removeprefix("exec ").split()
    assert (program, verb, resume) == ("megatron-tree", "train", "--resume")
    assert load(ROOT / config).engine.image_dir == "/dev/shm"
    for template in pods(manifest):
        container = template["spec"]["containers"][0]
        mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
        volumes = {volume["name"]: volume for volume in template["spec"]["volumes"]}
        shared = volumes[mounts["/dev/shm"]]["emptyDir"]
        assert shared["medium"] == "Memory"
        assert int(shared["sizeLimit"].removesuffix("Gi")) >= 2 * 14.2 + 8
        environment = {variable["name"]: variable["value"] for variable in container["env"]}
        waits = int(environment["RAY_JOB_STOP_WAIT_TIME_S"])
        assert template["spec"]["terminationGracePeriodSeconds"] > waits
    # KubeRay's GetWorkerGroupDesiredReplicas keeps replicas between them: more would not come
    assert not {"minReplicas", "maxReplicas"} & spec["rayClusterSpec"]["workerGroupSpecs"][0].keys()
    head = pods(manifest)[0]["spec"]["containers"][0]
    assert head["lifecycle"]["preStop"]["exec"]["command"] == ["ray", "job", "stop", spec["jobId"]]


def test_docker_is_asked_for_shared_memory_and_a_graceful_stop(tmp_path: Path) -> None:
    """A docker that prints its arguments; values of secrets are no arguments."""
    docker = tmp_path / "docker"
    docker.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    docker.chmod(0o755)
    (tmp_path / "data").mkdir()
    environment = os.environ | {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "MEGATRON_TREE_DATA": "data",
        "MEGATRON_TREE_SHM": "48g",
        "MEGATRON_TREE_LOGS": str(tmp_path / "logs"),
        "MEGATRON_TREE_HEAD": "10.0.0.1:6379",
        "MEGATRON_TREE_DOCKER_ARGS": "--env WANDB_API_KEY --shm-size=1g",
        "RAY_AUTH_TOKEN": "secret",
    }
    start = [str(LAUNCH / "docker" / "start.sh"), "head", "a.yaml", "b.c=1"]
    done = subprocess.run(start, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    words = done.stdout.splitlines()
    options = dict(pairwise(words))
    volumes = [words[i + 1] for i, w in enumerate(words) if w == "--volume"]
    assert volumes == [f"{tmp_path}/data:/data", f"{tmp_path}/logs:/tmp/ray"]
    assert (tmp_path / "logs").stat().st_mode & 0o7777 == 0o1777  # another user's Ray writes there
    assert (options["--shm-size"], options["--gpus"], options["--network"]) == ("48g", "all", "host")
    assert options["--restart"].startswith("on-failure")
    assert int(options["--stop-timeout"]) >= 600
    assert [words[i + 1] for i, w in enumerate(words) if w == "--env"] == [
        "MEGATRON_TREE_HEAD",
        "RAY_AUTH_TOKEN",
        "WANDB_API_KEY",
    ]
    assert words[-6:-4] == ["--shm-size=1g", "megatron-tree"]
    assert words[-4:] == ["examples/launch/node.sh", "head", "a.yaml", "b.c=1"]
    assert "secret" not in done.stdout


REFUSED = {
    "docker/start.sh": "first argument: must be head or worker, got ''",
    "docker/start.sh heads": "first argument: must be head or worker, got 'heads'",
    "docker/start.sh head": "CONFIG: must be a config's path in the container, got ''",
    "MEGATRON_TREE_DATA=/none docker/start.sh worker": "MEGATRON_TREE_DATA: must be a folder, got '/none'",
    "node.sh": "first argument: must be head, worker or hold, got ''",
    "node.sh head": "CONFIG: must be a file, got ''",
    "node.sh head nowhere.yaml": "CONFIG: must be a file, got 'nowhere.yaml'",
    "node.sh worker": "MEGATRON_TREE_HEAD: must be set where there are several nodes, got ''",
    "MEGATRON_TREE_NODES=2 node.sh head a.yaml": (
        "MEGATRON_TREE_HEAD: must be set where there are several nodes, got ''"
    ),
    "MEGATRON_TREE_HEAD=10.0.0.1 node.sh worker": "MEGATRON_TREE_HEAD: must be host:port, got '10.0.0.1'",
    "MEGATRON_TREE_NODES=0 node.sh worker": "MEGATRON_TREE_NODES: must be a number from 1 up, got '0'",
    "MEGATRON_TREE_JOIN_TIMEOUT_S=10m node.sh worker": (
        "MEGATRON_TREE_JOIN_TIMEOUT_S: must be seconds, a whole number, got '10m'"
    ),
}


@pytest.mark.parametrize("command", REFUSED)
def test_scripts_refuse_before_they_start_anything(command: str) -> None:
    """Without docker and Ray on PATH."""
    words = command.split()
    variables = dict(word.split("=") for word in words if "=" in word)
    script, *arguments = (word for word in words if "=" not in word)
    environment = {"PATH": "/usr/bin:/bin", **variables}
    done = subprocess.run(
        [LAUNCH / script, *arguments], env=environment, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (2, f"{Path(script).name}: {REFUSED[command]}\n")


def test_a_worker_that_the_head_does_not_let_in_gives_up(tmp_path: Path) -> None:
    """A head that answers, as one with another token does, and a `ray` that ends at once. It is not as
    if the head had ended, which is status 0."""
    ray = tmp_path / "ray"
    ray.write_text("#!/bin/sh\nsleep 0.2\nexit 1\n")
    ray.chmod(0o755)
    with socket.create_server(("127.0.0.1", 0)) as head:
        address = f"127.0.0.1:{head.getsockname()[1]}"
        environment = {
            "PATH": f"{tmp_path}:/usr/bin:/bin",
            "MEGATRON_TREE_HEAD": address,
            "MEGATRON_TREE_JOIN_TIMEOUT_S": "1",
        }
        done = subprocess.run(
            [LAUNCH / "node.sh", "worker"], env=environment, capture_output=True, text=True, check=False
        )
    last = f"node.sh: no head at {address} let this node in within 1 s"
    assert (done.returncode, done.stderr.splitlines()[-1]) == (1, last)


@pytest.mark.parametrize(("ray", "status"), [("exec sleep 60", 130), ("exit 1", 1)])
def test_a_head_that_ends_while_it_waits_for_nodes(tmp_path: Path, ray: str, status: int) -> None:
    """Asked to stop it has nothing to save: as if it had. Without its Ray it has failed."""
    for name, does in (("ray", ray), ("python", f"touch {tmp_path}/waits\nexec sleep 60")):
        (tmp_path / name).write_text(f"#!/bin/sh\n{does}\n")
        (tmp_path / name).chmod(0o755)
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "MEGATRON_TREE_HEAD": address}
    command = [LAUNCH / "node.sh", "head", __file__]
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE) as head:
        if status == 130:
            while not (tmp_path / "waits").exists():
                time.sleep(0.05)
            head.terminate()
        assert head.wait(timeout=60) == status


def test_the_image_installs_what_is_locked() -> None:
    """Every requirement of the package's extra `gpu` has a pin that it allows; torch's CUDA is the base's."""
    pins = {pin.name: str(pin.specifier).removeprefix("==") for pin in image_pins.pins(image_pins.WHEELS)}
    wheels = {name: Wheel(at, "", ()) for name, at in pins.items()}
    assert closure(wheels, image_pins.wanted(), image_pins.sources())[1] == []
    base = re.search(r"^FROM nvidia/cuda:(\d+\.\d+)\.", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    assert base is not None
    assert pins["cuda-toolkit"].startswith(base[1] + ".")


def test_a_closure_by_hand() -> None:
    """a needs b below 2 on Python 3.12 only, and c for its extra; d needs another Python."""
    of_a = ('b<2; python_version >= "3.12"', 'c; extra == "more"', 'gone; os_name == "nt"')
    wheels = {
        "a": Wheel("1.0", ">=3.10", of_a),
        "b": Wheel("2.0", "", ()),
        "c": Wheel("1.0", "", ()),
        "d": Wheel("1.0", ">=3.13", ("e", "built")),
    }
    reached, faults = closure(wheels, ["a[more]==1.0"], ["built"])
    assert reached == {"a", "b", "c"}
    assert faults == ['b<2; python_version >= "3.12" of a is pinned to 2.0']
    assert closure(wheels, ["a"], [])[0] == {"a", "b"}
    assert closure(wheels, ["d"], ["built"])[1] == [
        "d 1.0 needs Python >=3.13, the image has 3.12",
        "e of d is not pinned",
    ]


@pytest.mark.parametrize(
    "pin",
    [
        "apex>=1.0",
        "apex",
        "apex==1.*",
        "apex @ git+https://example.org/apex.git@main",
        "apex @ git+https://example.org/apex.git@10417ac",
    ],
)
def test_a_source_that_could_move_is_refused(
    pin: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "source.txt").write_text(f"{pin}\n")
    monkeypatch.setattr(image_pins, "SOURCES", tmp_path / "source.txt")
    with pytest.raises(ValueError, match=r"apex: must be name==version or a commit of 40 digits, got apex"):
        image_pins.sources()
