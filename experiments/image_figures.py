"""What notebook 24 shows of the Tiny ImageNet model that comes with the library, on
pictures that it was not trained on, into results/tiny-imagenet.

metrics.json: errors of all test pictures, beside the transformer of the pair and the
simple fills. dynamics.json: energy and error far past the training depth, and how far
attention and memory bring hidden patches in each step. validation.jpg: the paper's
Figure 3 on twelve validation pictures, with the rivals' completions. worst.jpg,
best.jpg: its Figures 9 and 10. All show every picture twice: all of its tokens decoded,
as in the paper, and with the pixels of the open patches pasted back.

results/image-memories.json: which memories of the models of image_pair.py still act, of
those whose weights are kept. A memory acts if it pulls on some token at some step, on
six photographs with fifty sets of hidden patches each. Beside it: how many memories are
shorter than 0.01, their thresholds, and the sum of rate times weight decay over the
training.

    python experiments/image_figures.py
"""

import json
from dataclasses import asdict

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from flax import nnx
from runs import RESULTS, keep, parameters_of, read
from safetensors import safe_open
from ship_model import RIVAL, SHIPPED, row_of
from tqdm import tqdm

from et_nbdev.training import OptimConfig, learning_rate
from et_nbdev.vision import data
from et_nbdev.vision.model import from_pretrained, load_model
from et_nbdev.vision.train import evaluate, evaluate_fill, held_out_batches, summarize

OUT = RESULTS / "tiny-imagenet"
HIDDEN = np.float32([0.80, 0.72, 0.90])
STEPS = 200


# --- numbers ---


@nnx.jit
def follow(model, images, occluded):
    """Means over a batch, at every time: energy, errors of hidden and open patches; and
    for each step of the trained descent, how far it and each half of it alone bring the
    hidden tokens towards the last ones. Also how many pictures' energy the step before
    has raised.
    """
    c = model.config
    patches = data.patchify(data.normalize(images, c.mean, c.std), c.patch_size)
    trajectory = model.descend(patches, occluded, steps=STEPS, states=True)[1]
    total, states = trajectory.energies.total, trajectory.states
    hidden = lambda a: jnp.sum(jnp.where(occluded, a, 0)) / jnp.sum(occluded)
    last, norm = states[c.steps], lambda v: jnp.linalg.norm(v, axis=-1)

    def towards(at):
        """Signed lengths along the way to the last tokens, of g and of their patches;
        how long that way is, and the cosine between the halves.
        """
        x, t = at
        g, turning = model.block.norm(x), model.block.norm.turning
        sizes, found = model.solver.sizes(g, t), {}
        terms = model.block.attention, model.block.memory, model.block
        updates = [term.update(g) for term in terms]
        for space, seen in (("g", model.block.norm), ("patch", model.decode)):
            way = seen(last) - seen(x)
            moves = [seen(x + sizes * turning(x, u)) - seen(x) for u in updates]
            for name, move in zip(("attention", "memory", "both"), moves):
                along = jnp.sum(move * way, -1) / norm(way)
                found[f"{name}_towards_{space}"] = hidden(along)
            cosine = jnp.sum(moves[0] * moves[1], -1) / norm(moves[0]) / norm(moves[1])
            found[f"way_{space}"] = hidden(norm(way))
            found[f"halves_cosine_{space}"] = hidden(cosine)
        return found

    def read(x):
        error = jnp.mean((model.decode(x) - patches) ** 2, -1)
        shown = jnp.sum(jnp.where(occluded, 0, error)) / jnp.sum(~occluded)
        return {"mse": hidden(error), "mse_open": shown}

    rises = jnp.diff(total, axis=0) > 1e-6 * jnp.abs(total[:-1])
    rises = jnp.concatenate([jnp.zeros_like(rises[:1]), rises])
    rows = jax.lax.map(read, states)
    rows |= jax.lax.map(towards, (states[: c.steps], jnp.arange(c.steps)))
    return rows | {"energy": total.mean(-1), "raised": rises.sum(-1)}


