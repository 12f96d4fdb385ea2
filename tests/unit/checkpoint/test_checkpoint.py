"""Checkpoints: what is saved comes back bit for bit, a kill leaves the old one or the new one,
damage is named.
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import pickle
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError

from helpers.paths import SRC, TESTS
from reinforge.checkpoint import files, store
from reinforge.core.backend import State
from reinforge.core.errors import InputError


def make_state(seed: int = 0) -> State:
    draw = torch.Generator().manual_seed(seed)
    weight = torch.randn(7, 5, generator=draw)
    return State(
        tensors={
            "model/embed": weight,
            "model/head": weight,  # tied
            "model/norm": torch.randn(5, generator=draw).bfloat16(),
            "optimizer/exp_avg/embed": torch.randn(7, 5, generator=draw),
            "optimizer/step": torch.tensor(seed, dtype=torch.int64),
            "buffer/mask": torch.tensor([True, False, True]),
            "buffer/empty": torch.zeros(0, 3),
        },
        meta={"schedule": {"position": seed, "rate": 0.1 + 0.2}, "best": -math.inf},
    )


def make_extra(seed: int = 0) -> dict:
    return {
        "cursor": {"epoch": 1, "offset": seed},
        "counters": [1, 2, seed],
        "clock": {"seconds": 12.5},
    }


def assert_same(a: State, b: State) -> None:
    assert a.tensors.keys() == b.tensors.keys()
    for name, tensor in a.tensors.items():
        assert tensor.dtype == b.tensors[name].dtype and torch.equal(tensor, b.tensors[name]), name
    assert a.meta == b.meta


def test_round_trip_is_bit_identical(tmp_path: Path) -> None:
    path = store.save(tmp_path, 10, make_state(3), make_extra(3))
    assert path == tmp_path / "checkpoints" / "step-00000010"
    assert sorted(f.name for f in path.iterdir()) == sorted(
        [
            "MANIFEST.json",
            "state.json",
            "model.safetensors",
            "optimizer.safetensors",
            "buffer.safetensors",
        ]
    )
    state, extra = store.load(path)
    assert_same(make_state(3), state)
    assert extra == make_extra(3)
    assert state.meta["schedule"]["rate"].hex() == (0.1 + 0.2).hex()
    manifest = json.loads((path / "MANIFEST.json").read_text())
    data = (path / "model.safetensors").read_bytes()
    assert manifest["files"]["model.safetensors"] == {
        "sha256": hashlib.sha256(data).hexdigest(),
        "size": len(data),
    }


def test_shared_memory_is_stored_once_and_comes_back_under_both_names(tmp_path: Path) -> None:
    base = torch.arange(12.0)
    tensors = {
        "model/a": base,
        "model/b": base,
        "other/c": base,
        "model/view": base.view(3, 4),
        "model/part": base[4:8],
        "model/t": base.view(3, 4).t(),
    }
    path = store.save(tmp_path, 1, State(tensors), {})
    state, _ = store.load(path)
    for name, tensor in tensors.items():
        assert torch.equal(state.tensors[name], tensor), name
    assert (
        state.tensors["model/a"] is state.tensors["model/b"]
        and state.tensors["model/a"] is state.tensors["other/c"]
    )
    assert json.loads((path / "state.json").read_text())["aliases"] == {
        "model/b": "model/a",
        "other/c": "model/a",
    }
    assert not (path / "other.safetensors").exists()
    store.save(tmp_path, 2, state, {})  # what was loaded can be saved again
    assert_same(State(tensors), store.load(tmp_path / "checkpoints" / "step-00000002")[0])


def test_large_parts_are_cut_into_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = store.save(tmp_path / "whole", 1, make_state(), make_extra())
    monkeypatch.setattr(files, "SHARD_BYTES", 100)  # embed takes 140 bytes and norm 10
    cut = store.save(tmp_path / "cut", 1, make_state(), make_extra())
    assert {"model-00001.safetensors", "model-00002.safetensors"} <= {f.name for f in cut.iterdir()}
    assert_same(make_state(), store.load(cut)[0])
    assert store.digest(cut) == store.digest(whole)


def test_digest_sees_training_and_not_the_clock(tmp_path: Path) -> None:
    def digest_of(name: str, state: State, extra: dict, step: int = 5) -> str:
        return store.digest(store.save(tmp_path / name, step, state, extra))

    base = digest_of("base", make_state(), make_extra())
    assert (
        digest_of("clock", make_state(), make_extra() | {"clock": {"seconds": 99.0, "more": 1}})
        == base
    )
    untied = make_state()
    untied.tensors["model/head"] = untied.tensors["model/embed"].clone()
    assert digest_of("untied", untied, make_extra()) == base
    shuffled = make_state()
    shuffled.tensors = dict(reversed(shuffled.tensors.items()))
    assert digest_of("shuffled", shuffled, make_extra()) == base
    weight = make_state()
    moment = make_state()
    weight.tensors["model/norm"] = weight.tensors["model/norm"].clone()
    weight.tensors["model/norm"].view(torch.int16)[2] += 1  # one unit in the last place
    moment.tensors["optimizer/exp_avg/embed"][0, 0] *= -1
    schedule = make_state()
    schedule.meta["schedule"]["position"] = 1
    reshaped = make_state()
    reshaped.tensors["optimizer/exp_avg/embed"] = reshaped.tensors[
        "optimizer/exp_avg/embed"
    ].reshape(5, 7)
    others = [
        digest_of("weight", weight, make_extra()),
        digest_of("moment", moment, make_extra()),
        digest_of("schedule", schedule, make_extra()),
        digest_of("reshaped", reshaped, make_extra()),
        digest_of("cursor", make_state(), make_extra() | {"cursor": {"epoch": 1, "offset": 9}}),
        digest_of("step", make_state(), make_extra(), step=6),
    ]
    assert len({base, *others}) == 7
    store.save(tmp_path / "base", 6, make_state(), make_extra())
    assert store.digest_run(tmp_path / "base") == others[-1]
    with pytest.raises(InputError, match="no checkpoint"):
        store.digest_run(tmp_path / "nothing")


def test_what_was_loaded_can_be_changed_in_place_and_outlives_its_files(tmp_path: Path) -> None:
    path = store.save(tmp_path, 1, make_state(), make_extra())
    state, _ = store.load(path)
    for tensor in state.tensors.values():
        tensor.zero_()
    assert store.intact(path)
    fresh, _ = store.load(path)
    shutil.rmtree(path)
    assert_same(fresh, make_state())


@pytest.mark.parametrize(
    "meta", [{"betas": {1: 0.9}}, {"tensor": torch.zeros(1)}, {"path": Path("x")}]
)
def test_values_that_json_would_change_are_refused(tmp_path: Path, meta: dict) -> None:
    with pytest.raises(TypeError, match=r"state\.meta"):
        store.save(tmp_path, 1, State({}, meta), {})
    assert store.latest(tmp_path) is None


def two(tmp_path: Path) -> tuple[Path, Path]:
    return store.save(tmp_path, 10, make_state(1), make_extra(1)), store.save(
        tmp_path, 20, make_state(2), make_extra(2)
    )


def truncate(path: Path) -> str:
    os.truncate(path / "optimizer.safetensors", 50)
    return "optimizer.safetensors"


def flip(path: Path) -> str:
    data = bytearray((path / "model.safetensors").read_bytes())
    data[-3] ^= 1
    (path / "model.safetensors").write_bytes(data)
    return "model.safetensors"


def lose_shard(path: Path) -> str:
    (path / "model.safetensors").unlink()
    return "model.safetensors"


def lose_manifest(path: Path) -> str:
    (path / "MANIFEST.json").unlink()
    return "MANIFEST.json"


def cut_manifest(path: Path) -> str:
    os.truncate(path / "MANIFEST.json", 80)
    return "MANIFEST.json"


def edit_manifest(path: Path, name: str, entry: dict | None = None) -> None:
    manifest = json.loads((path / "MANIFEST.json").read_text())
    manifest["files"][name] = entry or {"sha256": "0" * 64, "size": 1}
    (path / "MANIFEST.json").write_text(json.dumps(manifest))


def point_outside(path: Path) -> str:
    edit_manifest(path, "../../secret.json")
    return "MANIFEST.json"


def link_outside(path: Path) -> str:
    outside = path.parent.parent / "outside.safetensors"
    shutil.move(path / "model.safetensors", outside)
    (path / "model.safetensors").symlink_to(outside)
    return "MANIFEST.json"


def plant_pickle(path: Path) -> str:
    (path / "optimizer.pt").write_bytes(pickle.dumps({"a": 1}))
    return "optimizer.pt"


def disguise_pickle(path: Path) -> str:
    data = pickle.dumps({"a": 1})
    (path / "model.safetensors").write_bytes(data)
    edit_manifest(
        path, "model.safetensors", {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data)}
    )
    return "model.safetensors"


def change_cursor(path: Path) -> str:
    text = (path / "state.json").read_text()
    (path / "state.json").write_text(text.replace('"epoch": 1', '"epoch": 7'))
    return "state.json"


DAMAGES = [
    truncate,
    flip,
    lose_shard,
    lose_manifest,
    cut_manifest,
    point_outside,
    link_outside,
    plant_pickle,
    disguise_pickle,
    change_cursor,
]


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda f: f.__name__)
def test_damage_names_the_file_and_the_earlier_intact_checkpoint(tmp_path: Path, damage) -> None:
    old, new = two(tmp_path)
    file = damage(new)
    assert store.steps(tmp_path) == [new, old]
    with pytest.raises(InputError) as caught:
        store.load(new)
    assert caught.value.where == str(new / file)
    assert str(old) in (caught.value.fix or "")
    assert_same(store.load(old)[0], make_state(1))


def test_a_checkpoint_under_the_name_of_another_step_is_refused(tmp_path: Path) -> None:
    """A directory that was renamed to a later step would be the newest, and the run would go on
    from an older state.
    """
    old, new = two(tmp_path)
    later = old.rename(old.with_name("step-00000099"))
    with pytest.raises(
        InputError,
        match=r"MANIFEST.json: it is the checkpoint of step 10: the directory was renamed",
    ) as caught:
        store.load(later)
    assert str(new) in (caught.value.fix or "") and not store.intact(later)
    assert store.steps(tmp_path) == [later, new] and store.intact(new)


def test_advice_skips_an_earlier_checkpoint_that_is_damaged_too(tmp_path: Path) -> None:
    old, new = two(tmp_path)
    newest = store.save(tmp_path, 30, make_state(3), make_extra(3))
    flip(new)
    flip(newest)
    with pytest.raises(InputError) as caught:
        store.load(newest)
    assert str(old) in caught.value.fix and "step-00000020" not in caught.value.fix
    flip(old)
    with pytest.raises(InputError, match="no earlier intact checkpoint"):
        store.load(newest)


def test_latest_ignores_leftovers_and_clean_removes_only_them(tmp_path: Path) -> None:
    assert store.latest(tmp_path) is None and store.clean(tmp_path) == []
    _, new = two(tmp_path)
    root = tmp_path / "checkpoints"
    leftovers = [root / ".tmp-step-00000030-1", root / ".trash-step-00000001-2"]
    # the last has no manifest
    others = [root / "notes", root / ".tmp-mine", root / "step-00000099"]
    for folder in leftovers + others:
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(b"half")
    (root / ".tmp-step-00000031-1").symlink_to(tmp_path)
    assert store.latest(tmp_path) == new
    assert store.clean(tmp_path) == leftovers
    assert (
        all(f.exists() for f in others) and new.exists() and not any(f.exists() for f in leftovers)
    )


def test_prune_keeps_the_newest_the_protected_and_what_is_not_ours(tmp_path: Path) -> None:
    paths = {
        step: store.save(tmp_path, step, State({"model/a": torch.ones(1)}), {})
        for step in (1, 2, 3, 4, 5)
    }
    foreign = tmp_path / "checkpoints" / "step-00000000"
    foreign.mkdir()
    (foreign / "thesis.txt").write_text("mine")
    assert store.prune(tmp_path, 2, {paths[2]}) == [paths[3], paths[1]]
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == [
        f"step-{i:08d}" for i in (0, 2, 4, 5)
    ]
    os.truncate(paths[5] / "model.safetensors", 3)  # a damaged one does not count as kept
    assert store.prune(tmp_path, 1) == [paths[2]]
    assert paths[4].exists() and paths[5].exists()


def test_saving_a_step_again_replaces_it(tmp_path: Path) -> None:
    store.save(tmp_path, 10, make_state(1), make_extra(1))
    path = store.save(tmp_path, 10, make_state(2), make_extra(2))
    assert_same(store.load(path)[0], make_state(2))
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["step-00000010"]


def test_everything_is_on_disk_before_the_name_that_promises_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine that loses power keeps what was synced: every file, then the directory, then the
    new name, then the directory of names.
    """
    order: list[tuple[str, str]] = []
    fsync = os.fsync
    rename = os.rename

    def synced(handle: int) -> None:
        order.append(("sync", Path(os.readlink(f"/proc/self/fd/{handle}")).name))
        fsync(handle)

    def renamed(source: Path, target: Path) -> None:
        order.append(("rename", Path(target).name))
        rename(source, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "rename", renamed)
    path = store.save(tmp_path, 10, make_state(1), make_extra(1))
    at = order.index(("rename", "step-00000010"))
    first = [name for _, name in order[:at]]
    written = {file.name for file in path.iterdir()}
    assert written <= set(first) and len(written) == 5
    folder = next(i for i, name in enumerate(first) if name.startswith(".tmp-step-00000010-"))
    manifest = first.index("MANIFEST.json")
    assert max(first.index(name) for name in written - {"MANIFEST.json"}) < manifest < folder, (
        "the manifest proves what is there already"
    )
    assert tmp_path.name in first, (
        "the directory `checkpoints` is new, and its own name must not get lost either"
    )
    assert ("sync", "checkpoints") in order[at:]


