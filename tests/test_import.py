"""The wheel, and its import with numpy and attrs alone: a bare ``pip install pdcore``."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import subprocess
import sys
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BARE = ("numpy", "numpy.libs", "attr", "attrs")
IMPORT_AND_REPORT = """
import json, sys, time
sys.path.insert(0, sys.argv[1])
start = time.perf_counter()
import pdcore, pdcore.scheduler
seconds = time.perf_counter() - start
tops = sorted({name.partition(".")[0] for name in sys.modules})
print(json.dumps({"seconds": seconds, "modules": tops, "file": pdcore.__file__}))
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from the working tree."""
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=120)
    (path,) = folder.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def site(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of packages with the unpacked wheel, numpy and attrs, and nothing else."""
    folder = tmp_path_factory.mktemp("site")
    zipfile.ZipFile(wheel).extractall(folder)
    spec = importlib.util.find_spec("numpy")
    assert spec is not None
    assert spec.origin is not None
    installed = Path(spec.origin).parents[1]
    for name in BARE:
        if (installed / name).exists():
            (folder / name).symlink_to(installed / name)
    return folder


def _run_bare(site: Path, code: str) -> subprocess.CompletedProcess[str]:
    """Run code with the standard library and ``site``: -I and -S hide everything else."""
    command = [sys.executable, "-I", "-S", "-c", code, str(site)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def test_wheel_holds_the_whole_package(wheel: Path) -> None:
    """Every source file, the typing marker and the licence are in the wheel."""
    names = set(zipfile.ZipFile(wheel).namelist())
    sources = {str(p.relative_to(ROOT / "src")) for p in (ROOT / "src/pdcore").rglob("*.py")}
    assert sources - names == set()
    assert "pdcore/py.typed" in names
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_wheel_requires_only_numpy_and_attrs(wheel: Path) -> None:
    """Without an extra, pip brings two packages."""
    archive = zipfile.ZipFile(wheel)
    (name,) = (n for n in archive.namelist() if n.endswith("dist-info/METADATA"))
    metadata = Parser().parsestr(archive.read(name).decode())
    required = [r for r in metadata.get_all("Requires-Dist", []) if "extra ==" not in r]
    assert sorted(r.partition(">")[0] for r in required) == ["attrs", "numpy"]


def test_import_needs_only_numpy_and_attrs(site: Path) -> None:
    """``pdcore`` and ``pdcore.scheduler`` load nothing that is neither standard nor required."""
    done = _run_bare(site, IMPORT_AND_REPORT)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["file"].startswith(str(site))
    foreign = set(report["modules"]) - set(sys.stdlib_module_names)
    assert foreign <= {"__main__", "pdcore", "numpy", "attr", "attrs"}
    print(f"imported in {report['seconds']:.3f} s")
    assert report["seconds"] < 5, "a bare import must not do work"


def test_import_loads_no_heavy_module_that_is_installed() -> None:
    """With every extra installed, the import still leaves torch, transformers and nixl alone."""
    code = "import sys, pdcore, pdcore.scheduler; print('\\n'.join(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    heavy = {"torch", "transformers", "nixl", "hypothesis", "pytest", "safetensors", "gguf"}
    assert heavy.isdisjoint(done.stdout.split())


def test_version_is_the_wheels(wheel: Path) -> None:
    """The wheel's name carries the version that the installed package reports."""
    assert wheel.name.split("-")[1] == importlib.metadata.version("pdcore")
