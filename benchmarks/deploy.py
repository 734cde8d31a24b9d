"""What a federation of real sites costs beside a simulation: time per round, and bytes on the wire.

Three sites on this machine with noise for images, NVFlare with certificates between them and the server, FedAvg, one
epoch in batches of 50, evaluation at the end only. The sites reach the server through a relay that counts the bytes of
both directions, encrypted as they are; what is counted beside them is what pfed counts: tensors times their size.

    python benchmarks/deploy.py [--rounds 10] [--samples 100] [--models lenet5,torchvision:resnet18]
"""

from __future__ import annotations

import argparse
import os
import socket
import statistics
import tempfile
import threading
from pathlib import Path

import numpy as np
from PIL import Image

from pfed import Experiment, Result
from pfed.deploy import jobs, kits, parents
from pfed.tables import bytes_text, table

SITES = ("alba", "bonn", "oslo")
SHAPES = {"lenet5": (28, 28)}  # grey; all others in colour
COLOUR = (32, 32, 3)


class Relay:
    """Passes bytes on between sites and server, and counts them."""

    def __init__(self, port: int):
        self._target, self.count = port, 0
        self._listener = socket.create_server(("localhost", 0))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            here, _ = self._listener.accept()
            try:
                there = socket.create_connection(("localhost", self._target))
            except OSError:  # the server is not up yet; they will come again
                here.close()
                continue
            for one, other in ((here, there), (there, here)):
                threading.Thread(target=self._pass, args=(one, other), daemon=True).start()

    def _pass(self, one: socket.socket, other: socket.socket) -> None:
        try:
            while data := one.recv(1 << 16):
                self.count += len(data)
                other.sendall(data)
        except OSError:
            pass
        finally:
            other.close()


def write_images(folder: Path, shape: tuple[int, ...], samples: int) -> None:
    noise = np.random.default_rng(0)
    for site in SITES:
        for i in range(samples):
            file = folder / site / str(i % 10) / f"{i}.png"
            file.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(noise.integers(0, 256, shape, dtype=np.uint8)).save(file)


def per_round(result: Result) -> float:
    """The median of a round's seconds; the first begins with what is computed once."""
    return statistics.median(row["seconds"] for row in result.rounds if row["round"] > 1)


def measure(model: str, rounds: int, samples: int, root: Path) -> list[str]:
    data = root / "data"
    write_images(data, SHAPES.get(model, COLOUR), samples)
    options = {"rounds": rounds, "eval_every": 0, "local": {"batch_size": 50}}
    serial = Experiment("fedavg", str(data), model, **options).run()
    folder = root / "federation"
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    kits.init(folder, SITES, "localhost", port)
    relay = Relay(port)
    try:
        kits.settle(folder / "server", runs=str(root / "runs"))
        processes = [parents.start(folder / "server")]
        for site in SITES:
            kits.settle(folder / site, data=str(data / site), approve_within=1e6)
            kits.redirect(folder / site, f"localhost:{relay.port}")
            processes.append(parents.start(folder / site))
        run = jobs.create(folder, {"method": "fedavg", "model": model, **options}, records=False, privacy=None)
        before = relay.count
        result = jobs.follow(folder, run, lambda text: None)
        wire = relay.count - before
    finally:
        for part in (*SITES, "server"):
            parents.stop(folder / part)
        for process in processes:
            process.wait()
    assert result.series == serial.series
    counted = result.bytes_up + result.bytes_down + result.bytes_eval
    times = [per_round(serial), per_round(result)]
    more = [bytes_text(counted), bytes_text(wire), f"{100 * (wire / counted - 1):.1f} %"]
    return [model, f"{times[0]:.2f} s", f"{times[1]:.2f} s", f"{times[1] - times[0]:+.2f} s", *more]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--samples", type=int, default=100)
    parser.add_argument("--models", default="lenet5,torchvision:resnet18")
    arguments = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    rows = []
    for model in arguments.models.split(","):
        with tempfile.TemporaryDirectory() as work:
            rows.append(measure(model, arguments.rounds, arguments.samples, Path(work)))
    header = ["model", "serial", "federation", "difference", "counted", "on the wire", "more"]
    print(table(header, rows))


if __name__ == "__main__":
    main()
