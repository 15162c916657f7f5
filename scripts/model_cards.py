"""results/model_cards.md, and the same page of the site: what is known of each set of weights
that comes with the library. Every number is read from the weights or from results/.

    python scripts/model_cards.py
"""

import json

import numpy as np
from modules import ROOT
from records import one, read, table
from safetensors import safe_open

from et_nbdev.vision.model import newer

# What no file holds: what the pictures are, and under which terms.
DATA = {
    "tiny-imagenet": (
        "Tiny ImageNet (200 classes of ImageNet, 64×64), 70,000 of a random 75,000 of its"
        " 100,000 training pictures",
        "ImageNet's terms of access: pictures of many owners, for non-commercial"
        " research and education",
    ),
    "cifar10": (
        "CIFAR-10 (Krizhevsky, 2009; 32×32), re-encoded in JPEG",
        "none stated; published for research",
    ),
    "digits": (
        "scikit-learn's handwritten digits (Alpaydin and Kaynak, 1998; 8×8, gray)",
        "CC BY 4.0 (UCI, Optical Recognition of Handwritten Digits)",
    ),
}


def weights_of(path):
    "What the file says of itself, and its sizes: parameters, and those in maps of steps."
    with safe_open(path, "np") as file:
        shapes = {k: file.get_slice(k).get_shape() for k in file.keys()}
        meta = json.loads(file.metadata()["meta"])
    sizes = {k: int(np.prod(shape)) for k, shape in shapes.items()}
    maps = sum(n for k, n in sizes.items() if k.endswith("solver.W"))
    return meta, sum(sizes.values()), maps


def rival_of(stem, metrics):
    "Parameters of the transformer that was trained beside a model, and its score."
    folder = stem.replace("tiny-imagenet", "tiny-imagenet-transformer")
    name = "weight-shared transformer"
    if name in metrics["masked_patch_mse"]:
        row = one(one(f"{folder}/config")["run"])
        return row["parameters"], score(metrics, name)
    if folder != stem:
        other = one(f"{folder}/metrics")
        return other["parameters"], score(other, name)
    return None


def seeds(metrics):
    "Which seed, and how far the runs of all seeds lie apart."
    own = metrics["config"]["seed"]
    rows = []
    if "training" in metrics:
        stem = metrics["training"][-1]["run"].rpartition("-")[0]
        rows = read(".", f"{stem}-[0-9].json")
    if len(rows) < 2:
        return f"one run, seed {own}"
    errors = [row["test_mse"] for row in rows]
    assert min(rows, key=lambda row: row["validation_mse"])["seed"] == own
    return (
        f"seed {own}, of {len(rows)} the best on validation; they ended at"
        f" {np.mean(errors):.4f} ± {np.std(errors, ddof=1):.4f} (test pictures)"
    )


def stages(meta, metrics):
    "The trainings that the weights come from, the first one first."
    alone = metrics | {"steps": meta["step"], "seconds": metrics["training_seconds"]}
    rows = metrics.get("training", [alone])
    batch = {"batch_size": metrics["config"]["batch_size"]}
    return [row | batch | {"minutes": row["seconds"] / 60} for row in rows]


def joined(stages, text):
    "What `text` says of each, one after the other."
    return "; then ".join(text.format(**stage) for stage in stages)


def score(metrics, name):
    value, error = metrics["masked_patch_mse"][name], metrics["standard_error"][name]
    return f"{value:.3f} ± {error:.3f}"


def scores(metrics, rival):
    found = {name: score(metrics, name) for name in metrics["masked_patch_mse"]}
    if rival:
        found["weight-shared transformer"] = rival[1]
    order = sorted(found.items(), key=lambda item: float(item[1].split()[0]))
    return table(("", "error"), order)


def model_of(config):
    steps = "a size for every channel, from a matrix per step"
    more = {
        "tiny-imagenet": f" learned steps with {steps}, relative positions, normalized"
        " heads, thresholds and signs"
    }
    return (
        f"an Energy Transformer: patches {config['patch_size']}×{config['patch_size']},"
        f" D = {config['dim']}, {config['num_heads']} heads of {config['head_dim']},"
        f" {config['num_memories']} memories, T = {config['steps']},"
        + more.get(newer(config)["recipe"], f" α = {config['step_size']:g}")
    )


