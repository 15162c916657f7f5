"""results/model_cards.md, and the same page of the site: what is known of each set of weights
that comes with the library. Every number is read from the weights or from results/.

    python scripts/model_cards.py
"""

import json
from pathlib import Path

import numpy as np
from safetensors import safe_open

from et_nbdev.vision.model import newer

ROOT = Path(__file__).resolve().parent.parent
WEIGHTS = ROOT / "et_nbdev/vision/weights"

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
    "(what the file says of itself, how many parameters)"
    with safe_open(path, "np") as file:
        meta = json.loads(file.metadata()["meta"])
        count = sum(int(np.prod(file.get_slice(k).get_shape())) for k in file.keys())
    return meta, count


def maps_of(path):
    "How many of the parameters are in the maps of the step sizes, if there are maps."
    with safe_open(path, "np") as file:
        maps = [k for k in file.keys() if k.endswith("solver.W")]
        count = sum(int(np.prod(file.get_slice(k).get_shape())) for k in maps)
    return f", {count:,} of them in the maps of its step sizes" if maps else ""


def kept(name):
    return json.loads((ROOT / "results" / f"{name}.json").read_text(encoding="utf-8"))


def rival_of(stem, metrics):
    "Parameters of the transformer that was trained beside a model, and its score."
    folder = stem.replace("tiny-imagenet", "tiny-imagenet-transformer")
    name = "weight-shared transformer"
    if name in metrics["masked_patch_mse"]:
        row = kept(kept(f"{folder}/config")["run"])
        return row["parameters"], score(metrics, name)
    if folder != stem:
        other = kept(f"{folder}/metrics")
        return other["parameters"], score(other, name)
    return None


def alike(row, other):
    "Do the rows of two runs differ in their seed alone?"
    unseeded = [r["config"] | {"seed": None} for r in (row, other)]
    return unseeded[0] == unseeded[1] and all(
        row.get(key) == other.get(key) for key in ("optim", "price")
    )


