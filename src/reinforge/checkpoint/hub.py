"""A run on the hub: one repository with its newest checkpoint and its record, so that another
machine goes on where this one ended.

Every checkpoint is one commit, which also takes the one before it away. Whoever reads the
repository finds a whole checkpoint, whatever becomes of the machine that pushes.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from reinforge.checkpoint.files import STEP
from reinforge.core.errors import InputError
from reinforge.core.hub_trouble import hub_error, hub_token, is_temporary

WHERE = "run.hub.repo"
CHECKPOINTS = "checkpoints"
PART = ".from-hub"  # in the run directory, while a checkpoint is fetched
# what a run needs besides a checkpoint to go on as if it had never moved
LOGS = ("metrics.jsonl", "events.jsonl", "samples.jsonl", "groups.jsonl", "anchors.jsonl")
RECORD = ("config.json", "versions.json", "prediction.json", "summary.json", "report.html")
COMPUTED = (
    "reference.safetensors",
    "teacher.safetensors",
)  # said of all rows before the first step
FOLDERS = ("initial", "tokenizer")  # what a Python program gave as objects
CARD = """---
library_name: reinforge
tags: [reinforge, checkpoint]
---

The newest checkpoint and the record of a run of reinforge. The same configuration with
`run.hub: {repo: REPO}` goes on with it, in an empty directory too.
"""


class HubRepository:
    """The repository of a run. `continue_from_hub` (build/hub_run.py) asks what is there, and
    `HubSink` pushes.
    """

    def __init__(self, repo: str, *, private: bool = True):
        from huggingface_hub import HfApi

        self.repo = repo
        self.private = private
        self.api = HfApi(token=hub_token(WHERE))

    def create(self) -> None:
        """Makes the repository, unless it is there."""
        self._asked(self.api.create_repo, self.repo, private=self.private, exist_ok=True)

    def steps(self) -> list[int]:
        """The steps of the checkpoints that are there, the newest last."""
        files = self._asked(self.api.list_repo_files, self.repo)
        names = {Path(file).parts[1] for file in files if file.startswith(f"{CHECKPOINTS}/")}
        return sorted(int(found[1]) for name in names if (found := STEP.fullmatch(name)))

    def fetch(self, step: int, folder: Path) -> None:
        """Downloads the checkpoint and the record into an empty folder."""
        from huggingface_hub import snapshot_download

        self._asked(
            snapshot_download,
            self.repo,
            token=self.api.token,
            local_dir=folder,
            ignore_patterns=[".gitattributes", "README.md"],
        )
        shutil.rmtree(folder / ".cache", ignore_errors=True)
        if not (folder / CHECKPOINTS / f"step-{step:08d}").is_dir():
            raise InputError(
                f"the checkpoint of step {step} went while it was fetched from {self.repo}.",
                where=WHERE,
                fix="Another machine goes on with this run. End it there, and start again.",
            )

    def push(self, checkpoint: Path, run_dir: Path) -> None:
        """The checkpoint and the record in one commit, without the checkpoint before it."""
        from huggingface_hub import CommitOperationAdd, CommitOperationDelete

        target = f"{CHECKPOINTS}/{checkpoint.name}"
        added = {f"{target}/{path.name}": path for path in sorted(checkpoint.iterdir())}
        gone = [f"step-{step:08d}" for step in self.steps()]
        self._commit(
            [
                *(CommitOperationAdd(name, str(path)) for name, path in added.items()),
                *(CommitOperationAdd(name, value) for name, value in self._record(run_dir)),
                *(
                    CommitOperationDelete(f"{CHECKPOINTS}/{name}/", is_folder=True)
                    for name in gone
                    if name != checkpoint.name
                ),
            ],
            f"Checkpoint {checkpoint.name}",
        )

    def push_record(self, run_dir: Path) -> None:
        """The record alone: the run has ended."""
        from huggingface_hub import CommitOperationAdd

        record = [CommitOperationAdd(name, value) for name, value in self._record(run_dir)]
        self._commit(record, "The end of the run")

    def _record(self, run_dir: Path) -> Iterator[tuple[str, bytes | str]]:
        """What goes along with a checkpoint, by its name there. Logs grow while they are read, so
        that they are taken as they are now.
        """
        yield "README.md", CARD.replace("REPO", self.repo).encode()
        for name in (*LOGS, *RECORD, *(path.name for path in run_dir.glob("*.id"))):
            if (run_dir / name).is_file():
                yield name, (run_dir / name).read_bytes()
        for name in COMPUTED:
            if (run_dir / name).is_file():
                yield name, str(run_dir / name)
        for folder in FOLDERS:
            for path in sorted((run_dir / folder).rglob("*")):
                if path.is_file():
                    yield path.relative_to(run_dir).as_posix(), str(path)

    def _commit(self, operations: list[Any], message: str) -> None:
        self._asked(self.api.create_commit, self.repo, operations, commit_message=message)

    def _asked(self, ask: Any, *args: Any, **kwargs: Any) -> Any:
        """What the hub answers; what it says no to names the repository and what to do."""
        from huggingface_hub.errors import HFValidationError

        try:
            return ask(*args, **kwargs)
        except (OSError, RuntimeError, ValueError, HFValidationError) as error:
            raise hub_error(
                error,
                self.repo,
                f"{WHERE} {self.repo}",
                else_fix="Check the name, the network and your token.",
            ) from error


def take_over(fetched: Path, run_dir: Path) -> None:
    """Moves what was fetched into the run directory, the checkpoint last: a run that is killed in
    between fetches it again.
    """
    for path in sorted(fetched.iterdir()):
        if path.name == CHECKPOINTS:
            continue
        target = run_dir / path.name
        if target.is_dir():
            shutil.rmtree(target)
        os.replace(path, target)
    (run_dir / CHECKPOINTS).mkdir(exist_ok=True)
    for path in (fetched / CHECKPOINTS).iterdir():
        target = run_dir / CHECKPOINTS / path.name
        if target.exists():
            shutil.rmtree(target)
        os.rename(path, target)
    shutil.rmtree(fetched)


class HubSink:
    """A `Sink` that pushes checkpoints, and at the end the record. The run makes it where
    `run.hub` is set; it works in a thread of its own.

    A push that fails for now (the hub is busy, the network gone) is made up for by the next one:
    that holds everything. Only where the last one failed the run hears of it.
    """

    name = "hub"

    def __init__(self, run_dir: Path, repository: HubRepository):
        self.run_dir = run_dir
        self.repository = repository
        self.missed: InputError | None = None  # why the newest push failed

    def open(self) -> None:
        """The repository was made before the run began."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Nothing: the log of the metrics goes along with every checkpoint."""

    def table(self, table: Any) -> None:
        """Nothing: samples.jsonl goes along with every checkpoint."""

    def keep(self, name: str, paths: Sequence[Path]) -> None:
        try:
            if name == "checkpoint":
                self.repository.push(paths[0], self.run_dir)
            else:
                self.repository.push_record(self.run_dir)
        except InputError as error:
            if not is_temporary(error):
                raise
            self.missed = error
        else:
            if name == "checkpoint":
                self.missed = None

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Nothing: the summary is part of the record."""

    def close(self) -> None:
        if self.missed is not None:
            raise self.missed
