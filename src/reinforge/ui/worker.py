"""What the web app has done by another process, because it imports torch or runs other people's
code: looking at data, and trying rewards.

    python -m reinforge.ui.worker data < REQUEST

Reads one JSON object and prints one: the answer, or {"error"}.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from reinforge.check.rewards import score_text
from reinforge.config.data_source import is_config, source_config
from reinforge.config.load import load_config
from reinforge.config.rewards import RewardConfig
from reinforge.core.errors import InputError
from reinforge.data.bad_rows import by_reason
from reinforge.rewards.names import BUILTIN
from reinforge.watch.logs import read_json
from reinforge.watch.recorder import REWARD_FILES

MOST = 10_000  # rows that are looked at


def data(asked: Mapping[str, Any]) -> dict[str, Any]:
    """Rows as the trainer sees them."""
    from reinforge.offline.data_view import view_data

    loaded = source_config(asked["source"], model=asked.get("model"), where="source")
    whole = is_config(asked["source"])
    page, size = asked["page"], asked["size"]
    view = view_data(
        loaded.data,
        loaded.model if whole or asked.get("model") else None,
        rows=(page + 1) * size,
        most=MOST,
        algorithm=loaded.algorithm if whole else None,
        **({"new_tokens": loaded.rollout.max_new_tokens} if whole else {}),
    )
    found = asdict(view)
    lengths = sorted(found.pop("lengths"))
    at = {"min": 0.0, "median": 0.5, "p95": 0.95, "max": 1.0}
    return {
        **found,
        "page": page,
        "size": size,
        "shown": found["shown"][page * size :],
        "bad": list(by_reason(view.bad)),
        "bad_rows": len(view.bad),
        "long": [{"where": where, "tokens": n} for where, n in view.long[:size]],
        "long_rows": len(view.long),
        "lengths": {k: lengths[round(q * (len(lengths) - 1))] for k, q in at.items()}
        if lengths
        else {},
        "tokens": sum(lengths),
    }


def rewards(asked: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What each reward gives an answer."""
    path = Path(asked["config"])
    config = load_config(path)
    config = config.model_copy(update={"rewards": _found_again(config.rewards, path.parent)})
    tried, weights = score_text(config, asked["prompt"], asked["completion"], asked["columns"])
    raised = tried.raised or ""
    return [
        {
            "name": name,
            "value": tried.parts[name][0],
            "weight": weight,
            "error": raised if raised.startswith(f"{name} ") else None,
        }
        for name, weight in weights.items()
    ]


def _found_again(rewards: Sequence[RewardConfig], run_dir: Path) -> list[RewardConfig]:
    """With the files that a run has noted: their names say nothing where it was given functions, or
    was started in another folder.
    """
    files = read_json(run_dir / REWARD_FILES)
    found = []
    for i, cfg in enumerate(rewards):
        name = str(files.get(cfg.name, cfg.name))
        if ":" not in name and name not in BUILTIN and read_json(run_dir / "versions.json"):
            raise InputError(
                f"the run was given {name} as a Python function, and noted no file that has it.",
                where=f"rewards.{i}.name",
                fix="A function of a module can be tried, one of the program itself cannot. Or try"
                " a configuration that names it file.py:function.",
            )
        found.append(cfg.model_copy(update={"name": name}))
    return found


KINDS: dict[str, Callable[[Mapping[str, Any]], Any]] = {"data": data, "rewards": rewards}


def main() -> None:
    asked = json.loads(sys.stdin.read())
    try:
        found: Any = {"found": KINDS[sys.argv[1]](asked)}
    except InputError as error:
        found = {"error": {"what": error.what, "where": error.where, "fix": error.fix}}
    print(f"\n{json.dumps(found)}", flush=True)


if __name__ == "__main__":
    main()
