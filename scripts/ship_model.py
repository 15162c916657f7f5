"""Two runs of experiments/ become what the library ships and its chapters draw: an
Energy Transformer as `from_pretrained("tiny-imagenet")`, and a transformer of as many
operations beside its results, for comparison. Both are named by the files of their
results, which have the weights beside them.

    python scripts/ship_model.py results/image-pair/NAME.json \\
        results/image-pair/RIVAL.json
    python experiments/image_figures.py       # then, what is drawn and measured from them
    python scripts/front_figures.py
    python scripts/browser_models.py
    python scripts/model_cards.py
"""

import argparse
import json
from dataclasses import asdict
from pathlib import Path

from et_nbdev.vision.model import load_model, save_model

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "results"
SHIPPED = ROOT / "et_nbdev/vision/weights/tiny-imagenet.safetensors"
RIVAL = RESULTS / "tiny-imagenet-transformer"


def stages(run: str) -> list[dict]:
    """The rows of a run, as `folder/name` below results/, and of the runs that its
    weights come from, the first one first; each with its `run`.
    """
    row = json.loads((RESULTS / f"{run}.json").read_text()) | {"run": run}
    before = stages(f"image-pair/{row['from']}") if "from" in row else []
    return [*before, row]


def chosen(file: Path):
    "The model of a run, and what the file of its weights says of the run."
    run = file.resolve().relative_to(RESULTS).with_suffix("").as_posix()
    rows = stages(run)
    kept = ("run", "seed", "commit", "validation_mse", "test_mse")
    meta = {key: rows[-1][key] for key in kept}
    meta["step"] = sum(row["best_step"] for row in rows)
    print(f"{run}: test error {meta['test_mse']:.4f}")
    return load_model(RESULTS / f"{run}.safetensors"), meta


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path, help="of the model to ship: a result's file")
    parser.add_argument("rival", type=Path, help="of the transformer, likewise")
    args = parser.parse_args()
    (model, about), (rival, theirs) = chosen(args.run), chosen(args.rival)
    blocks = model.config.block, rival.config.block
    if blocks != ("energy", "transformer"):
        parser.error(f"expected an Energy Transformer and a transformer, got {blocks}")
    save_model(SHIPPED, model, about)
    save_model(RIVAL / "model.safetensors", rival, theirs)
    config = json.dumps({**theirs, "model": asdict(rival.config)}, indent=2) + "\n"
    (RIVAL / "config.json").write_text(config)


if __name__ == "__main__":
    main()
