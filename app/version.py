"""Manta's own version."""

from importlib.metadata import PackageNotFoundError, version


def manta_version() -> str:
    """Of the installed package; `0+source` where Manta runs from a folder that was not installed."""
    try:
        return version("manta-serve")
    except PackageNotFoundError:
        return "0+source"
