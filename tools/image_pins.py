"""Pins of the GPU image: what pip installs as wheels, what the image builds from source.

`requirements/gpu.txt` holds every wheel of `megatron-tree[gpu]` with its version,
`requirements/gpu-source.txt` what has no wheel. The check asks pip's dry run for each pin's wheel, for
Python 3.12 on x86-64 Linux, and then follows all requirements, of the sources too, with that Python's markers
(pip itself evaluates markers for the Python it runs under): each must be met by a pin, and each pin must be
required. So the image can install with `--no-deps`. Use: `make check-image-pins`; `make lock-image` resolves
anew and writes gpu.txt.

Left out: that the sources compile, which needs the CUDA compiler.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parent.parent
WHEELS = ROOT / "requirements" / "gpu.txt"
SOURCES = ROOT / "requirements" / "gpu-source.txt"
PYTHON = "3.12"
NEWEST_GLIBC = 39  # minor version, of Ubuntu 24.04
MARKERS = {
    "python_version": PYTHON,
    "python_full_version": f"{PYTHON}.3",
    "implementation_name": "cpython",
    "platform_python_implementation": "CPython",
    "sys_platform": "linux",
    "platform_system": "Linux",
    "platform_machine": "x86_64",
    "os_name": "posix",
}
# A source's requirements are known only once it is built: as its own setup.py lists them.
SOURCE_REQUIRES = {
    "transformer-engine-torch": (
        "torch>=2.1",
        "einops",
        "onnxscript",
        "onnx",
        "packaging",
        "pydantic",
        "nvdlfw-inspect",
        "nvidia-cudnn-frontend>=1.29.0",
        "transformer-engine-cu13==2.20.2",
    ),
    "apex": ("packaging",),
}
# What the sources' builds need; the bounds are vLLM's on Python 3.12, which pip under 3.11 does not see.
BUILD = ("setuptools>=78.1.1,<81", "wheel", "ninja")
HEADER = """\
# Every wheel of the GPU image with its version: the complete closure of megatron-tree[gpu], of what
# requirements/gpu-source.txt needs, and of the tools that build it, for Python 3.12 on x86-64 Linux.
# Written by `make lock-image` (tools/image_pins.py), checked by `make check-image-pins`; do not edit.
"""


@dataclass(frozen=True, slots=True)
class Wheel:
    """What pip says of one package."""

    version: str
    python: str  # Requires-Python
    requires: tuple[str, ...]


def wanted() -> list[str]:
    """Requirements of the image: the package's own, its extra `gpu`, and those of the sources."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    own = [*project["dependencies"], *project["optional-dependencies"]["gpu"], *BUILD]
    return [*own, *(line for name in sources() for line in SOURCE_REQUIRES[name])]


def pins(path: Path) -> list[Requirement]:
    lines = (line.partition("#")[0].strip() for line in path.read_text(encoding="utf-8").splitlines())
    return [Requirement(line) for line in lines if line]


def sources() -> dict[str, str]:
    """Name -> exact version or commit. ValueError for a pin that could move."""
    found = {}
    for pin in pins(SOURCES):
        name = canonicalize_name(pin.name)
        exact = re.fullmatch(r"==[\w.]+", str(pin.specifier))
        commit = re.fullmatch(r"git\+https://\S+@[0-9a-f]{40}", pin.url or "")
        if not (exact or commit):
            raise ValueError(f"{SOURCES}: {name}: must be name==version or a commit of 40 digits, got {pin}")
        if name not in SOURCE_REQUIRES:
            raise ValueError(f"{SOURCES}: {name}: SOURCE_REQUIRES must list what it requires, got nothing")
        found[name] = pin.url or str(pin.specifier).removeprefix("==")
    return found


