"""Members of our own classes are read as members, and not looked for by name: what a caller may use
stands in the class or in the contract, with a default where it has one.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from helpers.source_tree import PACKAGE, modules, tree

A_USERS = "a function or an object of a user's says so, or does not"
FOREIGN = "an object of another library"
# (file, name) where a name that a class of ours has too is asked of something else: why
ALLOWED = {
    ("algorithms/algorithm.py", "components"): A_USERS,
    ("algorithms/build.py", "needs"): A_USERS,
    ("algorithms/losses/policy.py", "func"): "of a functools.partial",
    ("algorithms/settings.py", "func"): "of a functools.partial",
    ("algorithms/user_functions.py", "func"): "of a functools.partial",
    ("api.py", "get_output_embeddings"): FOREIGN,
    ("api.py", "reset"): A_USERS,
    ("api.py", "step"): A_USERS,
    ("build/inputs.py", "unsafe"): A_USERS,
    ("cluster/actor.py", "close"): "an actor keeps models too, which have nothing to close",
    ("data/objects.py", "columns"): FOREIGN,
    ("engines/served/vllm_plugin.py", "value"): FOREIGN,
    ("envs/adapters/bridge_child.py", "messages"): A_USERS,
    ("envs/adapters/bridge_child.py", "prepare"): A_USERS,
    ("envs/adapters/gymnasium.py", "metadata"): FOREIGN,
    ("envs/adapters/nemo_rl.py", "shutdown"): FOREIGN,
    ("envs/mcp.py", "data"): FOREIGN,
    ("envs/mcp.py", "text"): FOREIGN,
    ("envs/programs.py", "run"): A_USERS,
    ("models/attention.py", "window"): "torch makes masks out of a mask without asking us",
    ("models/fused_decode.py", "head_dim"): FOREIGN,
    ("models/fused_decode.py", "weight"): FOREIGN,
    ("models/fused_experts.py", "top_k"): FOREIGN,
    ("models/fused_experts.py", "weight"): FOREIGN,
    ("models/packed.py", "gradient_checkpointing"): FOREIGN,
    ("rewards/build.py", "steps"): "a scorer of single steps has it, one of whole answers has not",
    ("rewards/function.py", "needs"): A_USERS,
    ("rollout/dialogue/environment.py", "kind"): A_USERS,
    ("rollout/dialogue/environment.py", "pure"): A_USERS,
    ("sandbox/workers.py", "worker"): "a thread that has none yet",
}


def own_members() -> set[str]:
    """What the classes of the package say that they have, and what their methods set on `self`."""
    found = set()
    for path in modules().values():
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.ClassDef):
                found |= set(_declared(node)) | set(_set_on_self(node))
    return {name for name in found if not name.startswith("_")}


def _declared(node: ast.ClassDef) -> Iterator[str]:
    for part in node.body:
        if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef):
            yield part.name
        elif isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name):
            yield part.target.id
        elif isinstance(part, ast.Assign):
            yield from (target.id for target in part.targets if isinstance(target, ast.Name))


def _set_on_self(node: ast.ClassDef) -> Iterator[str]:
    for part in ast.walk(node):
        match part:
            case ast.Attribute(value=ast.Name(id="self"), attr=name, ctx=ast.Store()):
                yield name


def looked_for() -> Iterator[tuple[str, int, str]]:
    """(file, line, name) of every getattr and hasattr with the name written out."""
    for path in modules().values():
        for node in ast.walk(tree(path)):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
                continue
            if node.func.id not in ("getattr", "hasattr") or len(node.args) < 2:
                continue
            name = node.args[1]
            if isinstance(name, ast.Constant) and isinstance(name.value, str):
                yield path.relative_to(PACKAGE).as_posix(), node.lineno, name.value


def test_members_of_our_own_classes_are_not_looked_for_by_name() -> None:
    own = own_members()
    assert {"reads", "divergence", "by_rank", "idle", "streaming", "ema"} <= own
    found = [
        f"{place}:{line} looks for {name!r}: put it into the class, or into the list here"
        for place, line, name in looked_for()
        if name in own and (place, name) not in ALLOWED
    ]
    assert found == []


def test_the_list_of_exceptions_is_not_longer_than_it_must_be() -> None:
    own = own_members()
    used = {(place, name) for place, _, name in looked_for() if name in own}
    assert ALLOWED.keys() <= used, sorted(ALLOWED.keys() - used)
