"""A method: a frozen dataclass of hyper-parameters, a `round` on the server and steps on the clients."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar

from torch import Tensor, nn

from pfed import anatomy
from pfed.errors import UserError, unknown
from pfed.options import validate
from pfed.tensors import Mean
from pfed.wire import Payload, State, Value

if TYPE_CHECKING:
    from pfed.client import Client
    from pfed.cohort import Cohort
    from pfed.config import RunOptions
    from pfed.data.base import Federation
    from pfed.pool import Spec

Aggregation = Literal["samples", "uniform"]
ANY_TASK = frozenset({"classification", "detection"})
F = TypeVar("F", bound=Callable[..., Any])
V = TypeVar("V")


def step(function: F) -> F:
    """Mark a function of a method as something that runs on a client; an engine runs nothing else."""
    function._pfed_step = True  # type: ignore[attr-defined]
    return function


@dataclasses.dataclass(frozen=True)
class Each(Generic[V]):
    """A payload value that differs per client: by client id, or as a function of it. All else is broadcast."""

    values: Mapping[int, V] | Callable[[int], V]
    default: V | None = None

    def of(self, client: int) -> V | None:
        if isinstance(self.values, Mapping):
            return self.values.get(client, self.default)
        return self.values(client)


class Replies(dict[int, Payload]):
    """The clients' answers by ascending client id."""

    def __init__(self, agg: Aggregation) -> None:
        super().__init__()
        self.agg = agg
        self.weights: dict[int, float] = {}

    def mean(self, key: str, agg: Aggregation | None = None) -> Any:
        """The weighted mean of one value over the clients."""
        fold = Average(agg or self.agg)
        for client, reply in self.items():
            fold.add(reply[key], self.weights[client])
        return fold.value()

    def each(self, key: str) -> dict[int, Any]:
        """One value by client."""
        return {client: reply[key] for client, reply in self.items()}


class Average:
    """The mean over clients: weighted by samples or uniform; a client that could not train counts nothing."""

    def __init__(self, agg: Aggregation):
        self._agg, self._fold = agg, Mean()
        self._idle: Any = None  # an answer without training is what was sent: the mean if nobody trained

    def add(self, value: Any, weight: float) -> None:
        if weight > 0:
            self._fold.add(value, weight if self._agg == "samples" else 1.0)
        elif self._idle is None:
            self._idle = value

    def value(self) -> Any:
        return self._fold.value() if self._fold.total else self._idle


@dataclasses.dataclass(frozen=True)
class Reduction:
    """With these settings the method does exactly what another one does."""

    settings: Mapping[str, Any]
    other: str
    other_settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)


class Method:
    """What a personalization method is. Subclasses are frozen dataclasses whose fields are their options.

    State is plain: `server` here, `client.state` there. `round` reaches the clients only through its cohort.
    """

    name = ""  # set by @register
    same_architecture = True  # every client's model must be of one kind
    same_start = False  # all clients must begin with the same values, but for what never leaves them
    needs: frozenset[str] = frozenset()  # of: public, validation, pooled, replies (individual ones, not only means)
    tasks: frozenset[str] = frozenset({"classification"})  # ANY_TASK where it takes any loss
    sends_all = False  # the whole model travels, so what a client keeps of it is no secret
    fixed_rounds = False  # what it does depends on how many rounds there are in all
    own_rates = False  # it has learning rates in place of the run's
    keep_optimizer = False  # momentum survives between rounds unless the run says otherwise
    reduces_to: tuple[Reduction, ...] = ()  # identities, which the tests hold bit for bit

    def __post_init__(self) -> None:
        validate(self)

    @property
    def label(self) -> str:
        """The name in tables and run names."""
        return self.name or type(self).__name__.lower()

    @property
    def participation(self) -> Literal["sampled", "all"]:
        """Who takes part in a round: the sampled fraction, or everyone."""
        return "sampled"

    def check(self, options: RunOptions, federation: Federation) -> None:
        """Refuse, with a UserError, a run that makes no sense with this method."""

    def check_models(self, models: Sequence[nn.Module]) -> None:
        """Refuse, with a UserError, architectures that do not go together."""
        shapes = {
            tuple((n, tuple(t.shape)) for n, t in model.state_dict().items() if n not in anatomy.marks(model).local)
            for model in models
        }
        if self.same_architecture and len(shapes) > 1:
            raise UserError(
                f"{self.label} needs the same architecture at every client. Got {len(shapes)} different ones."
            )

    def build(self, spec: Spec) -> nn.Module:
        """The model of a client; may add heads, projectors, fixed classifiers by `spec.add`."""
        return spec.base()

    def init(self, model: nn.Module) -> State:
        """The server's state before the first round."""
        return {"params": anatomy.params(model)}

    def start(self, server: State, cohort: Cohort) -> None:
        """Before round 1."""

    def download(self, server: State) -> dict[str, Any]:
        """What a client gets, in training and in evaluation."""
        return {"params": server["params"]}

    def round(self, server: State, cohort: Cohort) -> None:
        """One communication round, as in the paper's algorithm box; rounds count from 1."""
        raise NotImplementedError(f"{type(self).__name__} has no round")

    def finish(self, server: State, cohort: Cohort) -> None:
        """After the last round: fine-tuning, calibration."""

    def predictor(self, client: Client, *args: Any, **download: Any) -> nn.Module | Mapping[str, nn.Module]:
        """The personal model that is judged, or several by name (the first is the one that counts)."""
        raise NotImplementedError(f"{type(self).__name__} has no predictor")

    def representations(self, model: nn.Module, x: Tensor) -> dict[str, Tensor]:
        """The features of these inputs by name, (n, ...) each, for `representation`: what the head receives."""
        return {"features": anatomy.features(model, x)}

    def steps(self) -> dict[str, Callable[..., Mapping[str, Value] | None]]:
        """The functions that run on clients, by name."""
        found = {}
        for name in dir(type(self)):
            if getattr(getattr(type(self), name), "_pfed_step", False):
                found[name] = getattr(self, name)
        return found

    def step(self, name: str) -> Callable[..., Mapping[str, Value] | None]:
        """One of them."""
        steps = self.steps()
        if name not in steps:
            raise unknown(f"step of {type(self).__name__}", name, steps)
        return steps[name]

    def hyperparameters(self) -> dict[str, Any]:
        """The options with their values."""
        if not dataclasses.is_dataclass(self):
            return {}
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.init}
