"""Time and memory of training a detector on a CPU, in one thread: PartialFed's setting, and the small ones for CPUs.

A client with composite scenes trains for three rounds of a few batches of 8, and is not judged. The first round is left
out; time is that of the others by batch, memory the most that the process ever had. PartialFed's setting is Faster
R-CNN over SE-ResNet-50 with images of 512 pixels. Each case is a process of its own.

    python benchmarks/detection.py [--batches 2]
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from typing import Any
from unittest import mock

CASES = [
    ("fedavg", "fasterrcnn:seresnet50", 512),
    ("partialfed-adaptive", "fasterrcnn:seresnet50", 512),
    ("fedavg", "fcos:seresnet50", 512),
    ("fedavg", "fcos:mobilenetv2-small", 160),
    ("fedavg", "fcos:seresnet18-small", 128),
]
BATCH = 8


def child(method: str, model: str, side: int, batches: int) -> None:
    """One case; prints what it measured."""
    from pfed import Experiment, models
    from pfed.config import SplitOptions
    from pfed.data import sources
    from pfed.data.federate import federate
    from pfed.data.scenes import composite
    from pfed.session import Session

    photos = sources._scikit_learn_folder().parent / "images"
    scenes = composite(sources.load("digits"), photos, train=BATCH * batches, test=1, side=side, styles=["photo"])
    data = federate(scenes, SplitOptions(clients=1), 0)
    act, taken = Session._act, []

    def timed(self: Session, t: int) -> None:
        before = time.perf_counter(), time.process_time()
        act(self, t)
        taken.append((time.perf_counter() - before[0], time.process_time() - before[1]))

    local = {"batch_size": BATCH, "lr": 0.01}
    with mock.patch.object(Session, "_act", timed), mock.patch.object(Session, "_judges", return_value=False):
        Experiment(method, data, model, task="detection", rounds=3, eval_every=0, local=local).run()
    wall, cpu = (sum(column) / len(column) / batches for column in zip(*taken[1:], strict=True))
    parameters = sum(p.numel() for p in models.build(model, classes=5, shape=(3, side, side)).parameters())
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(json.dumps({"wall": wall, "cpu": cpu, "memory": most, "parameters": parameters}))


def measured(case: tuple[str, str, int], batches: int) -> dict[str, Any]:
    argv = [sys.executable, __file__, "--case", *map(str, case), "--batches", str(batches)]
    done = subprocess.run(
        argv, stdout=subprocess.PIPE, text=True, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--batches", type=int, default=2, help="of a round")
    parser.add_argument("--case", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.case:
        method, model, side = arguments.case
        child(method, model, int(side), arguments.batches)
        return
    print(
        f"{'method':<20} {'model':<23} {'pixels':>6} {'parameters':>11} {'s':>7} {'CPU-s':>7} {'MB':>7}   by batch of 8"
    )
    for case in CASES:
        found = measured(case, arguments.batches)
        sizes = f"{case[2]:>6} {found['parameters']:>11,}"
        print(
            f"{case[0]:<20} {case[1]:<23} {sizes} {found['wall']:>7.2f} {found['cpu']:>7.2f} {found['memory']:>7,.0f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
