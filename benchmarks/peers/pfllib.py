"""PFLlib in one process: its own servers, clients and CNN, unmodified, on data written as it reads them.

Written against https://github.com/TsingZ0/PFLlib, servers at commit 2b077c1 and clients at 487a29e. Tried only on a
shortened transcript of that code, never on a clone. The folder above `system` is given with --path.
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
import time
from argparse import Namespace
from pathlib import Path
from typing import Any

import numpy as np
import shared
import torch
from shared import meter
from torch import nn


def write(folder: Path) -> None:
    """What `utils.data_utils.read_client_data` reads. Test data are only counted."""
    for split in ("train", "test"):
        (folder / split).mkdir(parents=True)
    for k in range(shared.CLIENTS):
        x, y = (tensor.numpy() for tensor in shared.client(k))
        np.savez(folder / "train" / f"{k}.npz", data={"x": x, "y": y})
        np.savez(folder / "test" / f"{k}.npz", data={"x": x[:10], "y": y[:10]})


def settings(algorithm: str, model: nn.Module, rounds: int, heads: int) -> Namespace:
    """The options of PFLlib's main.py; unused ones have its defaults."""
    work = {"dataset": "noise", "num_classes": shared.CLASSES, "num_clients": shared.CLIENTS}
    work |= {"join_ratio": shared.CHOSEN / shared.CLIENTS, "global_rounds": rounds - 1, "batch_size": shared.BATCH}
    work |= {"local_learning_rate": shared.LR, "local_epochs": 1, "plocal_epochs": heads, "eval_gap": rounds + 1}
    rest = {"device": "cpu", "goal": "test", "save_folder_name": "items", "top_cnt": 100, "auto_break": False}
    rest |= {"random_join_ratio": False, "time_select": False, "time_threthold": 10_000, "client_drop_rate": 0.0}
    rest |= {"train_slow_rate": 0.0, "send_slow_rate": 0.0, "dlg_eval": False, "dlg_gap": 100, "num_new_clients": 0}
    rest |= {"batch_num_per_client": 2, "fine_tuning_epoch": 0, "fine_tuning_epoch_new": 0, "few_shot": 0}
    rest |= {"privacy": False, "dp_sigma": 0.0, "learning_rate_decay": False, "learning_rate_decay_gamma": 0.99}
    return Namespace(algorithm=algorithm, model=model, **work, **rest)


def build(rounds: int, heads: int) -> Any:
    """PFLlib's server, with its clients, as its main.py makes it."""
    from flcore.trainmodel.models import BaseHeadSplit, FedAvgCNN

    if heads:
        from flcore.servers.serverrep import FedRep as Server
    else:
        from flcore.servers.serveravg import FedAvg as Server
    model = shared.checked(FedAvgCNN(in_features=1, num_classes=shared.CLASSES, dim=1024))
    head, model.fc = model.fc, nn.Identity()
    split = BaseHeadSplit(model, head)
    split.register_forward_pre_hook(shared.count)
    return Server(settings(Server.__name__, split, rounds, heads), 0)


def main() -> None:
    arguments = shared.arguments()
    torch.set_num_threads(arguments.threads)
    sys.path.insert(0, str(arguments.path.resolve() / "system"))
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        started = time.perf_counter()
        write(Path("dataset/noise"))
        meter.aside = time.perf_counter() - started
        os.mkdir("system")
        os.chdir("system")  # it reads ../dataset and writes ../results
        server = build(arguments.rounds, arguments.head_epochs)
        server.evaluate = lambda: server.rs_test_acc.append(0.0)  # the first round is always evaluated
        aggregate = server.aggregate_parameters

        def noting() -> None:
            aggregate()
            meter.mark()

        server.aggregate_parameters = noting
        meter.mark()
        server.train()


if __name__ == "__main__":
    main()
