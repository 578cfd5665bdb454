"""The walls of DESIGN section 3: the contracts of pyproject.toml hold, bite, and the pure layers import
nothing heavy."""

from __future__ import annotations

import ast
import pkgutil
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import megatron_tree

ROOT = Path(__file__).parents[2]
PURE = ("config", "types", "layout", "metrics", "data", "algo", "rollout")  # layers 0 and 1
ALSO_LIGHT = (
    *("reshard.names", "reshard.plan", "reshard.image", "reshard.publish"),
    *("report", "evaluate", "doctor", "planner", "runfolder"),
)


def lint_imports(folder: Path) -> subprocess.CompletedProcess[str]:
    code = "import sys; from importlinter.cli import lint_imports; sys.exit(lint_imports(no_cache=True))"
    return subprocess.run(
        [sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, timeout=120, check=False
    )


def modules(*prefixes: str) -> list[str]:
    """Every module of the package that is one of the prefixes or below it."""
    found = [module.name for module in pkgutil.walk_packages(megatron_tree.__path__, "megatron_tree.")]
    wanted = tuple(f"megatron_tree.{prefix}" for prefix in prefixes)
    return [name for name in found if name in wanted or name.startswith(tuple(f"{w}." for w in wanted))]


def test_contracts_hold():
    done = lint_imports(ROOT)
    assert done.returncode == 0, done.stdout
    assert "0 broken" in done.stdout


BREACHES = {
    "algo/breach.py": ("import ray", "only cluster imports ray"),
    "rollout/breach.py": ("from megatron_tree.engine import engine", "imports go one way"),
    "train/breach.py": ("from megatron_tree.engine import engine", "imports go one way"),
    "engine/breach.py": ("from megatron.core import parallel_state", "megatron lives in train"),
    "reshard/breach.py": ("import vllm.config", "vllm lives in engine and reshard.receive"),
}


@pytest.mark.parametrize(("file", "breach"), BREACHES.items())
def test_contracts_bite_inside_functions_too(tmp_path: Path, file: str, breach: tuple[str, str]):
    statement, contract = breach
    shutil.copytree(ROOT / "megatron_tree", tmp_path / "megatron_tree")
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    (tmp_path / "megatron_tree" / file).write_text(f"def late():\n    {statement}\n")
    done = lint_imports(tmp_path)
    assert done.returncode == 1
    assert f"{contract} BROKEN" in done.stdout
    assert done.stdout.count("BROKEN") == 1


def test_pure_and_light_modules_import_without_ray_vllm_and_megatron():
    names = modules(*PURE, *ALSO_LIGHT)
    assert {
        "megatron_tree.algo.loss",
        "megatron_tree.rollout.grow",
        "megatron_tree.rollout.tools.http",
    } <= set(names)
    code = (
        "import importlib, sys\n"
        "sys.modules.update(dict.fromkeys(('ray', 'vllm', 'megatron')))\n"
        "for name in sys.argv[1:]: importlib.import_module(name)\n"
        "print(len(sys.argv) - 1)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *names],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{len(names)}\n"


def test_pure_modules_know_no_process_group():
    """The contracts see only the first part of an external name, so `torch.distributed` is looked for
    here."""
    for name in modules(*PURE):
        path = (ROOT / name.replace(".", "/")).with_suffix(".py")
        if path.exists():
            assert not {m for m in imported(path) if m.startswith("torch.distributed")}, name


def imported(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def test_every_init_is_empty():
    packages = [path for path in (ROOT / "megatron_tree").rglob("__init__.py") if path.stat().st_size]
    assert packages == []
