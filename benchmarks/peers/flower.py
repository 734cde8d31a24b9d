"""Flower 1.41.0, its simulation on Ray: two actors of one CPU and one thread each.

Flower leaves the training loop to its users: it is a plain PyTorch loop here. In FedRep only the body travels; the head
stays in the client's context.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import shared
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from shared import meter

client, server = ClientApp(), ServerApp()


@client.train()
def train(message: Message, context: Context) -> Message:
    torch.set_num_threads(1)
    model, (x, y) = shared.cnn(), shared.client(int(context.node_config["partition-id"]))
    heads = int(message.content["config"]["head-epochs"])
    part = model.body if heads else model
    part.load_state_dict(message.content["arrays"].to_torch_state_dict())
    if heads and "head" in context.state:
        model.head.load_state_dict(context.state["head"].to_torch_state_dict())
    trained = sum(shared.epoch(model, model.head, x, y) for _ in range(heads)) + shared.epoch(model, part, x, y)
    if heads:
        context.state["head"] = ArrayRecord(model.head.state_dict())
    metrics = MetricRecord({"num-examples": len(y), "trained": trained})
    return Message(RecordDict({"arrays": ArrayRecord(part.state_dict()), "metrics": metrics}), reply_to=message)


class Marked(FedAvg):
    def configure_train(self, *given: Any) -> Iterable[Message]:
        meter.mark()
        return super().configure_train(*given)

    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> Any:
        replies = list(replies)
        meter.samples += sum(int(reply.content["metrics"]["trained"]) for reply in replies)
        return super().aggregate_train(server_round, replies)


@server.main()
def serve(grid: Grid, context: Context) -> None:
    arguments = shared.arguments()
    model = shared.checked(shared.cnn())
    part = model.body if arguments.head_epochs else model
    strategy = Marked(fraction_train=shared.CHOSEN / shared.CLIENTS, fraction_evaluate=0.0)
    config = ConfigRecord({"head-epochs": arguments.head_epochs})
    strategy.start(grid, ArrayRecord(part.state_dict()), num_rounds=arguments.rounds, train_config=config)
    meter.mark()


if __name__ == "__main__":
    backend = {"init_args": {"num_cpus": 2}, "client_resources": {"num_cpus": 1, "num_gpus": 0.0}}
    run_simulation(server, client, shared.CLIENTS, backend_config=backend)
