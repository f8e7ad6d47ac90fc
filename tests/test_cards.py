"""README.md, docs/models, docs/results.md and the charts are what the records say, and a fall of a figure is seen."""

import json
import re
import shutil
import tomllib

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.cards import __main__ as cards, charts, records, tables
from benchmarks.cards.families import families
from benchmarks.harness import ROOT
from benchmarks.train_cases import MODELS, Model, changed
from ligermodels.arch import ARCHS

README = (ROOT / "README.md").read_text("utf-8")
URL = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["urls"]["Repository"]
IMAGES = URL.replace("github.com", "raw.githubusercontent.com") + "/main/"
CHARTED = "step-gemma-2-2b-h200"
"""In the chart."""
SMALL_LORA, QWEN2 = "step-llama-8b-lora-small-h200", "step-qwen2-1.5b-h200"
"""Not in the chart, which needs matplotlib."""


@pytest.fixture
def root(tmp_path):
    """A copy of what the command reads and writes."""
    for name in ("benchmarks/results", "docs"):
        shutil.copytree(ROOT / name, tmp_path / name)
    for name in ("README.md", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    return tmp_path


def edit(root, record, ours, **factors):
    """Multiplies figures of one side's rows in a record."""
    path = root / "benchmarks" / "results" / f"{record}.json"
    contents = json.loads(path.read_text())
    for row in contents["rows"]:
        if records.is_ours(row["baseline"]) == ours:
            row |= {name: row[name] * factor for name, factor in factors.items()}
    path.write_text(json.dumps(contents))


def test_everything_is_as_the_command_writes_it(capsys):
    """If not: run `python -m benchmarks.cards`, and commit what it writes."""
    assert cards.main(["--check"]) == 0, capsys.readouterr().out


def test_each_family_has_a_card_that_the_readme_links_to():
    for model_type in ARCHS:
        page = f"docs/models/{model_type}.md"
        assert f"]({URL}/blob/main/{page})" in README and (ROOT / page).exists(), model_type


def test_links_of_the_readme_work_on_the_package_index():
    links = re.findall(r"\]\(([^)]+)\)|(?:src|srcset)=\"([^\"]+)\"", README)
    assert len(links) > 60
    for link in map("".join, links):
        assert link.startswith("https://"), link
        if link.startswith((URL, IMAGES)) and link != URL:
            path, _, anchor = re.sub(rf"^({URL}/(blob|tree)/main/|{IMAGES})", "", link).partition("#")
            assert (ROOT / path).exists(), link
            heads = re.findall(r"^#+ (.*)", (ROOT / path).read_text("utf-8"), re.MULTILINE) if anchor else []
            assert not anchor or anchor in [re.sub(r"[^\w -]", "", h.lower()).replace(" ", "-") for h in heads], link
    assert len(README.splitlines()) <= 160


def test_a_record_that_cannot_be_read_is_an_error(tmp_path):
    contents = {"environment": {"device": "NVIDIA H200", "commit": "abc", "date": "2026"}, "rows": [{"ms": 3}]}
    (tmp_path / "step-new.json").write_text(json.dumps(contents))
    with pytest.raises(ValueError, match=r"step-new\.json has no row"):
        records.measurements(records.records(tmp_path))
    contents["x: gpt-2, 1 x 8"] = [{"baseline": "ligermodels", "tokens/s": 1.0}]
    (tmp_path / "step-new.json").write_text(json.dumps(contents))
    (row,) = records.measurements(records.records(tmp_path))
    with pytest.raises(ValueError, match=r"gpt-2 is of no family; add it"):
        _ = row.family


def test_ours_is_compared_with_the_strongest_peer_of_the_same_record():
    def record(name, date, **speeds):
        rows = [{"baseline": baseline, "tokens/s": speed} for baseline, speed in speeds.items()]
        env = {"device": "NVIDIA H200", "commit": "abc", "date": date}
        return records.Record(name, {"environment": env, "x: llama-3.1-8b, 4 x 4096": rows})

    old = record("old", "2026-01-01", **{"ligermodels": 8, "ligermodels+adamw": 9, "hf": 3, "unsloth": 6, "trl": 5})
    new = record("new", "2026-02-01", ligermodels=10)
    found = records.measurements([old, new])
    (one,) = tables.comparisons(found)
    assert (one.ours.baseline, one.peer.baseline, one.speedup) == ("ligermodels+adamw", "unsloth", 1.5)
    assert {row.baseline: row.figures["tokens/s"] for row in records.newest(found).values()} == {
        "ligermodels": 10, "ligermodels+adamw": 9, "hf": 3, "unsloth": 6, "trl": 5,
    }  # fmt: skip


def test_a_row_that_did_not_run_is_beside_those_of_its_case():
    rows = [{"baseline": "ligermodels", "recompute": "block", "tokens/s": 2.0}, {"baseline": "hf", "note": "no memory"}]
    env = {"device": "NVIDIA H200", "commit": "abc", "date": "2026-01-01"}
    record = records.Record("step-x", {"environment": env, "gemma-4-e4b: gemma-4-e4b, 4 x 4096": rows})
    (one,) = tables.comparisons(records.measurements([record]))
    assert [row.note for row in one.all] == ["", "no memory"] and tables.model_name(one.ours.model) == "Gemma-4-E4B"


def test_rows_of_the_commit_beside_which_a_record_was_measured_are_left_out():
    found = records.measurements(records.records())
    beside = [row for row in found if row.record.name.endswith("beside-921b940-h200")]
    assert beside and all(row.commit != "921b940" for row in beside)


@pytest.mark.parametrize(("tied", "trained", "times"), [(True, "full", 3), (False, "lora", 2)])
def test_mfu_counts_the_matmuls_of_a_step(tied, trained, times, monkeypatch):
    """As torch counts those of a forward, and as many for each gradient; attention sees half of the pairs."""
    config = changed(MODELS["llama-3.2-1b"].config, {**MODELS["llama-3.2-1b"].tiny, "tie_word_embeddings": tied})
    monkeypatch.setitem(MODELS, "tiny", Model(config))
    tables.flops.cache_clear()
    model, ids = ARCHS["llama"].from_config(config, seed=0), torch.randint(512, (1, 32))
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(ids)
    forward = sum(n for op, n in counter.get_flop_counts()["Global"].items() if "attention" not in str(op))
    attention = 2 * 2 * 32 * 32 * 64 * 2 / 2  # two matmuls of 32 x 32 pairs in two layers of 64 = 4 heads of 16
    env = {"device": "NVIDIA H200", "commit": "abc", "date": "2026"}
    row = records.Measurement(
        kind="train", model="tiny", case="1 x 32", trained=trained, baseline="ligermodels", figures={"tokens/s": 32.0},
        record=records.Record("x", {"environment": env}), commit="abc", date="2026",
    )  # fmt: skip
    assert tables.mfu(row) * 989.4e12 == pytest.approx(times * forward + 3 * attention)


def test_what_changes_is_printed_and_a_fall_of_ours_writes_nothing(root, capsys):
    card, before = root / "docs" / "models" / "llama.md", (root / "docs" / "models" / "llama.md").read_text()
    assert cards.main([], root) == 0 and "all is as it was" in capsys.readouterr().out
    edit(root, SMALL_LORA, ours=False, tokens_per_s=0.9)
    assert cards.main(["--check"], root) == 1 and "docs/models/llama.md is not what" in capsys.readouterr().out
    assert cards.main([], root) == 0 and "hf+liger+lora: tokens/s 7,710.4 is now" in capsys.readouterr().out
    assert card.read_text() != before
    before = card.read_text()
    edit(root, QWEN2, ours=True, peak_gib=1.06)
    assert cards.main([], root) == 1
    printed = capsys.readouterr().out
    assert printed.count("WORSE") == 2 and "peak GiB 31.315 is now 33.194 (+6.0%)" in printed
    assert card.read_text() == before and "33.2" not in (root / "docs" / "models" / "qwen2.md").read_text()
    assert cards.main(["--accept"], root) == 0 and "33.2" in (root / "docs" / "models" / "qwen2.md").read_text()
    assert cards.main(["--check"], root) == 0
    (root / "benchmarks" / "results" / "rollout-h200.json").unlink()
    with pytest.raises(ValueError, match=r"no record has \[\('rollout'"):
        cards.main([], root)


def test_changes():
    key = "train | m | 4 x 4096 | full | none | H200 | "
    before = {f"{key}ligermodels": {"tokens/s": 100.0, "peak GiB": 10.0}, f"{key}hf": {"tokens/s": 50.0}}

    def after(ours, peer):
        found = {f"{key}ligermodels": ours, f"{key}hf": peer}
        lines, worse = cards.changes(before, {name: values for name, values in found.items() if values})
        return len(lines), worse

    same = before[f"{key}ligermodels"]
    assert after(same, {"tokens/s": 50.4}) == (0, 0)
    assert after({"tokens/s": 98.9, "peak GiB": 10.2}, {"tokens/s": 51.0}) == (3, 0)
    assert after({"tokens/s": 95.0, "peak GiB": 10.5}, {"tokens/s": 40.0}) == (3, 2)
    assert after({"tokens/s": 120.0, "peak GiB": 8.0}, {"tokens/s": 50.0}) == (2, 0)
    assert after({"tokens/s": 100.0}, {}) == (2, 1)
    assert after({}, {"tokens/s": 50.0}) == (1, 1)


def test_a_chart_is_drawn_alike_and_its_figures_are_in_it():
    pytest.importorskip("matplotlib")
    row = {"model": "A & B", "case": "LoRA", "peer": "TRL", "tokens/s": [3000, 1000], "peak GiB": [1.5, 2.5]}
    one, other = (charts.draw([row], charts.THEMES["dark"]) for _ in range(2))
    assert one == other and charts.version(one) == charts.installed()
    assert json.loads(charts.described(one)) == [row] and charts.draw([row], charts.THEMES["light"]) != one


def test_without_the_same_matplotlib_the_figures_of_a_chart_are_compared(root, monkeypatch):
    monkeypatch.setattr(charts, "installed", lambda: None)
    assert cards.main(["--check"], root) == 0
    edit(root, CHARTED, ours=False, tokens_per_s=0.99)
    with pytest.raises(SystemExit, match="shows other figures: install matplotlib"):
        cards.main(["--check"], root)


def test_sizes_of_a_card_are_those_of_the_tests():
    (llama,) = (family for family in families() if family.model_type == "llama")
    text = (ROOT / "docs" / "models" / "llama.md").read_text("utf-8")
    assert all(f"| {size.name} | {size.parameters:,} |" in text for size in llama.sizes)
    assert {family.model_type for family in families() if not family.sizes} <= {"gemma4_unified"}
