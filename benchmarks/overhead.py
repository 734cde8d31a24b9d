"""What pfed costs over a bare PyTorch loop that does the same training steps.

Both train FedAvg on the same clients, batches and model, evaluation off, one thread, in turns in one process. The ratio
of CPU seconds is what counts; wall time on a shared machine is noise.

    python benchmarks/overhead.py [--repeats 5] [--rounds 5] [--model cnn-small]
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time

import torch
import torch.nn.functional as F

from pfed import Experiment, Federation, models, streams


def bare(federation: Federation, model: str, rounds: int, lr: float, batch: int) -> int:
    """FedAvg by hand; returns the number of samples trained on."""
    net = models.build(model, classes=len(federation.classes), shape=federation.shape)
    weights = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    data = [client.train.take() for client in federation.clients]
    samples = 0
    for t in range(1, rounds + 1):
        total = {name: torch.zeros_like(tensor, dtype=torch.float64) for name, tensor in weights.items()}
        for k, (x, y) in enumerate(data):
            net.load_state_dict(weights)
            optimizer = torch.optim.SGD(net.parameters(), lr=lr, foreach=True)
            order = torch.from_numpy(streams.rng(0, "batch_order", k, t, "train").permutation(len(y)))
            for i in range(0, len(y), batch):
                index = order[i : i + batch]
                optimizer.zero_grad()
                F.cross_entropy(net(x[index]), y[index]).backward()
                optimizer.step()
                samples += len(index)
            for name, tensor in net.state_dict().items():
                total[name] += tensor.double() * len(y)
        size = sum(len(y) for _, y in data)
        weights = {name: (tensor / size).float() for name, tensor in total.items()}
    return samples


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--model", default="cnn-small")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    settings = {"clients": 20, "classes_per_client": 2, "rounds": arguments.rounds, "eval_every": 0}
    experiment = Experiment("fedavg", "digits", arguments.model, **settings)
    federation = experiment.federation()
    local = experiment.options.local
    ratios = []
    for repeat in range(arguments.repeats + 1):
        started = time.process_time()
        result = copy.copy(experiment).run()
        ours = time.process_time() - started
        started = time.process_time()
        samples = bare(federation, arguments.model, arguments.rounds, local.lr, local.batch_size)
        theirs = time.process_time() - started
        assert samples == sum(row["samples"] for row in result.rounds)
        if repeat:  # the first of each warms up
            ratios.append(ours / theirs)
            print(f"pfed {ours:.2f} CPU-s, bare loop {theirs:.2f} CPU-s, ratio {ratios[-1]:.3f}")
    print(f"ratio: median {statistics.median(ratios):.3f}, range {min(ratios):.3f} to {max(ratios):.3f}")


if __name__ == "__main__":
    main()
