"""pfl-research 0.6.0 in one process: FedAvg, as it has no FedRep."""

from __future__ import annotations

import functools

import shared
import torch
import torch.nn.functional as F
from pfl.aggregate.simulate import SimulatedBackend
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.pytorch import PyTorchTensorDataset
from pfl.data.sampling import get_user_sampler
from pfl.hyperparam.base import NNEvalHyperParams, NNTrainHyperParams
from pfl.metrics import Metrics
from pfl.model.pytorch import PyTorchModel
from shared import meter
from torch import Tensor


class Net(shared.Cnn):
    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self(x), y)

    def metrics(self, x: Tensor, y: Tensor) -> dict[str, float]:
        raise AssertionError("evaluation is off")


class Marks(TrainingProcessCallback):
    def on_train_begin(self, *, model: PyTorchModel) -> Metrics:
        meter.mark()
        return Metrics()

    def after_central_iteration(self, *_: object, **__: object) -> tuple[bool, Metrics]:
        meter.mark()
        return False, Metrics()


def main() -> None:
    arguments = shared.arguments()
    torch.set_num_threads(arguments.threads)
    net = shared.checked(Net())
    net.register_forward_pre_hook(shared.count)
    model = PyTorchModel(net, functools.partial(torch.optim.SGD, foreach=True), torch.optim.SGD(net.parameters(), 1.0))
    users = [PyTorchTensorDataset(shared.client(k), user_id=str(k)) for k in range(shared.CLIENTS)]
    federated = FederatedDataset(users.__getitem__, get_user_sampler("minimize_reuse", range(shared.CLIENTS)))
    algorithm = FederatedAveraging()
    algorithm._current_central_iteration = 1  # as after a checkpoint, since iteration 0 is always evaluated
    algorithm.run(
        NNAlgorithmParams(
            central_num_iterations=arguments.rounds + 1,
            evaluation_frequency=arguments.rounds + 1,
            train_cohort_size=shared.CHOSEN,
            val_cohort_size=0,
        ),
        SimulatedBackend(training_data=federated, val_data=federated),
        model,
        NNTrainHyperParams(local_batch_size=shared.BATCH, local_num_epochs=1, local_learning_rate=shared.LR),
        NNEvalHyperParams(local_batch_size=None),
        callbacks=[Marks()],
    )


if __name__ == "__main__":
    main()
