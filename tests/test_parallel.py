"""The same run on one device, on eight simulated ones, and on two real processes that
talk over the loopback: the same loss curve.
"""

import json
import os
import socket
import subprocess
import sys
import textwrap

import jax
import numpy as np
import pytest

from et_nbdev.commands import all_devices

STEPS = 12
PROGRAM = textwrap.dedent("""
    import json, sys
    import jax
    from et_nbdev.commands import all_devices
    devices, folder, out, steps = sys.argv[1:]
    mesh, steps = all_devices() if devices == "all" else None, int(steps)
    import numpy as np
    from et_nbdev.training import OptimConfig
    from et_nbdev.vision.model import ImageConfig
    from et_nbdev.vision.train import TrainConfig, evaluate, train

    class Pictures:
        def __init__(self, pixels): self.pixels = pixels
        def __len__(self): return len(self.pixels)
        def __getitem__(self, i): return self.pixels[i]

    low = np.random.default_rng(0).integers(0, 256, (96, 4, 4, 3), np.uint8)
    pixels = low.repeat(2, 1).repeat(2, 2)                      # smooth enough to be learned
    images = {"train": Pictures(pixels[:64]), "validation": Pictures(pixels[64:])}
    model = ImageConfig(
        image_size=8, patch_size=2, dim=16, num_heads=2, head_dim=8,
        num_memories=24, steps=3, step_size=0.3,
    )
    config = TrainConfig(
        model, OptimConfig(steps=steps, warmup=2, lr=1e-2), data="-",
        batch_size=16, jitter=0.2, crop=0.5, validate_on=32, every=4,
    )
    result = train(config, images, folder if folder != "-" else None, progress=False, mesh=mesh)
    error = float(evaluate(result.model, images["validation"], 8).mean())
    if jax.process_index() == 0:
        kept = "step", "loss", "grad_norm", "validation_loss"
        rows = [[r[key] for key in kept] for r in result.history]
        found = {"rows": rows, "devices": jax.device_count(), "error": error}
        open(out, "w").write(json.dumps(found))
""")


def python(program, *args, devices=1, cluster=None):
    env = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
        "XLA_FLAGS": os.environ.get("XLA_FLAGS", "")
        + f" --xla_force_host_platform_device_count={devices}",
        **(cluster or {}),
    }
    return subprocess.Popen(
        [sys.executable, "-c", program, *map(str, args)],
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def start(out, devices=1, cluster=None, folder="-", steps=STEPS):
    args = "one" if devices == 1 else "all", folder, out, steps
    return python(PROGRAM, *args, devices=devices, cluster=cluster)


def finish(*running):
    for p in running:
        try:
            said, _ = p.communicate(timeout=300)
        except subprocess.TimeoutExpired:
            p.kill()
            raise
        assert p.returncode == 0, said


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    out = tmp_path_factory.mktemp("alone") / "rows.json"
    finish(start(out))
    return json.loads(out.read_text())


def agree(out, alone, devices):
    result = json.loads(out.read_text())
    assert result["devices"] == devices and alone["devices"] == 1
    np.testing.assert_allclose(result["rows"], alone["rows"], rtol=1e-5)
    np.testing.assert_allclose(result["error"], alone["error"], rtol=1e-5)
    assert alone["rows"][-1][1] < alone["rows"][0][1]  # and it learned something


def test_eight_devices_give_the_loss_curve_of_one(tmp_path, alone):
    finish(start(tmp_path / "rows.json", devices=8))
    agree(tmp_path / "rows.json", alone, 8)


def two():
    "What the environment says to each of two processes."
    both = {
        "JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{free_port()}",
        "JAX_NUM_PROCESSES": "2",
    }
    return [{**both, "JAX_PROCESS_ID": str(i)} for i in (0, 1)]


def two_processes(tmp_path, **options):
    finish(*[start(tmp_path / "rows.json", 2, c, **options) for c in two()])


def test_two_processes_give_the_loss_curve_of_one_and_resume(tmp_path, alone):
    folder = tmp_path / "run"
    two_processes(tmp_path, folder=folder)
    agree(tmp_path / "rows.json", alone, 4)
    kept = sorted(p.name for p in folder.iterdir())
    assert kept == ["best.safetensors", "last.safetensors", "metrics.jsonl"]
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    # the first process alone writes
    assert [json.loads(line)["step"] for line in lines] == [
        row[0] for row in alone["rows"]
    ]
    two_processes(tmp_path, folder=folder)  # nothing left to do: both return at once
    assert (folder / "metrics.jsonl").read_text().splitlines() == lines


def test_a_cluster_that_cannot_be_is_refused(monkeypatch):
    monkeypatch.setenv("JAX_NUM_PROCESSES", "two")
    with pytest.raises(ValueError, match="JAX_NUM_PROCESSES: expected a whole number"):
        all_devices()
    monkeypatch.setenv("JAX_NUM_PROCESSES", "2")  # of whom?
    with pytest.raises(
        ValueError, match="^JAX_COORDINATOR_ADDRESS: expected host:port"
    ):
        all_devices()


@pytest.mark.parametrize(
    "variable, waits",
    [
        ("SLURM_NTASKS", False),  # an allocation, in which nothing was launched
        ("SLURM_STEP_NUM_TASKS", True),
        ("OMPI_COMM_WORLD_SIZE", True),
    ],
)
def test_other_processes_are_those_that_were_launched(monkeypatch, variable, waits):
    found = []
    monkeypatch.setattr(
        jax.distributed, "initialize", lambda **options: found.append(options)
    )
    monkeypatch.setenv(variable, "4")
    assert all_devices().size == jax.device_count()
    assert found == [{"num_processes": None, "process_id": None}] * waits
