"""What is shipped, what wins when names collide, and what must not be in a commit."""

import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def run_python(code: str, *, cwd: Path, pythonpath: Path) -> str:
    """Standard output of ``python -c code``, with one folder on PYTHONPATH after the current one."""
    result = subprocess.run(
        [sys.executable, "-c", code],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(pythonpath)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def wheel_names(tmp_path_factory: pytest.TempPathFactory) -> tuple[set[str], str]:
    """The file names in a wheel built from a copy of the sources, and the text of its entry points."""
    tmp_path = tmp_path_factory.mktemp("wheel")
    source = tmp_path / "source"
    # A copy, so that neither an old build folder gets into the wheel nor this build leaves one behind.
    for folder in ("oomb_accel", "kernels", "configs", "tests", "launch"):
        shutil.copytree(ROOT / folder, source / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--no-index",
        "--no-build-isolation",
    ]
    result = subprocess.run([*command, "--wheel-dir", str(tmp_path), str(source)], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    (path,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(path) as wheel:
        names = set(wheel.namelist())
        (entry_points,) = (name for name in names if name.endswith("entry_points.txt"))
        return names, wheel.read(entry_points).decode()


def shipped_files() -> set[str]:
    """The names that a wheel has to hold, apart from its metadata."""
    names = {"oomb_accel/py.typed", "oomb_accel/bench/reference.json", "oomb_kernels/py.typed"}
    names |= {str(path.relative_to(ROOT)) for path in (ROOT / "oomb_accel").rglob("*.py")}
    names |= {str(path.relative_to(ROOT / "kernels")) for path in (ROOT / "kernels").rglob("*.py")}
    for pattern in ("*.py", "*.yaml", "*.json"):
        names |= {
            f"oomb_accel/configs/{path.relative_to(ROOT / 'configs')}" for path in (ROOT / "configs").rglob(pattern)
        }
    return names


def test_wheel_holds_the_library_and_nothing_else(wheel_names: tuple[set[str], str]) -> None:
    names = {name for name in wheel_names[0] if ".dist-info/" not in name}
    missing, unexpected = shipped_files() - names, names - shipped_files()
    assert not missing, f"not in the wheel (a new package belongs into [tool.setuptools] packages): {sorted(missing)}"
    assert not unexpected, f"must not be in the wheel: {sorted(unexpected)}"


def test_wheel_holds_presets_and_licence(wheel_names: tuple[set[str], str]) -> None:
    names = wheel_names[0]
    assert any(re.fullmatch(r"oomb_accel/configs/.*\.yaml", name) for name in names)
    assert any(name.endswith("LICENSE") for name in names)


def test_wheel_has_the_command(wheel_names: tuple[set[str], str]) -> None:
    assert "oomb = oomb_accel.cli:main" in wheel_names[1]


def test_presets_are_found_through_the_package(tmp_path: Path) -> None:
    # Not from the root of the repository, where the folder itself would do.
    code = "from importlib.resources import files; print(*(f.name for f in files('{}').iterdir()))"
    found = run_python(code.format("oomb_accel.configs"), cwd=tmp_path, pythonpath=tmp_path).split()
    assert {path.name for path in (ROOT / "configs").glob("*.yaml")} <= set(found)


def test_another_package_called_kernels_wins(tmp_path: Path) -> None:
    # transformers imports a package of that name, and finding ours instead breaks it. An empty first entry of
    # sys.path is the current folder, which here holds our kernels/.
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "__init__.py").write_text("OWNER = 'someone else'\n", encoding="utf-8")
    code = "import sys, kernels, oomb_kernels; print(repr(sys.path[0]), kernels.OWNER, oomb_kernels.__file__)"
    printed = run_python(code, cwd=ROOT, pythonpath=tmp_path)
    assert printed.strip() == f"'' someone else {ROOT / 'kernels' / 'oomb_kernels' / '__init__.py'}"


def test_optional_packages_are_not_imported(tmp_path: Path) -> None:
    # Stand-ins that can be imported, so that the test means something where the real ones are not installed.
    for name in ("deepspeed", "trl"):
        (tmp_path / f"{name}.py").write_text("", encoding="utf-8")
    code = "import sys, oomb_accel; print(sorted({'deepspeed', 'trl'} & set(sys.modules)))"
    assert run_python(code, cwd=tmp_path, pythonpath=tmp_path).strip() == "[]"


# Put together here, so that this file does not break its own rule.
REGISTRY_HOSTS = tuple(
    ".".join(parts)
    for parts in (
        ("pypi", "org"),
        ("pythonhosted", "org"),
        ("download", "pytorch", "org"),
        ("npmjs", "org"),
        ("npmjs", "com"),
        ("anaconda", "org"),
        ("deb", "debian", "org"),
        ("pypi", "nvidia", "com"),
        ("crates", "io"),
    )
)
MACHINE_FOLDERS = ("home", "root", "work", "Users", "opt/notes", "opt/venvs")
MACHINE_PATH = re.compile(rf"(?<![\w.$}}*~-])/({'|'.join(MACHINE_FOLDERS)})/\w[^\s'\"`)]*")


def forbidden(text: str) -> list[str]:
    """Registry hosts and paths of one person's machine that a text names."""
    found = [host for host in REGISTRY_HOSTS if host in text]
    return found + [match.group() for match in MACHINE_PATH.finditer(text)]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("see the docs at /" + "home/me/project", ["/" + "home/me/project"]),
        ("cd /" + "work/main && ls", ["/" + "work/main"]),
        ("'/" + "root/.cache' is fine, /" + "root/x is not", ["/" + "root/x"]),
        ("from " + "https://py" + "pi.org/simple", ["py" + "pi.org"]),
        ("tests/work/main and $HOME/work/x and home/work", []),
    ],
)
def test_scan_finds_hosts_and_paths(text: str, found: list[str]) -> None:
    assert forbidden(text) == found


def test_no_file_names_a_registry_or_a_machine() -> None:
    # New files too, so that the test speaks before the commit.
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        listed = subprocess.run(command, cwd=ROOT, capture_output=True, check=True).stdout.decode()
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("not a git checkout")
    names = [name for name in listed.split("\0") if name and (ROOT / name).is_file()]
    assert names
    found = {
        name: hits for name in names if (hits := forbidden((ROOT / name).read_bytes().decode("utf-8", errors="ignore")))
    }
    assert not found
