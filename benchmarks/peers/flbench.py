"""FL-bench, serial, in one process: its own servers, clients and CNN, unmodified, on data handed to it in memory.

Written against https://github.com/KarhouTam/FL-bench, `src/server/fedavg.py` at commit b76780a, which takes its options
from Hydra. Tried only on a shortened transcript of that code, never on a clone. Its folder is given with --path.
"""

from __future__ import annotations

import contextlib
import json
import pickle
import runpy
import sys
import tempfile
from pathlib import Path
from typing import Any

import shared
import torch
from shared import meter
from torch import Tensor

NAME = "mnist"  # decides the number of channels, features and classes


def write(folder: Path) -> None:
    """What the server reads of a partition: the rows of each client in the data set."""
    folder.mkdir(parents=True)
    everyone, n = list(range(shared.CLIENTS)), shared.SAMPLES
    rows = [{"train": list(range(k * n, (k + 1) * n)), "val": [], "test": []} for k in everyone]
    separation = {"train": everyone, "val": everyone, "test": everyone, "total": shared.CLIENTS}
    (folder / "partition.pkl").write_bytes(pickle.dumps({"separation": separation, "data_indices": rows}))
    (folder / "args.json").write_text(json.dumps({"dataset": NAME}))


def options(rounds: int, heads: int) -> list[str]:
    """Overrides of config/defaults.yaml; ++ because the options of evaluation have changed their names."""
    common = {"join_ratio": shared.CHOSEN / shared.CLIENTS, "global_epoch": rounds, "local_epoch": heads + 1}
    common |= {"batch_size": shared.BATCH, "use_cuda": "false", "verbose_gap": 10**6, "client_side_evaluation": "false"}
    common |= {f"eval_{split}": "false" for split in ("train", "val", "test")}
    common |= {f"test.{side}.{split}": "false" for side in ("client", "server") for split in ("train", "val", "test")}
    common |= {"test_interval": 10**6, "test.client.interval": -1, "test.server.interval": -1}
    common |= {f"save_{what}": "false" for what in ("log", "model", "fig", "learning_curve_plot", "metrics")}
    rest = {"dataset.name": NAME, "model.name": "fedavgcnn", "optimizer.name": "sgd", "optimizer.lr": shared.LR}
    rest |= {"mode": "serial", "fedrep.train_body_epoch": 1}
    method = "fedrep" if heads else "fedavg"
    found = {"method": method} | {f"common.{key}": value for key, value in common.items()} | rest
    return [f"++{key}={value}" for key, value in found.items()]


def substitute(folder: Path) -> None:
    """Our data in place of MNIST, without transforms, and a mark around each round."""
    import src.server.fedavg as server
    from src.utils.models import DecoupledModel

    def noise(**_: Any) -> Any:
        x, y = zip(*map(shared.client, range(shared.CLIENTS)), strict=True)
        return server.BaseDataset(torch.cat(x), torch.cat(y), list(range(shared.CLASSES)))

    forward, train = DecoupledModel.forward, server.FedAvgServer.train_one_round

    def counted(self: Any, x: Tensor) -> Tensor:
        meter.samples += len(x)
        return forward(self, x)

    def noting(self: Any) -> None:
        if not self.current_epoch:
            shared.checked(self.model)
            meter.mark()
        train(self)
        meter.mark()

    server.DATASETS[NAME], server.FLBENCH_ROOT = noise, folder
    DecoupledModel.forward, server.FedAvgServer.train_one_round = counted, noting


def main() -> None:
    arguments = shared.arguments()
    torch.set_num_threads(arguments.threads)
    sys.path.insert(0, str(arguments.path.resolve()))
    main = arguments.path.resolve() / "main.py"
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):  # where it writes its results
        write(Path(folder, "data", NAME))
        substitute(Path(folder))
        sys.argv[1:] = options(arguments.rounds, arguments.head_epochs)
        runpy.run_path(str(main), run_name="__main__")


if __name__ == "__main__":
    main()