def dry_run(requirements: Iterable[str], *options: str) -> dict[str, Wheel]:
    """What pip would install. ValueError with pip's last error line."""
    tags = [f"manylinux_2_{minor}_x86_64" for minor in range(NEWEST_GLIBC, 4, -1)]
    tags += ["manylinux2014_x86_64", "manylinux2010_x86_64", "manylinux1_x86_64", "linux_x86_64"]
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", "install"]
        # Requires-Python is checked below: pip compares it with the Python it runs under.
        command += ["--dry-run", "--ignore-installed", "--ignore-requires-python", "--only-binary=:all:"]
        command += [f"--python-version={PYTHON}", *(f"--platform={tag}" for tag in tags), *options]
        command += [f"--target={folder}/none", f"--report={report}", *requirements]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
            raise ValueError(f"pip: {(errors or done.stderr.splitlines() or ['failed'])[-1]}")
        installed = json.loads(report.read_text(encoding="utf-8"))["install"]
    return {canonicalize_name(item["metadata"]["name"]): _wheel(item) for item in installed}


def _wheel(item: dict) -> Wheel:
    about = item["metadata"]
    return Wheel(
        version=about["version"],
        python=about.get("requires_python", ""),
        requires=tuple(about.get("requires_dist", ())),
    )


def closure(
    wheels: dict[str, Wheel], roots: Iterable[str], built: dict[str, str]
) -> tuple[set[str], list[str]]:
    """(packages that are reached, faults): requirements that no pin meets, wheels of another Python."""
    reached: set[str] = set()
    faults: list[str] = []
    seen: set[tuple[str, str]] = set()
    todo = [(Requirement(line), "the image", "") for line in roots]
    while todo:
        requirement, wanted_by, extra = todo.pop()
        name = canonicalize_name(requirement.name)
        if requirement.marker is not None and not requirement.marker.evaluate(MARKERS | {"extra": extra}):
            continue
        if name in built:
            continue
        wheel = wheels.get(name)
        if wheel is None:
            faults.append(f"{requirement} of {wanted_by} is not pinned")
            continue
        if not requirement.specifier.contains(Version(wheel.version), prereleases=True):
            faults.append(f"{requirement} of {wanted_by} is pinned to {wheel.version}")
        if name not in reached and not SpecifierSet(wheel.python).contains(MARKERS["python_full_version"]):
            faults.append(f"{name} {wheel.version} needs Python {wheel.python}, the image has {PYTHON}")
        reached.add(name)
        for wanted_extra in {"", *requirement.extras}:
            if (name, wanted_extra) not in seen:
                seen.add((name, wanted_extra))
                todo += [(Requirement(line), name, wanted_extra) for line in wheel.requires]
    return reached, list(dict.fromkeys(faults))  # an extra is followed after its package: the same again


def check() -> list[str]:
    """Faults of the pins as they are."""
    pinned = {canonicalize_name(pin.name): str(pin.specifier) for pin in pins(WHEELS)}
    wheels = dry_run(["--requirement", str(WHEELS)], "--no-deps")
    reached, faults = closure(wheels, wanted(), sources())
    faults += [f"{name} is pinned, but nothing requires it" for name in sorted(pinned.keys() - reached)]
    return faults


def write() -> list[str]:
    """Resolves anew; the file is written only when the result is whole."""
    wheels = dry_run(wanted())
    reached, faults = closure(wheels, wanted(), sources())
    if not faults:
        lines = (f"{name}=={wheels[name].version}\n" for name in sorted(reached))
        WHEELS.write_text(HEADER + "".join(lines), encoding="utf-8")
    return faults


def show() -> None:
    found = pins(WHEELS)
    print(f"{WHEELS.relative_to(ROOT)}: {len(found)} wheels for Python {PYTHON}, x86-64 Linux, among them")
    named = {canonicalize_name(Requirement(line).name) for line in wanted()}
    for pin in found:
        if canonicalize_name(pin.name) in named:
            print(f"  {pin}")
    print(f"{SOURCES.relative_to(ROOT)}: built from source")
    for name, at in sources().items():
        print(f"  {name} {at}")


def main() -> int:
    parser = argparse.ArgumentParser(description="Checks, or writes, the pins of the GPU image.")
    parser.add_argument("--write", action="store_true", help="resolve anew and write requirements/gpu.txt")
    arguments = parser.parse_args()
    try:
        faults = write() if arguments.write else check()
    except ValueError as error:
        faults = [str(error)]
    if faults:
        print(*faults, sep="\n", file=sys.stderr)
        return 1
    show()
    return 0


if __name__ == "__main__":
    sys.exit(main())
