"""pfed with two worker processes of one thread each."""

from __future__ import annotations

from unittest import mock

import shared
from shared import meter

from pfed import Experiment, Federation, Samples
from pfed.data.base import ClientData
from pfed.session import Session


def federation() -> Federation:
    x, y = shared.data()
    pool = Samples.of(x.flatten(0, 1), y.flatten())
    test = pool.part(range(10))
    rows = [range(k * shared.SAMPLES, (k + 1) * shared.SAMPLES) for k in range(shared.CLIENTS)]
    clients = tuple(ClientData(f"client-{k}", pool.part(own), test) for k, own in enumerate(rows))
    return Federation(clients, tuple("0123456789"), test)


def main() -> None:
    arguments = shared.arguments()
    act = Session._act

    def noting(self: Session, t: int) -> None:
        if t > 0:
            meter.mark()
        if t > arguments.rounds:  # before the round that ends with the evaluation every run ends with
            raise SystemExit
        act(self, t)
        meter.samples += self.exchange.ledger.samples

    settings = {"rounds": arguments.rounds + 1, "fraction": shared.CHOSEN / shared.CLIENTS, "eval_every": 0}
    local = {"batch_size": shared.BATCH, "lr": shared.LR}
    settings |= {"local": local, "engine": "processes", "workers": 2}
    heads = arguments.head_epochs
    method, hyper = ("fedrep", {"head_epochs": heads, "body_epochs": 1}) if heads else ("fedavg", {})
    with mock.patch.object(Session, "_act", noting):
        Experiment(method, federation(), "cnn", hyper=hyper, **settings).run()


if __name__ == "__main__":
    main()
