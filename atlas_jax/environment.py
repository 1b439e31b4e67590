"""Where and with what a figure was measured."""

import datetime
import importlib.metadata
import os
import pathlib
import platform
import subprocess
from typing import Any

import jax

_PACKAGES = ("jax", "jaxlib", "flax", "numpy")


def describe() -> dict[str, Any]:
  """Hardware, versions, date and git revision, ready for JSON."""
  return {
    "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    "processor": _processor(),
    "cores": len(os.sched_getaffinity(0))
    if hasattr(os, "sched_getaffinity")
    else os.cpu_count(),
    "memory_bytes": _memory(),
    "load_before": os.getloadavg()[0],
    "system": platform.platform(),
    "backend": jax.default_backend(),
    "device": jax.devices()[0].device_kind,
    "python": platform.python_version(),
    "packages": {name: importlib.metadata.version(name) for name in _PACKAGES},
    "revision": _revision(),
  }


def sentence(environment: dict[str, Any]) -> str:
  """The same in one line for a report."""
  packages = ", ".join(f"{k} {v}" for k, v in environment["packages"].items())
  revision = environment["revision"] or "unknown"
  return (
    f"{environment['date'][:10]}; {environment['processor']}, "
    f"{environment['cores']} cores, {environment['memory_bytes'] / 2**30:.0f} "
    f"GiB, load {environment['load_before']:.1f} at the start; backend "
    f"{environment['backend']}; Python {environment['python']}, {packages}; "
    f"revision {revision}."
  )


def _processor() -> str:
  try:
    lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
  except OSError:
    lines = []
  for line in lines:
    if line.startswith("model name"):
      return line.split(":", 1)[1].strip()
  return platform.processor() or platform.machine()


def _memory() -> int:
  return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _revision() -> str | None:
  """The commit of the source, with a mark if the source differs from it."""
  command = ("git", "describe", "--always", "--dirty", "--abbrev=12")
  try:
    found = subprocess.run(
      command,
      cwd=pathlib.Path(__file__).parent,
      capture_output=True,
      text=True,
      check=True,
    )
  except (OSError, subprocess.CalledProcessError):
    return None
  return found.stdout.strip() or None
