"""Edit and completion tasks from the history of a git repository: the file a commit found is the prompt.

edit: the file as it was, and the commit's own subject as the wish. complete: the file as it became, up to where the
change begins. Of each file its newest change, of each commit one file, so that prompts differ and a suite is a
function of the checked-out commit.
Knows git's plumbing and no tokenizer.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass

from longgraft.config import GraftError
from longgraft.eval.fitting import asked
from longgraft.eval.git import git
from longgraft.eval.suite_files import SAMPLES, Item
from longgraft.eval.traces import lines_of

SUFFIXES = tuple(".py .c .h .cc .cpp .hpp .cu .rs .go .java .js .ts .tsx .rb .sh .md .rst .toml .yaml .yml".split())
MOST_COMMITS, MOST_EDITS, MOST_BYTES = 2000, 300, 1 << 20
# A completion shows at least so many lines of its file.
FEWEST_LINES = 5


@dataclass(frozen=True, slots=True)
class Edit:
    """One file of one commit, as it was and as it became."""

    name: str
    path: str
    subject: str
    before: str
    after: str


def history(where: str | None) -> tuple[str, dict[str, list[Item]]]:
    """Return the parts `edit` and `complete`, and the commit they were made of; raises `GraftError`."""
    if where is None:
        digest, edits = "", list(_sample())
    else:
        digest = git(where, "rev-parse", "--short=7", "HEAD").decode().strip()
        edits = list(_edits(where))
    completions = [item for edit in edits if (item := _complete(edit))]
    if not edits or not completions:
        raise GraftError(f"{where}: its history holds no change to a text file ({', '.join(SUFFIXES[:6])} ...)")
    return digest, {"edit": [_edit(edit) for edit in edits], "complete": completions}


def _edit(edit: Edit) -> Item:
    text = (
        f"Here is the file {edit.path}:\n```\n{edit.before}```\nMake this change: {edit.subject}\n"
        "Give the whole changed file back, without comments on it."
    )
    return Item(edit.name, lambda _: asked(text))


def _complete(edit: Edit) -> Item | None:
    """Return the completion of the first lines that changed, None where too little stands before them."""
    before, after = edit.before.splitlines(keepends=True), edit.after.splitlines(keepends=True)
    same = next((n for n, (old, new) in enumerate(zip(before, after)) if old != new), min(len(before), len(after)))
    if same < FEWEST_LINES or same == len(after):
        return None
    head = "".join(after[:same])
    text = f"Go on with the file {edit.path} where it stops. Give what follows and nothing else.\n```\n{head}"
    return Item(edit.name, lambda _: asked(text))


def _sample() -> Iterator[Edit]:
    for number, line in lines_of(str(SAMPLES / "edits.jsonl"), "suite file"):
        row = json.loads(line)
        yield Edit(f"edits:{number}", row["path"], row["subject"], row["before"], row["after"])


def _edits(where: str) -> Iterator[Edit]:
    """Yield edits, newest first."""
    changes = list(_changes(where))
    texts = _blobs(where, [blob for change in changes for blob in change[3:]])
    for commit, subject, path, old, new in changes:
        before, after = texts.get(old), texts.get(new)
        if before and after and before != after:
            yield Edit(f"{commit[:10]}:{path}", path, subject, before, after)


def _changes(where: str) -> Iterator[tuple[str, str, str, str, str]]:
    """Yield (commit, subject, path, blob before, blob after) of the first new file of each commit that qualifies."""
    form = "--format=%x01%H%x02%s%x02"
    options = ("--no-merges", "--no-renames", "--diff-filter=M", "--raw", "--no-abbrev", "-z", f"-n{MOST_COMMITS}")
    log = git(where, "log", form, *options).decode("utf-8", "replace")
    seen: set[str] = set()
    for entry in log.split("\x01")[1:]:
        commit, subject, raw = entry.split("\x02", 2)
        fields = raw.strip("\x00\n").split("\x00")
        for about, path in zip(fields[::2], fields[1::2]):
            modes = about.split()
            # Both sides ordinary files, neither links nor submodules.
            is_file = len(modes) == 5 and {modes[0][1:4], modes[1][:3]} == {"100"}
            if is_file and path.endswith(SUFFIXES) and path not in seen:
                yield commit, subject, path, modes[2], modes[3]
                seen.add(path)
                break
        if len(seen) == MOST_EDITS:
            return


def _blobs(where: str, names: list[str]) -> dict[str, str]:
    """Return the texts of blobs, without those that are too large or no UTF-8."""
    out = git(where, "cat-file", "--batch", stdin="".join(f"{name}\n" for name in names).encode())
    texts, at = {}, 0
    while at < len(out):
        end = out.index(b"\n", at)
        name, *kind = out[at:end].decode().split()
        at = end + 1
        if len(kind) < 2 or kind[0] != "blob":  # `missing`, in a shallow or partial clone
            continue
        size = int(kind[1])
        data, at = out[at : at + size], at + size + 1
        if size <= MOST_BYTES:
            try:
                texts[name] = data.decode("utf-8")
            except UnicodeDecodeError:
                continue
    return texts