def card(path):
    meta, count, maps = weights_of(path)
    metrics = one(f"{path.stem}/metrics")
    config, model = metrics["config"], meta["config"]["model"]
    data, terms = DATA[metrics["data"]]
    rival, runs = rival_of(path.stem, metrics), stages(meta, metrics)
    seen = meta["step"] * config["batch_size"]
    size, color = model["image_size"], "gray" if model["channels"] == 1 else "color"
    mapped = f", {maps:,} of them in the maps of its step sizes" if maps else ""
    budget = "{steps:,} steps of {batch_size} pictures in {minutes:.0f} minutes on"
    budget = joined(runs, budget + " {device}, {cores} cores")
    about = {
        "model": f"{model_of(model)}; {count:,} parameters{mapped}",
        "input": f"{size}×{size} in {color}, some hidden",
        "data": f"the training split of {data}",
        "terms of the data": terms,
        "budget": f"{budget}; {seen:,} pictures in all",
        "seeds": seeds(metrics),
        "chosen": joined(runs, "the weights of step {best_step:,}, on validation"),
        "command": joined(runs, "`{command}`"),
        "code": joined(runs, "commit {commit}, JAX {jax}, {date:.10}"),
        **LICENCE,
    }
    shown = f"{metrics['pictures']:,} pictures of the {metrics['split']} split"
    note = metrics.get("note", "").rstrip(".")
    yield f'## {path.stem}\n\n`from_pretrained("{path.stem}")`'
    yield table(("", ""), about.items())
    if note:
        yield f"{note}."
    yield (
        f"Mean squared error on the hidden half of {shown}, in units of the pixels'"
        " variance (lower is better); ± is the standard error over pictures, not over"
        " runs:"
    )
    yield scores(metrics, rival)
    if rival:
        yield (
            "The weight-shared transformer has about as many operations, and"
            f" {rival[0] / count:.2f} times the parameters."
        )


def puzzle_card(path):
    "Of weights for number puzzles; all seeds were trained alike, and seed 0 is shipped."
    variant = {"sudoku-4": "energy-4", "sudoku-6": "units-6"}[path.stem]
    runs = read("puzzle", f"{variant}-seed*.json")
    run, c, T = runs[0], runs[0]["config"], runs[0]["config"]["steps"]
    about = {
        "model": f"`PuzzleTransformer`: D = {c['dim']}, {c['num_heads']} heads of"
        f" {c['head_dim']}, half of them repelling, {c['num_memories']} memories,"
        f" T = {T}; {run['parameters']:,} parameters",
        "data": "puzzles of its own generator"
        + ", on half of the 288 boards" * (c["n"] == 4),
        "budget": f"{run['steps']:,} steps of {run['batch']} boards in"
        f" {run['seconds'] / 60:.0f} minutes on {run['device']}, {run['cores']} cores",
        "seeds": f"seed 0, of {len(runs)}; none was chosen",
        "command": f"`python experiments/puzzle.py {variant} --seeds 0`",
        "code": f"commit {run['commit']}, JAX {run['jax']}, {run['date']:.10}",
        **LICENCE,
    }
    rows = []
    for level, tested in run["tests"].items():
        right = np.array([r["tests"][level]["first"] for r in runs]) * 100
        at = [right[:, t * T - 1] for t in (1, 8)]
        up, of = tested["up_all"]
        told = (f"{each[0]:.1f} (all: {each.mean():.1f})" for each in at)
        rows.append((level, *told, f"{up} of {of:,}"))
    yield f'## {path.stem}\n\n`from_pretrained("{path.stem}")` of `et_nbdev.puzzle`'
    yield table(("", ""), about.items())
    yield (
        "Percent of 500 puzzles right as a whole, on boards that no training saw (its"
        f" settings were chosen on {'all' if c['n'] == 4 else 200} of them); in brackets"
        " the mean of all seeds. A search solves all of them."
    )
    steps = f"after {T} steps", f"after {8 * T} steps"
    yield table(("givens", *steps, "steps in which E rose"), rows)


LICENCE = {"licence of the weights": "Apache-2.0, that of the library"}
INTRODUCTION = """\
The library brings these weights for demonstrations, tests and teaching: a block whose
descent can be watched on real pictures. They are small, and meant for that alone."""

LIMITS = """\
## Limits of all of them

- What they fill in is plausible, not true. It shows neither who somebody is nor what
  was covered: base no decision that matters on it.
- Their energy is not a measure of quality. Descending on beyond the T steps of the
  training lowers it further and makes the pictures worse.
- On the digits, seven nearest neighbors among the training pictures are better.
- They predict means, so hidden parts are blurred, large ones most.
- They know one size of picture and one size of patch (`complete_large` covers larger
  pictures with windows), and were trained with half of the patches hidden at random; a
  large hole in one place is another task.
- Their pictures are those of their data, with all the biases of these: what is rare
  there comes out badly. No bias was measured.
- All but `tiny-imagenet` are single runs, so a difference between two of these models
  may be chance.
"""


def cards():
    "The text below the title."
    pictures, boards = (
        sorted((ROOT / "et_nbdev" / folder).glob("*.safetensors"))
        for folder in ("vision/weights", "weights")
    )
    each = [*map(card, pictures), *map(puzzle_card, boards)]
    return "\n\n".join([INTRODUCTION, *(part for c in each for part in c), LIMITS])


def page():
    "The page of the site."
    return (
        '---\ntitle: "Model cards"\ndescription: "The weights that come with the'
        ' library: data, budget, seeds, limits, licence."\nrepo-actions: false\n---\n\n'
        + cards()
    )


if __name__ == "__main__":
    (ROOT / "results/model_cards.md").write_text(f"# Model cards\n\n{cards()}", "utf-8")
