"""results/model_cards.md, and the same page of the site: what is known of each set of weights
that comes with the library. Every number is read from the weights or from results/; the
text is in scripts/pages.

    python scripts/model_cards.py
"""

import json

import numpy as np
from modules import ROOT
from records import NAMES, filled, one, read, spread, table
from safetensors import safe_open

from et_nbdev.vision.model import newer

RIVAL = "weight-shared transformer"
NEWER = (  # than α, in a model of this library's own recipe
    "learned steps with a size for every channel, from a matrix per step, relative"
    " positions, normalized heads, thresholds and signs"
)


def weights_of(path):
    "What the file says of itself, and its sizes: parameters, and those in maps of steps."
    with safe_open(path, "np") as file:
        shapes = {k: file.get_slice(k).get_shape() for k in file.keys()}
        meta = json.loads(file.metadata()["meta"])
    sizes = {k: int(np.prod(shape)) for k, shape in shapes.items()}
    maps = sum(n for k, n in sizes.items() if k.endswith("solver.W"))
    return meta, sum(sizes.values()), maps


def scores_of(name, metrics, count):
    "The errors, the lowest first, and how large the transformer beside the model is."
    found = [(metrics, n) for n in metrics["masked_patch_mse"]]
    folder, rival = name.replace("tiny-imagenet", "tiny-imagenet-transformer"), None
    if RIVAL in metrics["masked_patch_mse"]:
        rival = one(one(f"{folder}/config")["run"])
    elif folder != name:
        rival = one(f"{folder}/metrics")
        found.append((rival, RIVAL))
    value = lambda m, n, to="masked_patch_mse": f"{m[to][n]:.3f}"
    rows = [(n, value(m, n), value(m, n, "standard_error")) for m, n in found]
    rows = sorted(rows, key=lambda row: float(row[1]))
    shown = table(("", "error"), [(n, f"{mse} ± {error}") for n, mse, error in rows])
    if rival:
        times = rival["parameters"] / count
        shown += f"\n\nThe {RIVAL} has about as many operations, and"
        shown += f" {times:.2f} times the parameters."
    return shown


def seeds(metrics):
    "Which seed, and how far the runs of all seeds lie apart."
    own, rows = metrics["config"]["seed"], []
    if "training" in metrics:
        rows = read(
            ".", f"{metrics['training'][0]['run'].rpartition('-')[0]}-[0-9].json"
        )
    if len(rows) < 2:
        return f"one run, seed {own}"
    assert min(rows, key=lambda row: row["validation_mse"])["seed"] == own
    return (
        f"seed {own}, of {len(rows)} the best on validation; they ended at"
        f" {spread([row['test_mse'] for row in rows])} (test pictures)"
    )


def card(path):
    (meta, count, maps), name = weights_of(path), path.stem
    metrics = one(f"{name}/metrics")
    config, c = metrics["config"], meta["config"]["model"]
    p, batch = c["patch_size"], config["batch_size"]
    steps, seconds = config["optim"]["steps"], metrics["training_seconds"]
    alone = metrics | {"steps": steps, "seconds": seconds}
    (run,) = metrics.get("training", [alone])
    kind = NEWER if newer(c)["recipe"] == "tiny-imagenet" else f"α = {c['step_size']:g}"
    own = f" {maps:,} of them in the maps of its step sizes"
    text = filled("card", {
        **run,
        "name": name,
        "model": f"an Energy Transformer: patches {p}×{p}, D = {c['dim']},"
        f" {c['num_heads']} heads of {c['head_dim']}, {c['num_memories']} memories,"
        f" T = {c['steps']}, {kind}; {count:,} parameters" + f",{own}" * bool(maps),
        "size": c["image_size"],
        "color": "gray" if c["channels"] == 1 else "color",
        **NAMES["data"][metrics["data"]],
        "steps": f"{run['steps']:,}",
        "batch": batch,
        "minutes": f"{run['seconds'] / 60:.0f}",
        "seen": f"{run['steps'] * batch:,}",
        "seeds": seeds(metrics),
        "best_step": f"{run['best_step']:,}",
        "day": run["date"][:10],
        "note": metrics.get("note", "").rstrip(".") + ".",
        "shown": f"{metrics['pictures']:,}",
        "split": metrics["split"],
        "scores": scores_of(name, metrics, count),
    })  # fmt: skip
    return text.replace("\n.\n", "")  # where there is no note


def puzzle_card(path):
    "Of weights for number puzzles; all seeds were trained alike, and seed 0 is shipped."
    variant = {"sudoku-4": "energy-4", "sudoku-6": "rest-6"}[path.stem]
    runs = read("puzzle", f"{variant}-seed*.json")
    run, c, T, rows = runs[0], runs[0]["config"], runs[0]["config"]["steps"], []
    for level, tested in run["tests"].items():
        right = np.array([r["tests"][level]["first"] for r in runs]) * 100
        at = (right[:, t * T - 1] for t in (1, 8))
        up, of = tested["up_all"]
        told = (f"{each[0]:.1f} (all: {each.mean():.1f})" for each in at)
        rows.append((level, *told, f"{up} of {of:,}"))
    steps = f"after {T} steps", f"after {8 * T} steps"
    before = run["changes"].get("after")
    before = f"the run `{before}-{c['n']}`, then " if before else ""
    return filled("card-puzzle", {
        **c,
        "before": before,
        **run,
        "name": path.stem,
        "T": T,
        "count": f"{run['parameters']:,}",
        "half": ", on half of the 288 boards" * (c["n"] == 4),
        "updates": f"{run['steps']:,}",
        "minutes": f"{run['seconds'] / 60:.0f}",
        "runs": len(runs),
        "day": run["date"][:10],
        "scores": table(("givens", *steps, "steps in which E rose"), rows),
    })  # fmt: skip


def cards():
    "The text below the title."
    pictures, boards = (
        sorted((ROOT / "et_nbdev" / folder).glob("*.safetensors"))
        for folder in ("vision/weights", "weights")
    )
    each = [*map(card, pictures), *map(puzzle_card, boards)]
    return filled("model-cards", {"cards": "\n".join(each).rstrip()})


def page():
    "The page of the site."
    return filled("models", {"cards": cards()})


if __name__ == "__main__":
    (ROOT / "results/model_cards.md").write_text(f"# Model cards\n\n{cards()}", "utf-8")
