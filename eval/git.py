"""What git says about a folder, through its own command. Knows no benchmark."""

from __future__ import annotations

import subprocess
from pathlib import Path

from longgraft.config import GraftError


def git(folder: Path | str, *arguments: str, stdin: bytes = b"") -> bytes:
    """Return what `git -C folder arguments` prints; raises `GraftError` where there is no git or no repository."""
    try:
        done = subprocess.run(["git", "-C", str(folder), *arguments], input=stdin, capture_output=True, check=False)
    except OSError as error:
        raise GraftError(f"git cannot be started ({error.strerror or error}): expected it on the PATH") from None
    if done.returncode:
        reason = done.stderr.decode("utf-8", "replace").strip().splitlines()[:1]
        raise GraftError(f"{folder}: git {arguments[0]} failed ({' '.join(reason) or done.returncode})")
    return done.stdout


def commit_of(folder: Path | str) -> str:
    """Return the first 12 digits of the checked-out commit, with `-changed` behind it where files differ from it."""
    name = git(folder, "rev-parse", "--short=12", "HEAD").decode().strip()
    return name + ("-changed" if git(folder, "status", "--porcelain", "--untracked-files=no") else "")