def dynamics(model, images, pictures=500) -> dict:
    c = model.config
    drawn = dict(limit=pictures, batch_size=50)
    held_out = held_out_batches(images, c, c.num_tokens // 2, **drawn)
    follow_on = lambda x, o: follow(model, jnp.asarray(x), jnp.asarray(o))
    rows = [follow_on(*of) for of in tqdm(held_out, "dynamics", total=pictures // 50)]
    mean = lambda name: np.mean([row[name] for row in rows], 0).astype(float).tolist()
    found = {name: mean(name) for name in rows[0] if name != "raised"}
    found["raised"] = np.sum([row["raised"] for row in rows], 0).tolist()
    about = {"pictures": pictures, "split": images.split}
    return {"step": list(range(STEPS + 1)), **found, **about}


def command(row: dict) -> str:
    "What makes such a run of image_pair.py."
    decay = row["config"]["optim"]["weight_decay"]
    own = "" if decay == OptimConfig.weight_decay else f" --weight-decay {decay:g}"
    return (
        f"python experiments/image_pair.py --only {row['name']} --steps {row['steps']}"
        f" --lr {row['lr']:g} --seeds {row['seed']}{own}"
    )


def about(row: dict) -> dict:
    "What the model's card says of a run."
    kept = "run seed best_step test_mse seconds precision commit device cores jax date steps"
    return {name: row[name] for name in kept.split()} | {"command": command(row)}


def all_seeds(run: str) -> list[dict]:
    "The rows of a run, and of those that differ from it in their seed."
    return read(RESULTS, f"{run.rpartition('-')[0]}-[0-9].json")


def note(own: dict) -> str:
    "Which steps raised the energy, and what the rival had."
    rival = json.loads((RIVAL / "config.json").read_text())
    errors = sorted(row["validation_mse"] for row in all_seeds(rival["run"]))
    place = errors.index(rival["validation_mse"]) + 1
    row, seed = row_of(rival["run"]), own["seed"]
    others = [str(r["steps_up"]) for r in all_seeds(own["run"]) if r["seed"] != seed]
    decay = row["config"]["optim"]["weight_decay"]
    return (
        f"Steps of a descent that raised the energy: {own['steps_up']} of"
        f" {own['steps_observed']:,} on validation pictures; with the other seeds"
        f" {', '.join(others)}. Other work ran on the machine of the training:"
        " its time is an upper bound. The transformer below has the"
        f" weights of step {rival['step']:,}, trained at its own rate, {row['lr']:g}, with"
        f" a weight decay of {decay:g}; it is seed {rival['seed']}, number {place} of"
        f" {len(errors)} on validation."
    )


def scores(model, rival, images) -> dict:
    "Errors of both models and of all fills on all pictures, as `summarize` has them."
    n = model.config.num_tokens // 2
    errors = {"Energy Transformer": evaluate(model, images, n)}
    errors["weight-shared transformer"] = evaluate(rival, images, n)
    for name, fill in tqdm(data.FILLS.items(), "fills"):
        errors[name] = evaluate_fill(fill, images, model.config, n)
    with safe_open(SHIPPED, "np") as file:
        row = row_of(json.loads(file.metadata()["meta"])["run"])
    found = {"forward_flops": model.flops, "parameters": parameters_of(model)}
    found |= {"data": "tiny-imagenet", "split": images.split, "note": note(row)}
    found["config"] = row["config"] | {"model": asdict(model.config)}
    training = {"training_seconds": row["seconds"], "training": [about(row)]}
    return summarize(errors) | found | training


# --- pictures ---


def decoded(model, images, occluded):
    "Pictures in [0, 1] whose tokens all come out of the decoder, the open ones too."
    c = model.config
    patches = data.patchify(data.normalize(images, c.mean, c.std), c.patch_size)
    patches = model(patches, jnp.asarray(occluded))
    pixels = data.unpatchify(patches, c.image_size, c.patch_size)
    return np.clip(data.denormalize(pixels, c.mean, c.std), 0, 1)


def rows_of(model, images, occluded, rival=None) -> dict[str, np.ndarray]:
    "What a figure shows of each picture, from top to bottom."
    c, given = model.config, images / 255
    wide = np.broadcast_to(occluded[..., None], (*occluded.shape, c.patch_dim))
    hidden = data.unpatchify(wide, c.image_size, c.patch_size)
    paste = lambda completed: np.where(hidden, np.clip(completed, 0, 1), given)
    rows = {"occluded": np.where(hidden, HIDDEN, given)}
    rows["all tokens\ndecoded"] = whole = decoded(model, images, occluded)
    rows["open pixels\npasted"] = paste(whole)
    if rival is not None:
        rows["transformer,\npasted"] = paste(decoded(rival, images, occluded))
        filled = data.fill_biharmonic(images, occluded, c.patch_size)
        rows["biharmonic"] = paste(filled)
    return rows | {"original": given}


def gallery(path, rows, titles=()):
    "Rows of pictures, with their names, as a JPEG."
    columns = len(rows["original"])
    size = columns, len(rows) + 0.3 * bool(len(titles))
    fig, axes = plt.subplots(len(rows), columns, figsize=size)
    for axs, (name, row) in zip(axes, rows.items()):
        for ax, picture in zip(axs, row):
            ax.imshow(picture, interpolation="nearest")
            ax.set(xticks=[], yticks=[])
            ax.spines[:].set_visible(False)
        axs[0].set_ylabel(name, fontsize=8)
    for ax, title in zip(axes[0], titles):
        ax.set_title(title, fontsize=8)
    fig.tight_layout(pad=0.2)
    fig.savefig(path, dpi=100, pil_kwargs=dict(quality=75))
    plt.close(fig)


def extremes(model, images, pictures=5000, columns=8):
    """The pictures with the largest and the smallest mean error over ten occlusions,
    and the occlusion of seed 0.
    """
    n = model.config.num_tokens // 2
    seeds = tqdm(range(10), "worst and best")
    each = [evaluate(model, images, n, seed=s, limit=pictures) for s in seeds]
    mean = np.mean(each, 0)
    held_out = held_out_batches(images, model.config, n, limit=pictures)
    occlusions = np.concatenate([o for _, o in held_out])
    order = np.argsort(mean)
    for name, chosen in (("best", order[:columns]), ("worst", order[::-1][:columns])):
        rows = rows_of(model, images[chosen], occlusions[chosen])
        gallery(OUT / f"{name}.jpg", rows, [f"{mean[i]:.3f}" for i in chosen])


# --- memories ---


@nnx.jit
def largest_pull(model, patches, hidden):
    "Of each memory, on any token on the way: |h| times the length of ξ."
    memory = model.block.memory
    states = model.descend(patches, hidden, states=True)[1].states[:-1]
    h = lambda x: jnp.abs(memory.hidden(model.block.norm(x))).max((0, 1))
    return jax.lax.map(h, states).max(0) * jnp.linalg.norm(memory.xi[...], axis=1)


def count(path, patches, hidden):
    model = load_model(path)
    memory, pull = model.block.memory, np.asarray(largest_pull(model, patches, hidden))
    length = np.linalg.norm(np.asarray(memory.xi[...]), axis=1)
    lost = np.asarray(memory.threshold[...])[length < 0.01]
    run = json.loads(path.with_suffix(".json").read_text())
    optim = OptimConfig(**run["config"]["optim"])
    rate = jax.vmap(learning_rate(optim))(jnp.arange(optim.steps))
    row = {"run": f"{path.parent.name}/{path.stem}", "memories": len(pull)}
    row["pull"] = int((pull > 0).sum())
    row["pull_over_a_hundredth"] = int((pull > 0.01 * pull.max()).sum())
    row |= {"median_length": float(np.median(length)), "short": len(lost)}
    row["thresholds_of_short"] = [float(f(lost)) for f in (np.min, np.max) if len(lost)]
    return row | {"decayed": optim.weight_decay * float(rate.sum())}


def memories():
    folders = ("image-pair", "image-rates")
    paths = [p for f in folders for p in RESULTS.glob(f"{f}/*-et-*.safetensors")]
    c = load_model(paths[0]).config
    photos, n = np.repeat(data.photographs(c.image_size), 50, axis=0), c.num_tokens
    patches = data.patchify(data.normalize(photos, c.mean, c.std), c.patch_size)
    hidden = data.occlude(jax.random.key(0), len(photos), n, n // 2)[0]
    return [count(path, patches, hidden) for path in sorted(paths)]


def main():
    model, rival = from_pretrained("tiny-imagenet"), from_pretrained(RIVAL)
    c = model.config
    test = data.load_images("tiny-imagenet", "test", size=c.image_size)
    keep(OUT / "dynamics.json", dynamics(model, test))
    validation = data.load_images("tiny-imagenet", "validation", size=c.image_size)
    drawn = held_out_batches(validation, c, c.num_tokens // 2, batch_size=12)
    some, occluded = next(drawn)
    gallery(OUT / "validation.jpg", rows_of(model, some, occluded, rival))
    extremes(model, validation)
    keep(OUT / "metrics.json", scores(model, rival, test))
    text = json.dumps(memories(), indent=1, ensure_ascii=False) + "\n"
    (RESULTS / "image-memories.json").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
