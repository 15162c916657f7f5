"""Pictures in one file, to train where the data are not.

    python experiments/packed_pictures.py --data tiny-imagenet --pictures 50000

writes runs/tiny-imagenet-50000.npz: so many training pictures, chosen by a
shuffle with a fixed seed, and the first 1,000 of the validation and test splits, all of
them byte for byte as they are stored (a JPEG file, say), one after the other and
compressed, which takes what the files have in common: their headers.
`experiments/image_pair.py --data runs/tiny-imagenet-50000.npz` reads the file, and
needs Pillow alone to do so.
"""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from runs import RUNS, options

from et_nbdev.training import atomic_write
from et_nbdev.vision.data import Images, decode, load_images


def stored_bytes(images: Images, number: int) -> bytes:
    "A picture as it is stored. Raises ValueError for one without a file format."
    label, stored = images.fetch(images.rows[number : number + 1])[0]
    if isinstance(stored, Path):
        stored = stored.read_bytes()
    if not isinstance(stored, bytes):
        raise ValueError(f"images: {label} of {images.name!r} has no file format")
    return stored


def pack(path: Path, images: dict[str, Images], pictures: int, held_out=1000):
    "Write so many training pictures, and some of the other splits, to `path`."
    order = np.random.default_rng(0).permutation(len(images["train"]))
    first = range(held_out)
    arrays = {"shape": [images["train"].size, images["train"].channels]}
    for split, wanted in dict(
        train=order[:pictures], validation=first, test=first
    ).items():
        files = [
            stored_bytes(images[split], int(n)) for n in wanted[: len(images[split])]
        ]
        arrays[split] = np.frombuffer(b"".join(files), np.uint8)
        arrays[f"{split}_ends"] = np.cumsum([len(file) for file in files])
    with atomic_write(path) as temporary, open(temporary, "wb") as file:
        np.savez_compressed(file, **arrays)


def unpack(path: Path | str) -> dict[str, np.ndarray]:
    "The pictures of a packed file by split, decoded: uint8 (n, S, S, C)."
    found = {}
    with np.load(path, allow_pickle=False) as arrays, ThreadPoolExecutor() as pool:
        size, channels = arrays["shape"].tolist()
        read = lambda stored: decode(stored.tobytes(), size, channels)
        for split in ("train", "validation", "test"):
            files = np.split(arrays[split], arrays[f"{split}_ends"][:-1])
            found[split] = np.stack(list(pool.map(read, files)))
    return found


def main():
    parser = options(__doc__)
    add = parser.add_argument
    add("--data", default="tiny-imagenet", help="what load_images takes")
    add("--pictures", type=int, default=50_000, help="of the training split")
    args = parser.parse_args()
    path = RUNS / f"{Path(args.data).stem}-{args.pictures}.npz"
    splits = "train", "validation", "test"
    pack(path, {s: load_images(args.data, s) for s in splits}, args.pictures)
    print(f"{path}: {path.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
