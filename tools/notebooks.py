"""Makes notebooks/*.ipynb out of notebooks/*.py, with what their cells print.

A source is a Python file whose cells begin with `# %%`, or with `# %% [markdown]` and are comments
then. Editors open it as a notebook too, and its diffs can be read.

    python tools/notebooks.py              # runs all of them and writes the .ipynb files
    python tools/notebooks.py 1_first_rl_run
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parents[1] / "notebooks"
CELL = re.compile(r"^# %%( \[markdown\])?\n", re.MULTILINE)
SECONDS = 600  # for one cell


def sources() -> list[Path]:
    return sorted(FOLDER.glob("*.py"))


def notebook(source: Path) -> dict[str, Any]:
    """The notebook that a source describes, not run yet."""
    _, *parts = CELL.split(source.read_text(encoding="utf-8"))
    cells = [_cell(i, *pair) for i, pair in enumerate(zip(parts[::2], parts[1::2], strict=True))]
    language = {"name": "python", "file_extension": ".py", "mimetype": "text/x-python"}
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    return {
        "cells": cells,
        "metadata": {"kernelspec": kernel, "language_info": language},
        "nbformat": 4,
        "nbformat_minor": 5,
    }


def _cell(number: int, markdown: str | None, text: str) -> dict[str, Any]:
    found: dict[str, Any] = {"id": f"cell-{number}", "metadata": {}}
    if markdown:
        lines = [line.removeprefix("#").removeprefix(" ") for line in text.strip().split("\n")]
        return {**found, "cell_type": "markdown", "source": "\n".join(lines)}
    code: dict[str, Any] = {"cell_type": "code", "execution_count": None, "outputs": []}
    return {**found, **code, "source": text.strip()}


def executed(made: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The notebook after all of its cells ran, in `folder`."""
    import nbformat
    from nbclient import NotebookClient

    client = NotebookClient(
        nbformat.from_dict(made),
        timeout=SECONDS,
        kernel_name="python3",
        resources={"metadata": {"path": str(folder)}},
        record_timing=False,
        coalesce_streams=True,
    )
    return dict(client.execute())


def write(made: dict[str, Any], path: Path) -> None:
    """As Jupyter writes it."""
    import nbformat

    text = nbformat.writes(nbformat.from_dict(made))
    path.write_text(text.rstrip("\n") + "\n", encoding="utf-8")


def read(path: Path) -> dict[str, Any]:
    """A committed notebook, its texts in one piece."""
    import nbformat

    return json.loads(json.dumps(nbformat.read(path, as_version=4)))


def main(names: list[str]) -> None:
    unknown = set(names) - {source.stem for source in sources()}
    if unknown:
        raise SystemExit(f"no such notebook: {', '.join(sorted(unknown))}")
    for source in sources():
        if names and source.stem not in names:
            continue
        print(f"running {source.name}", flush=True)
        write(executed(notebook(source), FOLDER), source.with_suffix(".ipynb"))


if __name__ == "__main__":
    main(sys.argv[1:])
