"""What a round costs on Ray, beside `serial` and `processes`.

FedAvg with LeNet-5, eight clients with 600 images, batches of 10. The engines take turns, each in a run of its own;
ratios are of the rounds' times within a turn. The first round of a run, in which workers start, is told apart.

    python benchmarks/cluster.py [--repeats 5] [--rounds 4] [--workers 2] [--model lenet5]
"""

from __future__ import annotations

import argparse
import statistics
import time

from common import federation, ratios

from pfed import Experiment, Federation


def seconds(data: Federation, model: str, rounds: int, engine: str, workers: int) -> tuple[float, float, float]:
    """Per round after the first; the first; and the rest of the run, for its start and its end."""
    settings = {"rounds": rounds, "eval_every": 0, "engine": engine, "workers": workers, "local": {"lr": 0.05}}
    started = time.perf_counter()
    result = Experiment("fedavg", data, model, **settings).run()
    whole = time.perf_counter() - started
    taken = [row["seconds"] for row in result.rounds if row["round"] > 0]
    return statistics.median(taken[1:]), taken[0], whole - sum(taken)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--model", default="lenet5")
    arguments = parser.parse_args()
    data = federation(8, 600, (1, 28, 28))
    engines = ("serial", "processes", "ray")
    found: dict[str, list[tuple[float, float, float]]] = {engine: [] for engine in engines}
    for _ in range(arguments.repeats):
        for engine in engines:
            found[engine].append(seconds(data, arguments.model, arguments.rounds, engine, arguments.workers))
    rounds = {engine: [each[0] for each in taken] for engine, taken in found.items()}
    for engine, taken in found.items():
        usual, first, rest = (statistics.median(column) for column in zip(*taken, strict=True))
        print(f"{engine}: {usual:.2f} s per round, the first {first:.2f} s, the rest of the run {rest:.2f} s")
    for other in engines[:2]:
        print(f"ray / {other}: {ratios(rounds['ray'], rounds[other])}")


if __name__ == "__main__":
    main()
