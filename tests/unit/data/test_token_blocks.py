"""Continued pre-training: texts end to end in blocks, each token predicted once."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from test_chat import toy

from helpers.tiny_runs import digest, lines
from reinforge.build.run import train_config
from reinforge.config.data import DataConfig
from reinforge.config.schema import Config
from reinforge.core.errors import InputError
from reinforge.core.sample import Row
from reinforge.data.blocks import cut_into_blocks
from reinforge.data.chat import Renderer
from reinforge.data.cursor import Cursor
from reinforge.data.sources import MIXTURE, fingerprint, load_rows

DOCUMENTS = [("", [5, 6, 7, 0]), ("", [8, 0]), ("", [9, 10, 11, 12, 13, 0])]


@pytest.mark.parametrize("on_disk", [False, True])
@pytest.mark.parametrize("size", [2, 3, 5, 12, 100])
def test_every_token_but_the_first_is_trained_once(size: int, on_disk: bool) -> None:
    blocks = cut_into_blocks(DOCUMENTS, size, on_disk=on_disk)
    joined = [i for _, ids in DOCUMENTS for i in ids]
    trained = [
        int(token)
        for (sample,) in blocks
        for token, there in zip(sample.tokens, sample.trained, strict=True)
        if there
    ]
    assert trained == joined[1:] and blocks.tokens == 12
    assert [len(sample.tokens) for (sample,) in blocks] == blocks.lengths
    assert set(blocks.lengths[:-1]) <= {size} and blocks.lengths[-1] <= size
    assert len(blocks) == -(-11 // (size - 1))


def test_sources_of_a_mixture_share_no_block() -> None:
    blocks = cut_into_blocks([("a", [1, 2, 3, 0]), ("b", [4, 5, 0]), ("b", [6, 0])], 3)
    found = [(row.columns[MIXTURE], blocks.ids(i)) for i, row in enumerate(blocks.rows())]
    assert found == [("a", [1, 2, 3]), ("a", [3, 0]), ("b", [4, 5, 0]), ("b", [0, 6, 0])]


def test_rows_of_blocks_know_their_contents() -> None:
    one = cut_into_blocks(DOCUMENTS, 4).rows()
    other = cut_into_blocks([*DOCUMENTS[:2], ("", [9, 10, 11, 12, 14, 0])], 4).rows()
    assert fingerprint(one) == fingerprint(cut_into_blocks(DOCUMENTS, 4, on_disk=True).rows())
    assert fingerprint(one) != fingerprint(other) and len(one) == len(other) == 4
    with pytest.raises(InputError, match="made with other rows"):
        Cursor(4, 0, True, fingerprint=fingerprint(other)).load(
            Cursor(4, 0, True, fingerprint=fingerprint(one)).state()
        )


def test_a_document_ends_with_eos_and_begins_as_the_tokenizer_begins_texts() -> None:
    for adds_bos in (False, True):
        tokenizer = toy(None, adds_bos=adds_bos)
        renderer = Renderer(tokenizer, DataConfig(source="x.txt", blocks=True))
        ids = renderer.document(Row("r", "hello <|im_end|>", {"text": "hello <|im_end|>"}))
        text = tokenizer.decode(ids)
        assert text == ("<s>" if adds_bos else "") + "hello <|im_end|><|im_end|>"
        assert ids.count(tokenizer.eos_token_id) == 1, "what a text spells is text"


def test_text_files_and_directories(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "two.md").write_text("# Two\n")
    (tmp_path / "a.txt").write_text("one\n\nline")
    (tmp_path / "c.bin").write_bytes(b"\x00")
    rows = load_rows(DataConfig(source=str(tmp_path)))
    assert [row.columns["text"] for row in rows] == ["one\n\nline", "# Two\n"]
    (row,) = load_rows(DataConfig(source=str(tmp_path / "a.txt")))
    assert (row.prompt, row.place) == ("one\n\nline", str(tmp_path / "a.txt"))
    (tmp_path / "a.txt").write_bytes(b"\xff")
    with pytest.raises(InputError, match=r"a\.txt: is not UTF-8"):
        load_rows(DataConfig(source=str(tmp_path)))


def test_a_run_on_texts(
    make: Callable[..., Config], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same in memory and on disk, resumed exactly; held-out texts are blocks too."""
    path = tmp_path / "texts.jsonl"
    texts = [{"text": f"{i}+{i}={2 * i}. " * (i % 5 + 1)} for i in range(30)]
    path.write_text("".join(json.dumps(row) + "\n" for row in texts))

    def run(name: str, on_disk: str, steps: int) -> tuple[str, list[dict[str, float]]]:
        settings = [
            f"data.source={path}",
            f"data.on_disk={on_disk}",
            f"train.steps={steps}",
            "data.blocks=true",
            "data.max_length=16",
            "data.eval.size=4",
            "train.prompts_per_step=4",
        ]
        cfg = make(name, "sft", *settings, rewards=[])
        train_config(cfg)
        return digest(cfg), lines(cfg)

    whole = run("whole", "never", 5)
    said = capsys.readouterr().out
    assert "26 texts become" in said and "blocks of at most 16 tokens" in said
    norms = [line["train/grad_norm"] for line in whole[1] if "train/grad_norm" in line]
    assert len(norms) == 5 and norms[0] > 1e-3
    assert next(line["tokens/trained"] for line in whole[1] if "tokens/trained" in line) == 4 * 15
    run("cut", "never", 2)
    assert run("cut", "never", 5)[0] == whole[0]
    disk = run("disk", "always", 5)[1]
    assert [line["train/grad_norm"] for line in disk if "train/grad_norm" in line] == norms


def test_what_blocks_are_refused_for(make: Callable[..., Config], tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"data\.blocks: dpo does not train whole texts"):
        make("run", "dpo", "data.blocks=true", rewards=[])
    path = tmp_path / "chat.jsonl"
    path.write_text('{"messages": [{"role": "user", "content": "a"}]}\n')
    with pytest.raises(InputError, match="its prompt is chat messages"):
        train_config(make("run", "sft", f"data.source={path}", "data.blocks=true", rewards=[]))
