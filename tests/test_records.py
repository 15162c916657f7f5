"""What lessons and records tell of results/: the statistics, the pages, and the rules by
which the files were made.
"""

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
import records
from scipy import stats

ROOT = Path(__file__).resolve().parent.parent
FOLDS = ROOT / "results/graph-classification"


@pytest.mark.parametrize("name", records.PAGES)
def test_a_page_is_what_the_results_say(name):
    kept = (ROOT / f"nbs/records/{name}.md").read_text(encoding="utf-8")
    assert kept == records.page(name), "run `python scripts/records.py`"


def test_a_difference_is_paired_and_its_interval_students():
    a = {0: 0.3, 1: 0.5, 2: 0.4, 5: 9.0}
    b = {2: 0.1, 0: 0.1, 1: 0.2, 7: 9.0}
    rows = lambda values: {s: {"test": {"mse": v}} for s, v in values.items()}
    gap = records.Gap(rows(a), rows(b), "test.mse")
    each = [0.2, 0.3, 0.3]
    assert gap.n == 3 and gap.mean == pytest.approx(np.mean(each))
    low, high = stats.ttest_1samp(each, 0).confidence_interval(0.95)
    assert (gap.mean - gap.half, gap.mean + gap.half) == pytest.approx((low, high))
    assert gap.word == "higher"
    # Nadeau and Bengio: the variance of a mean grows from 1/n to 1/n + n_test/n_train
    wide = records.Gap(rows(a), rows(b), "test.mse", overlap=1.0)
    assert wide.half == pytest.approx(gap.half * (1 + 3) ** 0.5)
    single = records.Gap(rows({0: 0.3}), rows({0: 0.1}), "test.mse")
    assert single.word == "undecided" and "(one run)" in single.told()
    few, many = records.overlap(0.01), records.overlap(0.4)
    assert (few, many) == (pytest.approx(66), pytest.approx(1))


def test_a_table_takes_seeds_together():
    groups = {
        "x": {0: {"e": 0.1, "n": 5, "w": "a"}, 1: {"e": 0.3, "n": 5, "w": "a"}},
        "y": {0: {"e": 0.2, "n": 7, "w": None}},
    }
    found = records.dump("e:| n e:.1f w", groups, "name", {"− x": "x"}, "e")
    assert found.splitlines()[2:] == [
        "| x | 0.1 0.3 | 5 | 0.2 ± 0.1 | a | – |",
        "| y | 0.2 | 7 | 0.2 | – | +0.1 (one run) |",
    ]


# --- the rules of cross-validation ---


def broken(data, f, row):
    "The rules that the file of a test fold breaks."
    dealt = json.loads((FOLDS / "folds.json").read_text())[f"{data}/10"]
    labels = json.loads((FOLDS / "labels.json").read_text())[data]
    fold, truth = (np.array(list(map(int, text))) for text in (dealt, labels))
    whole = hashlib.sha256(bytes(fold.astype(np.uint8))).hexdigest()[:16]
    mine = truth[fold == f]
    trains = (fold != f) & (fold != (f + 1) % 10)
    most = np.bincount(truth[trains]).argmax()
    marks = [
        (c["validation_accuracy"], -c["validation_loss"]) for c in row["candidates"]
    ]
    right = int((np.array(row["predictions"]) == mine).sum())
    rules = {
        "folds": row["settings"]["folds"] == (dealt if len(dealt) < 1000 else whole),
        "graphs": row["test_graphs"] == len(mine) == len(row["predictions"]),
        "score": (row["test_correct"], row["test_accuracy"])
        == (right, right / len(mine)),
        "class": np.isclose(row["largest_class"], (mine == most).mean()),
        "choice": row["chosen"] == marks.index(max(marks)),
        "list": len(marks) == len(row["settings"]["candidates"]),
    }
    return [name for name, kept in rules.items() if not kept]


def test_every_fold_was_made_by_the_rules():
    found = records.folds()
    for (data, model), by in found.items():
        assert sorted(by) == list(range(10)), (data, model)
        for f, row in by.items():
            assert broken(data, f, row) == [], (data, model, f)
            assert row["settings"] == by[0]["settings"]
    row = found["MUTAG", "et"][0]
    lie = row | {"test_correct": row["test_correct"] + 1}
    assert broken("MUTAG", 0, lie) == ["score"]
    assert broken("MUTAG", 0, row | {"chosen": 1 - min(row["chosen"], 1)}) == ["choice"]


def test_all_models_have_the_same_budget():
    budgets, lists = {}, {}
    for (data, model), by in records.folds().items():
        s = by[0]["settings"]
        each = s["candidates"]
        fits = [(c["fit"]["epochs"], c["fit"]["batch_size"]) for c in each]
        if model != "et-paper":
            budgets.setdefault(data, []).append((s["folds"], s["seed"], fits))
        tried = [c["model"] | c["fit"] | {"epochs": 0} for c in each]
        lists.setdefault(model, []).append(tried)
    for alike in (*budgets.values(), *lists.values()):
        assert all(other == alike[0] for other in alike)


def test_the_best_runs_are_counted_from_their_weights():
    "The memories that act, as the lesson has them, are of files that are kept."
    for row in records.one("image-memories"):
        path = ROOT / f"results/{row['run']}.safetensors"
        assert path.is_file() and 0 < row["pull"] <= row["memories"]
        run = json.loads(path.with_suffix(".json").read_text())
        assert run["config"]["model"]["num_memories"] == row["memories"]
