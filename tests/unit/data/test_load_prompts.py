from __future__ import annotations

import json
from pathlib import Path

import pytest

from relax_sdk.data import load_prompts
from relax_sdk.errors import DataError


def write(path: Path, *rows: object) -> Path:
    path.write_text("".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows), encoding="utf-8")
    return path


def row(prompt: object = "a cat", **metadata: object) -> dict[str, object]:
    return {"prompt": prompt, "metadata": {"task": "t2i", **metadata}}


def test_jsonl_keeps_prompts_ids_and_metadata(tmp_path: Path) -> None:
    path = write(
        tmp_path / "p.jsonl",
        row("  字 e\u0301 👩‍👩‍👧 \u2028 x", sample_id="s0"),
        "",
        row("", sample_id=7, source="pickapic"),
        row("both", sample_id="s2", prompt_id="p2"),
        {"prompt": "bare"},
        row("a cat"),
    )
    records = load_prompts(path, task="t2i")
    assert [record.prompt for record in records] == ["  字 e\u0301 👩‍👩‍👧 \u2028 x", "", "both", "bare", "a cat"]
    assert [record.prompt_id for record in records] == ["s0", "7", "p2", "4", "5"]
    assert records[1].metadata == {"task": "t2i", "sample_id": 7, "source": "pickapic"}


def test_txt_is_one_prompt_a_line(tmp_path: Path) -> None:
    path = tmp_path / "p.txt"
    path.write_bytes("\ufeffone\r\n\n  \ntwo \u2028 lines? no\x0b \r.\n\u00a0three\u00a0\nlast".encode())
    records = load_prompts(path, task="t2i")
    assert [record.prompt for record in records] == ["one", "two \u2028 lines? no\x0b \r.", "\u00a0three\u00a0", "last"]
    assert [record.prompt_id for record in records] == ["0", "3", "4", "5"]


GOOD = [row(sample_id=f"s{index}") for index in range(6)]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"prompt": "a", ', "not valid JSON"),
        ('["a"]', "not a JSON object but an array"),
        ("null", "not a JSON object but null"),
        ("[" * 100_000, "not valid JSON"),
        ({"promt": "a"}, "no 'prompt'; is 'promt' meant?"),
        ({"metadata": {}}, "no 'prompt' among its keys ['metadata']"),
        ({"prompt": "a", "images": ["b.png"]}, "unknown key 'images'"),
        (row(3), "'prompt' is a number, not a string"),
        (row(None), "'prompt' is null"),
        ('{"prompt": "a \\ud800 b"}', "half a surrogate pair"),
        ({"prompt": "a", "metadata": "t2i"}, "'metadata' is a string, not an object"),
        ({"prompt": "a", "metadata": {"task": "t2v"}}, "metadata.task is 't2v', but the run's task is 't2i'"),
        (row(sample_id=True), "metadata.sample_id is a boolean"),
        (row(sample_id=None), "metadata.sample_id is null"),
        (row(prompt_id=""), "metadata.prompt_id is empty"),
        (row(sample_id="s2"), "prompt id 's2' was already used on line 3"),
        (row(sample_id="x", prompt_id="s0"), "prompt id 's0' was already used on line 1"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: object, message: str) -> None:
    path = write(tmp_path / "p.jsonl", *GOOD, line)
    with pytest.raises(DataError) as caught:
        load_prompts(path, task="t2i")
    assert str(caught.value).startswith("line 7 of p.jsonl: ")
    assert message in str(caught.value)
    assert f"{path}:7" in str(caught.value)
    assert caught.value.exit_code == 2


def test_an_id_that_collides_with_a_position_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "p.jsonl", row(sample_id="1"), row())
    with pytest.raises(DataError, match="prompt id '1' was already used on line 1"):
        load_prompts(path, task="t2i")


@pytest.mark.parametrize("name", ["p.txt", "p.jsonl"])
def test_not_utf8_names_the_line(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    good = b'{"prompt": "a"}\n'
    path.write_bytes(good + good + '{"prompt": "caf\u00e9"}'.encode("latin-1"))
    with pytest.raises(DataError, match=rf"line 3 of {name}: not UTF-8: byte b'\\xe9'"):
        load_prompts(path, task="t2i")


@pytest.mark.parametrize("name", ["p.txt", "p.jsonl"])
@pytest.mark.parametrize("text", ["", "\n \n\n"])
def test_an_empty_file_is_refused(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(DataError, match=f"no prompts in {name}"):
        load_prompts(tmp_path / name, task="t2i")


def test_a_path_that_is_no_prompt_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "train.jsonl", *GOOD)
    with pytest.raises(DataError, match=r"(?s)no prompt file at .*did you mean 'train\.jsonl'"):
        load_prompts(tmp_path / "trian.jsonl", task="t2i")
    with pytest.raises(DataError, match="no prompt file at"):
        load_prompts(tmp_path / "absent" / "train.jsonl", task="t2i")
    with pytest.raises(DataError, match="is a folder"):
        load_prompts(tmp_path, task="t2i")
    write(tmp_path / "train.parquet", "PAR1")
    with pytest.raises(DataError, match=r"unknown kind of prompt file 'train\.parquet'"):
        load_prompts(tmp_path / "train.parquet", task="t2i")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match="relative to"):
        load_prompts("absent.txt", task="t2i")


def test_an_operating_system_error_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Path) -> bytes:
        raise PermissionError(13, "Permission denied")

    path = write(tmp_path / "p.txt", "a")
    monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.raises(DataError, match=r"cannot read prompt file .*Permission denied"):
        load_prompts(path, task="t2i")