def break_fsync(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(files.os, "fsync", full)


def break_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(tensors: dict, path: Path) -> None:
        Path(path).write_bytes(b"half a file")
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(files, "save_file", full)


def break_mkdir(monkeypatch: pytest.MonkeyPatch) -> None:
    def read_only(*args: object, **kwargs: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(Path, "mkdir", read_only)


def break_rename(monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.rename

    def fail(source: Path, target: Path) -> None:
        if Path(source).name.startswith(".tmp-"):
            raise OSError(errno.EDQUOT, "Disk quota exceeded")
        real(source, target)

    monkeypatch.setattr(store.os, "rename", fail)


@pytest.mark.parametrize(
    "fault", [break_fsync, break_tensors, break_mkdir, break_rename], ids=lambda f: f.__name__
)
@pytest.mark.parametrize("step", [10, 11])
def test_a_failed_save_leaves_the_previous_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault, step: int
) -> None:
    old = store.save(tmp_path, 10, make_state(1), make_extra(1))
    fault(monkeypatch)
    with pytest.raises(InputError, match=r"No space left|Read-only|quota") as caught:
        store.save(tmp_path, step, make_state(2), make_extra(2))
    assert "step-00000010 is intact" in caught.value.fix
    monkeypatch.undo()
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["step-00000010"]
    assert_same(store.load(old)[0], make_state(1))


CHILD = """
import sys
sys.path[:0] = [{here!r}, {tests!r}, {src!r}]
from pathlib import Path
from reinforge.checkpoint import store
from test_checkpoint import make_state, make_extra
run, step, seed, prune = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
if prune == "prune":
    store.prune(run, 1)
else:
    store.save(run, step, make_state(seed), make_extra(seed))
"""


def run_child(run: Path, point: str, step: int, seed: int, action: str = "save") -> None:
    code = CHILD.format(here=str(Path(__file__).parent), tests=str(TESTS), src=str(SRC))
    env = os.environ | {"REINFORGE_CRASH_AT": point, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code, str(run), str(step), str(seed), action],
        env=env,
        timeout=120,
        capture_output=True,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr.decode()


@pytest.mark.parametrize(
    ("point", "step", "survivor"),
    [
        ("save:after-tensors", 20, 1),
        ("save:before-rename", 20, 1),
        ("save:after-rename", 20, 2),
        ("save:replacing", 10, 1),
        ("save:before-rename", 10, 1),
        ("save:after-rename", 10, 2),
    ],
)
def test_a_kill_during_save_leaves_the_old_or_the_new_one(
    tmp_path: Path, point: str, step: int, survivor: int
) -> None:
    store.save(tmp_path, 10, make_state(1), make_extra(1))
    run_child(tmp_path, point, step, 2)
    if point != "save:replacing":  # only there is `clean` needed to bring the old one back
        assert_same(store.load(store.steps(tmp_path)[0])[0], make_state(survivor))
    store.clean(tmp_path)
    state, extra = store.load(store.steps(tmp_path)[0])
    assert_same(state, make_state(survivor))
    assert extra == make_extra(survivor)
    assert all(store.intact(p) for p in (tmp_path / "checkpoints").iterdir())
    again = store.save(tmp_path, 20, make_state(2), make_extra(2))
    assert_same(store.load(again)[0], make_state(2))


def test_a_kill_during_prune_leaves_complete_checkpoints_and_removable_rest(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        store.save(tmp_path, step, make_state(step), make_extra(step))
    run_child(tmp_path, "prune:middle", 0, 0, "prune")
    assert [store.step_of(p) for p in store.steps(tmp_path)] == [3, 1]
    assert all(store.intact(p) for p in store.steps(tmp_path))
    assert len(store.clean(tmp_path)) == 1
    assert store.prune(tmp_path, 1) == [tmp_path / "checkpoints" / "step-00000001"]
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["step-00000003"]


def test_crash_point_counts_passages(tmp_path: Path) -> None:
    code = (
        "from reinforge.checkpoint.crash_points import crash_point\n"
        "for i in range(5):\n    print(i, flush=True)\n    crash_point('x')\n    crash_point('y')"
    )
    env = os.environ | {"REINFORGE_CRASH_AT": "x@3", "PYTHONPATH": str(SRC)}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, timeout=60)
    assert done.returncode == -signal.SIGKILL and done.stdout.split() == [b"0", b"1", b"2"]
