"""Which versions of other packages this library was tested with."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from packaging.specifiers import SpecifierSet

RANGES = {
    "deepspeed": ">=0.19.5,<0.20",
    "transformers": ">=5.15,<6",
    "accelerate": ">=1.12,<2",
    "peft": ">=0.19,<1",
}
"""As in pyproject.toml. How gradients are reduced changed between releases of DeepSpeed, so others are refused."""


def check_versions(*packages: str) -> None:
    """Refuse packages outside the tested range.

    Raises:
        RuntimeError: naming the version that is installed, the range, and the command that installs one in it.
    """
    for package in packages:
        try:
            installed = version(package)
        except PackageNotFoundError:
            installed = "none"
        if installed == "none" or not SpecifierSet(RANGES[package]).contains(installed, prereleases=True):
            raise RuntimeError(
                f"oomb_accel needs another version of {package}.\n"
                f"  Installed: {installed}; tested range: {RANGES[package]}.\n"
                f"  Install one: pip install '{package}{RANGES[package]}'"
            )