def seeds(metrics):
    "Which seed, and how far the runs of all seeds lie apart."
    own = f"seed {metrics['config']['seed']}"
    if "training" not in metrics:
        return f"one run, {own}"
    run = metrics["training"][-1]["run"]
    paths = (ROOT / "results" / run).parent.glob("*.json")
    rows = [json.loads(path.read_text()) for path in paths]
    rows = [row for row in rows if alike(row, kept(run))]
    if len(rows) == 1:
        return f"one run, {own}"
    errors = [row["test_mse"] for row in rows]
    best = min(rows, key=lambda row: row["validation_mse"])
    assert f"seed {best['seed']}" == own
    return (
        f"{own}, of {len(rows)} the best on validation; they ended at"
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


def table(rows):
    return "\n".join(["| | |", "|---|---|", *(f"| {a} | {b} |" for a, b in rows)])


def scores(metrics, rival):
    found = {name: score(metrics, name) for name in metrics["masked_patch_mse"]}
    if rival:
        found["weight-shared transformer"] = rival[1]
    order = sorted(found.items(), key=lambda item: float(item[1].split()[0]))
    rows = [f"| {name} | {value} |" for name, value in order]
    return "\n".join(["| | error |", "|---|---|", *rows])


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
    meta, count = weights_of(path)
    metrics = kept(f"{path.stem}/metrics")
    config, model = metrics["config"], meta["config"]["model"]
    data, terms = DATA[metrics["data"]]
    rival, runs = rival_of(path.stem, metrics), stages(meta, metrics)
    seen = meta["step"] * config["batch_size"]
    size, color = model["image_size"], "gray" if model["channels"] == 1 else "color"
    note = metrics.get("note", "").rstrip(".")
    about = [
        ("model", model_of(model) + f"; {count:,} parameters" + maps_of(path)),
        ("input", f"{size}×{size} in {color}, some hidden"),
        ("data", f"the training split of {data}"),
        ("terms of the data", terms),
        (
            "budget",
            joined(
                runs,
                "{steps:,} steps of {batch_size} pictures in {minutes:.0f} minutes on"
                " {device}, {cores} cores",
            )
            + f"; {seen:,} pictures in all",
        ),
        ("seeds", seeds(metrics)),
        ("chosen", joined(runs, "the weights of step {best_step:,}, on validation")),
        ("command", joined(runs, "`{command}`")),
        ("code", joined(runs, "commit {commit}, JAX {jax}, {date:.10}")),
        ("licence of the weights", "Apache-2.0, that of the library"),
    ]
    shown = f"{metrics['pictures']:,} pictures of the {metrics['split']} split"
    parts = [
        f"## {path.stem}",
        f'`from_pretrained("{path.stem}")`',
        table(about),
        f"{note}." if note else "",
        f"Mean squared error on the hidden half of {shown}, in units of the pixels'"
        " variance (lower is better); ± is the standard error over pictures, not over"
        " runs:",
        scores(metrics, rival),
    ]
    if rival:
        more = rival[0] / count
        parts.append(
            "The weight-shared transformer has about as many operations, and"
            f" {more:.2f} times the parameters."
        )
    return "\n\n".join(filter(None, parts))


def puzzle_card(path):
    "Of weights for number puzzles; all seeds were trained alike, and seed 0 is shipped."
    n = path.stem.rpartition("-")[2]
    files = sorted((ROOT / "results/puzzle").glob(f"energy-{n}-seed*.json"))
    runs = [json.loads(file.read_text(encoding="utf-8")) for file in files]
    run, T = runs[0], runs[0]["config"]["steps"]
    about = [
        (
            "model",
            f"`PuzzleTransformer`: D = {run['config']['dim']},"
            f" {run['config']['num_heads']} heads of {run['config']['head_dim']}, half of"
            f" them repelling, {run['config']['num_memories']} memories, T = {T};"
            f" {run['parameters']:,} parameters",
        ),
        ("data", "puzzles of its own generator, on half of the 288 boards"),
        (
            "budget",
            f"{run['steps']:,} steps of {run['batch']} boards in"
            f" {run['seconds'] / 60:.0f} minutes on {run['device']}, {run['cores']} cores",
        ),
        ("seeds", f"seed 0, of {len(runs)}; none was chosen"),
        ("command", f"`python experiments/puzzle.py energy-{n} --seeds 0`"),
        ("code", f"commit {run['commit']}, JAX {run['jax']}, {run['date']:.10}"),
        ("licence of the weights", "Apache-2.0, that of the library"),
    ]
    rows = []
    for level in run["tests"]:
        right = np.array([r["tests"][level]["first"] for r in runs]) * 100
        at = [
            f"{right[0, t * T - 1]:.1f} (all: {right[:, t * T - 1].mean():.1f})"
            for t in (1, 8)
        ]
        up, of = run["tests"][level]["up_all"]
        rows.append(f"| {level} | {at[0]} | {at[1]} | {up} of {of:,} |")
    head = f"| givens | after {T} steps | after {8 * T} steps | steps in which E rose |"
    return "\n\n".join(
        [
            f"## {path.stem}",
            f'`from_pretrained("{path.stem}")` of `et_nbdev.puzzle`',
            table(about),
            "Percent of 500 puzzles right as a whole, on boards that no training saw; in"
            " brackets the mean of all seeds. A search solves all of them.",
            "\n".join([head, "|---|---|---|---|", *rows]),
        ]
    )


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
    each = [card(path) for path in sorted(WEIGHTS.glob("*.safetensors"))]
    puzzles = (ROOT / "et_nbdev/weights").glob("*.safetensors")
    each += [puzzle_card(path) for path in sorted(puzzles)]
    return "\n\n".join([INTRODUCTION, *each, LIMITS])


def page():
    "The page of the site."
    return (
        '---\ntitle: "Model cards"\ndescription: "The weights that come with the'
        ' library: data, budget, seeds, limits, licence."\nrepo-actions: false\n---\n\n'
        + cards()
    )


if __name__ == "__main__":
    (ROOT / "results/model_cards.md").write_text(f"# Model cards\n\n{cards()}", "utf-8")
