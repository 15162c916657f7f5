"""As many training pictures as fit into one file, to train where the data are not.

    python experiments/packed_pictures.py --data tiny-imagenet --megabytes 55

writes runs/tiny-imagenet-55.npz: training pictures, chosen by a shuffle with a fixed
seed, and the first 1,000 pictures of the validation and test splits, all of them byte
for byte as they are stored (a JPEG file, say), one after the other in a compressed
stream. Compression takes what the files have in common: their headers.
`experiments/image_pair.py --data runs/tiny-imagenet-55.npz` reads the file, and needs
Pillow alone to do so.
"""

import os
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from runs import RUNS, options

from et_nbdev.training import atomic_write
from et_nbdev.vision.data import Images, decode, load_images

MEGABYTE = 2**20


def stored_bytes(images: Images, number: int) -> bytes:
    "A picture as it is stored. Raises ValueError for one without a file format."
    label, stored = images.fetch(images.rows[number : number + 1])[0]
    if isinstance(stored, Path):
        stored = stored.read_bytes()
    if not isinstance(stored, bytes):
        raise ValueError(f"images: {label} of {images.name!r} has no file format")
    return stored


def compressed(images: Images, numbers, room: float) -> tuple[bytes, list[int]]:
    "The stream of the first pictures among `numbers` that fit, and their lengths."
    stream, parts, lengths, size = zlib.compressobj(9), [], [], 0
    for number in numbers:
        stored = stored_bytes(images, int(number))
        # what the stream still holds back is less than a picture and its buffer
        if size + len(stored) + 2**16 > room:
            break
        parts.append(stream.compress(stored))
        size += len(parts[-1])
        lengths.append(len(stored))
    return b"".join([*parts, stream.flush()]), lengths


def pack(path: Path, images: dict[str, Images], megabytes: float, held_out=1000):
    """Write pictures of the three splits to `path`, which becomes at most `megabytes`
    large. Raises ValueError if not even a training picture fits.
    """
    left, packed = megabytes * MEGABYTE - 2**16, {}
    for split in ("validation", "test"):
        wanted = range(min(held_out, len(images[split])))
        packed[split] = compressed(images[split], wanted, left)
        left -= len(packed[split][0])
        if len(packed[split][1]) < len(wanted):
            raise ValueError(f"megabytes: {megabytes} are too few for these pictures")
    order = np.random.default_rng(0).permutation(len(images["train"]))
    packed["train"] = compressed(images["train"], order, left)
    if not packed["train"][1]:
        raise ValueError(f"megabytes: {megabytes} are too few for these pictures")
    arrays = {}
    for split, (stream, lengths) in packed.items():
        arrays[split] = np.frombuffer(stream, np.uint8)
        arrays[f"{split}_lengths"] = np.asarray(lengths, np.uint32)
    shape = np.asarray([images["train"].size, images["train"].channels])
    with atomic_write(path) as temporary, open(temporary, "wb") as file:
        np.savez(file, shape=shape, **arrays)
    return {split: len(lengths) for split, (_, lengths) in packed.items()}


def unpack(path: Path | str) -> dict[str, np.ndarray]:
    "The pictures of a packed file by split, decoded: uint8 (n, S, S, C)."
    with np.load(path, allow_pickle=False) as arrays:
        size, channels = arrays["shape"].tolist()
        found = {}
        for split in ("train", "validation", "test"):
            whole = zlib.decompress(arrays[split].tobytes())
            ends = np.cumsum(arrays[f"{split}_lengths"], dtype=np.int64)
            starts = [0, *ends[:-1]]
            pictures = [whole[a:b] for a, b in zip(starts, ends)]
            with ThreadPoolExecutor(os.cpu_count()) as pool:
                read = lambda stored: decode(stored, size, channels)
                found[split] = np.stack(list(pool.map(read, pictures)))
    return found


def main():
    parser = options(__doc__)
    add = parser.add_argument
    add("--data", default="tiny-imagenet", help="what load_images takes")
    add("--megabytes", type=float, default=55, help="of 2²⁰ bytes")
    args = parser.parse_args()
    path = RUNS / f"{Path(args.data).stem}-{args.megabytes:g}.npz"
    images = {s: load_images(args.data, s) for s in ("train", "validation", "test")}
    counts = pack(path, images, args.megabytes)
    size = path.stat().st_size / MEGABYTE
    print(f"{path}: {size:.1f} MiB, {counts['train']:,} training pictures")


if __name__ == "__main__":
    main()
