"""Exit codes, streams, JSON, and help that fits the screen."""

from __future__ import annotations

import pytest

from relax_sdk import __version__
from relax_sdk.config import options


def test_version_and_help(relax):
    assert relax("--version").out == f"relax-sdk {__version__}\n"
    page = relax("--help")
    assert (page.code, page.err) == (0, "")
    for command in ("train", "preflight", "plugins", "config", "doctor"):
        assert f"\n  {command} " in page.out
    nothing = relax()
    assert (nothing.code, nothing.out) == (2, "")
    assert "Usage: relax-sdk" in nothing.err


@pytest.mark.parametrize(
    ("arguments", "nearest"),
    [
        (["trian"], "train"),
        (["plugins", "lsit"], "list"),
        (["train", "--lrr", "1"], "--lr"),
        (["train", "--fsdp-trainable-mod", "lora"], "--fsdp-trainable-mode"),
        (["train", "--no-colocte"], "--no-colocate"),
        (["train", "--plugin", "climodl"], "climodel"),
        (["train", "--plugin", "climodel", "--preset", "dem"], "demo"),
        (["train", "--plugin", "climodel", "--sampling-config", '{"hight": 64}'], "height"),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value),
)
def test_mistakes_get_a_suggestion_and_no_traceback(relax, climodel, arguments, nearest):
    ended = relax(*arguments)
    assert (ended.code, ended.out) == (2, "")
    assert f"did you mean {nearest!r}?" in ended.err
    assert "Traceback" not in ended.err


@pytest.mark.parametrize("arguments", [["train", "--lr"], ["plugins", "show"], ["train", "extra"], ["doctor", "--x"]])
def test_other_usage_errors(relax, arguments):
    ended = relax(*arguments)
    assert (ended.code, ended.out) == (2, "")
    assert ended.err.startswith("error: ")
    assert "--help" in ended.err


def test_debug_shows_the_traceback(relax):
    arguments = ["train", "--plugin", "nothing-like-this"]
    assert "Traceback" not in relax(*arguments).err
    assert "Traceback" in relax("--debug", *arguments).err
    assert "Traceback" in relax(*arguments, "--debug").err


@pytest.mark.parametrize("width", [80, 120])
def test_help_fits_and_names_every_flag_with_its_default(relax, monkeypatch, width):
    monkeypatch.setenv("COLUMNS", str(width))
    page = relax("train", "--help").out
    assert max(map(len, page.splitlines())) <= width
    flat = " ".join(page.split())
    for option in options():
        for flag in (option.flag, option.off, *option.aliases):
            assert not flag or f" {flag}" in page
        assert " ".join(option.description.split()) in flat
        assert f"\n{option.section_title}:\n" in page
    assert "[rows; default: 64]" in flat
    assert "[default: --lora-merge-mode]" in flat


def test_plugins_list_shows_a_broken_one_and_its_reason(relax, climodel):
    ended = relax("plugins", "list")
    assert (ended.code, ended.err) == (0, "")
    assert "No module named 'no_such_library'" in ended.out
    assert f"{climodel / 'cliwilted_plugin.py'}:1" in ended.out
    records = {record["name"]: record for record in relax("plugins", "list", "--json").json}
    assert records["cliwilted"]["status"] == "broken"
    assert records["climodel"]["models"][0]["adapter"] == "climodel_adapter:Adapter"


def test_plugins_show(relax, climodel):
    shown = relax("plugins", "show", "climodel").out
    for part in ("climodel-dist 1.0", "climodel_adapter:Adapter", "demo (default)", "returns  taste"):
        assert part in shown
    assert relax("plugins", "show", "cliwilted").code == 3
    checked = relax("plugins", "show", "climodel", "--check", "--json")
    assert checked.code == 3, "the reward's class is no scorer"
    assert "is not a RewardScorer" in checked.json["problems"][0]
    assert "missing method score(batch)" in checked.err


def test_config_explain(relax, climodel):
    rows = {
        row["path"]: row for row in relax("config", "explain", "--plugin", "climodel", "--lr", "2e-3", "--json").json
    }
    assert (rows["optimizer.lr"]["value"], rows["optimizer.lr"]["source"]) == (2e-3, "flag --lr")
    assert rows["backend.colocate"]["source"] == "preset climodel:demo"
    assert rows["reward.batch_size"]["unit"] == "rows"
    table = relax("config", "explain", "--plugin", "climodel", "--changed").out
    assert "preset climodel:demo" in table
    assert "--adam-beta1" not in table


def test_doctor(relax):
    found = {item["name"]: item["status"] for item in relax("doctor", "--json").json}
    assert found["python"] == "ok"
    assert "disk" in relax("doctor").out


def test_preflight_imports_the_named_classes(relax, climodel, tmp_path) -> None:  # type: ignore[no-untyped-def]
    """Also one that lies in the working folder, which the roles will see too."""
    (tmp_path / "lying_here.py").write_text(
        "class Here:\n    components = ('here',)\n    required_tracks = ('image',)\n    def score(self, batch): ...\n"
    )
    assert relax("preflight", "--plugin", "climodel", "--reward", "lying_here:Here").code == 0
    wrong = relax("preflight", "--plugin", "climodel", "--reward", "lying_here:There")
    assert (wrong.code, "There" in wrong.err) == (3, True)
    assert relax("preflight", "--plugin", "climodel", "--reward", "absent_module:X").code == 3
    weights = ("--reward-component-weights", '{"her": 1}', "--reward", "lying_here:Here")
    unknown = relax("preflight", "--plugin", "climodel", *weights)
    assert unknown.code == 2
    assert "did you mean 'here'?" in unknown.err


def test_preflight(relax, climodel):
    ended = relax("preflight", "--plugin", "climodel")
    assert (ended.code, ended.out, ended.err) == (0, "", "preflight passed\n")
    ended = relax("preflight", "--plugin", "climodel", "--eps-clip", "0", "--no-colocate")
    assert ended.code == 4
    assert "2 rules are broken" in ended.err
    ended = relax("preflight", "--plugin", "climodel", "--num-updates-per-batch", "1")
    assert ended.code == 0
    assert ended.err.startswith("warning: --num-updates-per-batch")
    assert relax("preflight", "--plugin", "cliwilted").code == 3


def test_a_broken_prompt_file_is_named_with_its_line(relax, climodel, tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "a"}\n{"prompt": \n')
    ended = relax("train", "--plugin", "climodel", "--prompt-data", str(file))
    assert (ended.code, ended.out) == (2, "")
    assert "prompts.jsonl" in ended.err
    assert "2" in ended.err
    ended = relax("train", "--plugin", "climodel", "--eval-prompt-data", "held", str(tmp_path / "none.jsonl"))
    assert ended.code == 2
    assert "none.jsonl" in ended.err
    assert not (tmp_path / "runs").exists(), "nothing is written before everything is checked"
