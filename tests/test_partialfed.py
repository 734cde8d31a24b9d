"""PartialFed-Fix: what each strategy loads, the identities with other methods, bytes, tuning. Numbers: the spec's.

Where nothing else is said the model has residual blocks, BatchNorm and dropout, the optimiser Nesterov momentum and
weight decay, and half of the clients take part in a round. Equality is bit for bit.
"""

from __future__ import annotations

import functools
import warnings
from typing import Any

import pytest
import torch
from helpers import Residual, Run, assert_same, blobs, initial, mlp, run, same
from test_method_arithmetic import START, combine, descend, gradient, mean, near, values
from test_method_arithmetic import go as by_hand
from torch import Tensor, nn

from pfed import Experiment, Federation, Tensors, UserError, anatomy, groups, loading, models
from pfed.methods.partialfed_fix import PartialFedFix
from pfed.pool import Pool
from pfed.runner import Runner
from pfed.tasks import task

DATA = blobs((7, 12, 5, 9))  # in batches of 4 some are incomplete, and two are single samples
CLIENTS = range(4)
LOCAL = {"lr": 0.2, "batch_size": 4, "epochs": 2, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}
SKIPS = ["AaBb", "AaCc", "BbCc", "BbDd", "CcDd", "ABCD", "abcd"]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.bn = nn.Linear(5, 5), nn.BatchNorm1d(5)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x + self.bn(self.fc(x)))


class Blocks(nn.Module):
    """A stem and three stages of two residual blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Linear(4, 5), nn.BatchNorm1d(5)
        self.one, self.two, self.three = (nn.Sequential(Block(), Block()) for _ in range(3))
        self.drop, self.fc = nn.Dropout(0.3), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.fc(self.drop(self.three(self.two(self.one(self.norm(self.conv(x)))))))
        return out


def go(method: str = "partialfed-fix", model: Any = Blocks, data: Any = DATA, rounds: int = 3, **hyper: Any) -> Run:
    """Half of the clients in each round; options of the run begin with `run_`."""
    options = {key.removeprefix("run_"): hyper.pop(key) for key in list(hyper) if key.startswith("run_")}
    defaults = {"fraction": 0.5, "local": LOCAL, "eval_every": 0}
    return run(method, data, model, rounds=rounds, hyper=hyper, **{**defaults, **options})


def loads(model: nn.Module, strategy: str, **changes: Any) -> frozenset[str]:
    """The names of the tensors that a strategy loads."""
    return PartialFedFix(strategy, **changes).loads(model).names(model)


@functools.cache
def resnet18() -> nn.Module:
    return models.build("torchvision:resnet18", classes=10, shape=(3, 32, 32))


@functools.cache
def se_resnet() -> nn.Module:
    return models.build("timm:seresnet18", classes=10, shape=(3, 32, 32))


def blocks_of(names: str, model: nn.Module) -> frozenset[str]:
    """All tensors of these blocks, given as their labels separated by spaces."""
    return frozenset().union(*(groups.blocks(model)[label].names(model) for label in names.split()))


S1, S2, S3, S4 = "stem s1.0 s1.1", "s2.0 s2.1", "s3.0 s3.1", "s4.0 s4.1"


@pytest.mark.parametrize(
    ("strategy", "blocks"),
    [
        ("full", f"{S1} {S2} {S3} {S4} fc"),
        ("none", ""),
        ("s1", S1),
        ("s1-s2", f"{S1} {S2}"),
        ("s1-s3", f"{S1} {S2} {S3}"),
        ("s1-s4", f"{S1} {S2} {S3} {S4}"),
        ("s2-s3", f"{S2} {S3}"),
        ("fc", "fc"),
        ("s4-fc", f"{S4} fc"),
        ("s3-fc", f"{S3} {S4} fc"),
        ("s2-fc", f"{S2} {S3} {S4} fc"),
        ("wo_fc", f"{S1} {S2} {S3} {S4}"),
        ("wo_fb", "stem s1.1 s2.1 s3.1 s4.1 fc"),
        ("AaBb", "stem s1.0 s1.1 s2.0 s2.1 fc"),
        ("AaCc", "stem s1.0 s1.1 s3.0 s3.1 fc"),
        ("BbCc", "stem s2.0 s2.1 s3.0 s3.1 fc"),
        ("BbDd", "stem s2.0 s2.1 s4.0 s4.1 fc"),
        ("CcDd", "stem s3.0 s3.1 s4.0 s4.1 fc"),
        ("ABCD", "stem s1.0 s2.0 s3.0 s4.0 fc"),
        ("abcd", "stem s1.1 s2.1 s3.1 s4.1 fc"),
        ("stem,s1.0,fc", "stem s1.0 fc"),
        ("stem", "stem"),
    ],
)
def test_strategies_of_a_resnet18(strategy: str, blocks: str) -> None:
    """As the paper letters its blocks; a shortcut belongs to its block."""
    assert loads(resnet18(), strategy) == blocks_of(blocks, resnet18())


def test_strategies_by_type_of_module() -> None:
    """What stays local is found by type, so that the BatchNorm `downsample.1` stays as well. s1-s4 is wo_fc."""
    model, everything = resnet18(), frozenset(resnet18().state_dict())
    norms = {name for name in everything if "bn" in name or "downsample.1" in name}
    statistics = {name for name in norms if not name.endswith(("weight", "bias"))}
    head = {"fc.weight", "fc.bias"}
    assert loads(model, "wo_bn") == everything - norms
    assert loads(model, "wo_bn_stats") == everything - statistics
    assert loads(model, "wo_bn_fc") == everything - norms - head
    assert loads(model, "s1-s4") == loads(model, "wo_fc") == everything - head
    model, everything = se_resnet(), frozenset(se_resnet().state_dict())
    excitation = {name for name in everything if ".se." in name}
    norms = {name for name in everything if name.startswith("bn") or ".bn" in name or "downsample.1" in name}
    assert loads(model, "wo_se") == everything - excitation
    assert loads(model, "wo_se_bn") == everything - excitation - norms


def test_first_and_third_blocks() -> None:
    """wo_fb_tb needs a stage with three blocks; resnet20 has three of them."""
    model = models.build("resnet20", classes=10, shape=(3, 32, 32))
    kept = blocks_of("s1.0 s1.2 s2.0 s2.2 s3.0 s3.2", model)
    assert loads(model, "wo_fb_tb") == frozenset(model.state_dict()) - kept


def test_the_stem_and_lists_of_groups() -> None:
    """With a group of its own the stem is not part of s1; a list names groups of the given granularity."""
    model = resnet18()
    stem = groups.blocks(model)["stem"].names(model)
    assert loads(model, "s1") - loads(model, "s1", stem_group="own") == stem
    assert loads(model, "stem-s1", stem_group="own") == loads(model, "s1")
    assert loads(model, "stem,s1", stem_group="own", granularity="stage") == loads(model, "s1")
    assert loads(model, "conv1", granularity="layer") == {"conv1.weight"}
    assert loads(model, "conv1,fc", granularity="layer", layer_conv_bn="joint") == stem | loads(model, "fc")


def test_models_without_blocks_count_their_layers() -> None:
    """s1, s2, … and A, a, B, b, … are then the layers in order, each with its BatchNorm."""
    model = models.build("cnn-small-bn", classes=10, shape=(1, 8, 8))  # conv1, conv2, fc1, fc
    first, second = (groups.blocks(model)[label].names(model) for label in ("conv1", "conv2"))
    assert loads(model, "s1") == first
    assert loads(model, "s2") == loads(model, "conv2") == second
    assert loads(model, "a") == second | loads(model, "fc")
    assert loads(model, "s1-s3") == loads(model, "wo_fc")
    assert loads(model, "ABa") == frozenset(model.state_dict())


@pytest.mark.parametrize(
    ("strategy", "text"),
    [
        ("s1-s4", "PartialFedFix.strategy 's1-s4' needs s4; the model has s1, s2, s3, fc."),
        ("stem-s2", "PartialFedFix.strategy 'stem-s2' needs stem; the model has s1, s2, s3, fc."),
        ("s3-s1", "PartialFedFix.strategy must name the earlier stage first. Got 's3-s1'."),
        ("wo_se", "PartialFedFix.strategy 'wo_se' needs squeeze-and-excitation; the model has none."),
        (
            "wo_fb_tb",
            "PartialFedFix.strategy 'wo_fb_tb' needs a third block in some stage;"
            " the model has stem, s1.0, s1.1, s2.0, s2.1, s3.0, s3.1, fc.",
        ),
        (
            "CcDd",
            "PartialFedFix.strategy 'CcDd' needs a block D;"
            " the model has A (s1.0), a (s1.1), B (s2.0), b (s2.1), C (s3.0), c (s3.1).",
        ),
        ("nome", "There is no strategy 'nome'. Did you mean 'none'?"),
        ("stem,s1.4", "There is no block of the model 's1.4'. Did you mean 's1.1'?"),
    ],
)
def test_a_strategy_that_the_model_cannot_have_is_refused(strategy: str, text: str) -> None:
    """In one sentence, before any round."""
    with pytest.raises(UserError) as refused:
        go(strategy=strategy)
    assert str(refused.value) == text


def test_other_refusals() -> None:
    """Of models without blocks, and of what is no strategy at all."""
    with pytest.raises(UserError, match=r"needs s2; the model has s1 \(0\), fc\.$"):
        go(model=mlp, strategy="s2-fc")
    with pytest.raises(UserError, match=r"needs residual blocks; the model has 0, fc\.$"):
        go(model=mlp, strategy="wo_fb")
    headless = nn.Sequential(nn.Flatten(), nn.Conv1d(1, 3, 4))
    with pytest.raises(UserError, match=r"'wo_fc' needs a linear head; the model has none\.$"):
        loads(headless, "wo_fc")
    for strategy in ("", "s1,", "s1 s2", "wo_bnn"):
        with pytest.raises(UserError, match=r"^PartialFedFix\.strategy must be one of .* Got "):
            PartialFedFix(strategy)


@pytest.mark.parametrize("strategy", ["wo_bn", "wo_bn_stats"])
def test_without_batchnorm_there_is_nothing_to_keep(strategy: str) -> None:
    """It warns as FedBN does, and is FedAvg. wo_bn_fc is wo_fc then, and needs no warning."""
    with pytest.warns(
        UserWarning, match=r"^PartialFed: the model has no BatchNorm layer to keep, so this is FedAvg\.$"
    ):
        done = go(model=mlp, strategy=strategy, finetune_epochs=0)
    assert_same(done.server, go("fedavg", mlp).server)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_same(go(model=mlp).personal, go(model=mlp, strategy="wo_fc").personal)


IDENTITIES = [
    ("full", "fedavg", {}),
    ("wo_fc", "fedper", {}),
    ("wo_bn", "fedbn", {"agg": "samples"}),
    ("wo_bn_stats", "silobn", {}),
    ("none", "local", {"matched_participation": True}),
]


@pytest.mark.parametrize(("strategy", "other", "hyper"), IDENTITIES)
@pytest.mark.parametrize("model", [Blocks, functools.partial(Residual, dropout=0.3)], ids=["blocks", "residual"])
def test_identities(strategy: str, other: str, hyper: dict[str, Any], model: Any) -> None:
    """1 to 5: FedAvg, FedPer, FedBN by samples, SiloBN, Local, on every client, with partial participation."""
    one = go(model=model, strategy=strategy, finetune_epochs=0, run_keep_optimizer=False)
    two = go(other, model, **hyper, run_keep_optimizer=False)
    assert_same(one.personal, two.personal)
    for value in two.server.values():  # what the other averages
        assert_same(one.server["params"].only(value), value)
    assert one.result.values == two.result.values


@pytest.mark.parametrize(
    "strategy", ["full", "none", "s1", "s2-fc", "wo_bn", "wo_bn_stats", "wo_bn_fc", "wo_fb", "AaBb", "abc", "s1.1,fc"]
)
def test_equation_2(strategy: str) -> None:
    """6: after loading, every tensor is that of W_t where A = 1 and that of W^c_{t-1} where A = 0, counters too."""
    experiment = Experiment("partialfed-fix", DATA, Blocks, hyper={"strategy": strategy})
    model = Blocks()
    pool = Pool([model])
    runner = Runner(experiment.method, DATA, pool, experiment.options, task("classification"))
    own = Tensors({name: tensor + 1 for name, tensor in anatomy.snapshot(model).items()})
    params = anatomy.params(model) + 2.0
    method = experiment.method
    assert isinstance(method, PartialFedFix)
    loaded = anatomy.snapshot(method.load(runner.client(0, 1, {"own": own}), params))
    chosen = loads(model, strategy)
    expected = {name: params[name] if name in chosen and name in params else own[name] for name in own}
    assert_same(loaded, expected)
    first = anatomy.snapshot(method.load(runner.client(0, 1, {}), params))  # the first time W^c is the initial model
    start = anatomy.snapshot(model)
    assert_same(first, {n: params[n] if n in chosen and n in params else start[n] for n in start})


def test_by_hand() -> None:
    """Only the head is loaded (strategy fc), two rounds of two clients, by samples 1/4 and 3/4.

    w_c = w - g_c(w); W = w_0/4 + 3 w_1/4, the bodies too. In round 2 client c starts from its own b and the head of W:
    v_c = (b_c; H) - g_c(b_c; H), and W = v_0/4 + 3 v_1/4. Three floats of four bytes to and from each client and round.
    """
    done = by_hand("partialfed-fix", 2, {"strategy": "fc", "finetune_epochs": 0})
    first = [descend(START, client) for client in (0, 1)]
    _, *head = mean(*first, 0.25)
    begin = [(w[0], head[0], head[1]) for w in first]
    second = [combine((1, w), (-1, gradient(w, client))) for client, w in enumerate(begin)]
    average = mean(*second, 0.25)
    assert values(done.server["params"]) == near(*average)
    for client in (0, 1):
        assert values(done.states[client]["own"]) == near(*second[client])
        assert values(done.personal[client]) == near(second[client][0], *average[1:])
    assert done.result.bytes_up == done.result.bytes_down == 2 * 2 * 12


def test_payload_does_not_depend_on_the_strategy() -> None:
    """13: all of W goes up and down in every round, whatever is loaded; tuning at the end downloads it once more."""
    size = anatomy.params(Blocks()).nbytes
    assert size == 4 * (4 * 5 + 5 + 6 * (5 * 5 + 5) + 7 * 4 * 5 + 5 * 3 + 3)
    for strategy in ("full", "none", "wo_bn_fc"):
        done = go(strategy=strategy)
        assert (done.result.bytes_up, done.result.bytes_down) == (6 * size, (6 + 4) * size)


@pytest.mark.parametrize("strategy", ["full", "none", "wo_bn_fc", "s2", "abc"])
def test_skip_unused(strategy: str) -> None:
    """13: the same models from fewer bytes. A client gets all of W once, then what it loads, and sends no more."""
    plain, lean = (go(strategy=strategy, skip_unused=skip, run_dropout=0.2) for skip in (False, True))
    assert_same(lean.personal, plain.personal)
    assert_same(lean.states, plain.states)
    assert lean.result.values == plain.result.values
    used = loads(Blocks(), strategy) & anatomy.shareable(Blocks())
    assert_same(lean.server["params"], plain.server["params"].only(used))
    seen: set[int] = set()
    for message in lean.messages:
        down, up = message.down["params"], message.up.get("params")
        assert isinstance(down, Tensors)
        assert down.keys() == (used if message.client in seen else anatomy.shareable(Blocks()))
        if message.step == "update":
            assert isinstance(up, Tensors)
            assert up.keys() == used
            seen.add(message.client)
    assert seen < set(CLIENTS)  # so somebody is new when all are tuned
    if strategy not in ("full", "none"):
        assert lean.result.bytes_up < plain.result.bytes_up
        assert lean.result.bytes_down < plain.result.bytes_down


def test_weights_of_the_mean() -> None:
    """15: they are n_c / n and sum to 1: the mean of what was sent, and unchanged if nobody moved."""
    done = go(strategy="wo_fc", rounds=1, run_fraction=1.0)
    sizes = [len(client.train) for client in DATA.clients]
    sent = [message.up["params"] for message in done.messages if message.step == "update"]
    for name, tensor in done.server["params"].items():
        expected = sum(n / sum(sizes) * w[name].double() for n, w in zip(sizes, sent, strict=True))  # type: ignore[index, union-attr]
        torch.testing.assert_close(tensor.double(), expected, rtol=1e-6, atol=1e-7)
    still = go(strategy="wo_fc", run_local={"epochs": 0}, run_fraction=1.0)
    assert_same(still.server["params"], initial(Blocks).only(still.server["params"]))


def test_tuning_starts_from_the_last_mean() -> None:
    """Fine-tuning is that of the method it reduces to followed by fine-tuning of all layers; F = E by default."""
    for strategy, other in (("full", "fedavg+ft"), ("wo_fc", "fedper+ft")):
        assert_same(go(strategy=strategy).personal, go(other, ft_epochs=2, ft_scope="all").personal)
    three, more = go(finetune_epochs=2), go(finetune_epochs=3)
    assert_same(three.personal, go().personal)
    assert not same(three.personal, more.personal)
    assert_same(three.server, more.server)
    assert "finetuned/local-test" in three.result.metrics
    assert "untuned/local-test" in three.result.metrics


@pytest.mark.parametrize("method", ["partialfed-fix", "partialfed-adaptive"])
def test_tuning_at_a_rate_of_its_own(method: str) -> None:
    """That of local training by default, which no schedule lowers at the end."""
    decaying = {"run_local": {**LOCAL, "schedule": "step:0"}}
    tuned, same_rate, own = (
        go(method, **decaying, **hyper) for hyper in ({}, {"finetune_lr": 0.2}, {"finetune_lr": 0.1})
    )
    assert_same(same_rate.personal, tuned.personal)
    assert not same(own.personal, tuned.personal)
    assert_same(own.server, tuned.server)
    with pytest.raises(UserError, match=r"finetune_lr must be > 0"):
        go(method, finetune_lr=0)


def test_tuning_sends_nothing_and_no_epochs_call_nobody() -> None:
    """All clients tune in round T + 1; with F = 0 nothing happens there."""
    tuned, plain = go(), go(finetune_epochs=0)
    last = [message for message in tuned.messages if message.round == 4]
    assert [(message.client, message.up) for message in last] == [(client, {}) for client in CLIENTS]
    assert not [message for message in plain.messages if message.round == 4]
    assert {name.partition("/")[0] for name in plain.result.metrics} == {"personal"}


def test_more_tuning_on_top() -> None:
    """partialfed-fix+ft tunes the head of the tuned model, which is then called untuned; no epochs change nothing."""
    base, none, more = go(), go("partialfed-fix+ft", ft_epochs=0), go("partialfed-fix+ft", ft_epochs=2)
    assert_same(none.personal, base.personal)
    backbone, head = anatomy.BACKBONE.names(Blocks()), anatomy.HEAD.names(Blocks())
    for client in CLIENTS:
        assert_same(more.personal[client].only(backbone), base.personal[client].only(backbone))
        assert not same(more.personal[client].only(head), base.personal[client].only(head))
    for plain in (go(), go(finetune_epochs=0)):
        hyper = {"finetune_epochs": plain.result.config["hyper"]["finetune_epochs"]}
        on_top = go("partialfed-fix+ft", **hyper, ft_epochs=20).result.metrics
        assert on_top["untuned/local-test/ece"] == plain.result.metrics["personal/local-test/ece"]
        assert on_top["untuned/local-test/ece"] != on_top["personal/local-test/ece"]


@pytest.mark.parametrize(("policy", "strategy"), [("local-all", "wo_bn"), ("local-stats", "wo_bn_stats")])
def test_the_bn_policy_applies_on_top(policy: str, strategy: str) -> None:
    """What the run keeps local is not loaded, whatever the strategy says, and does not travel."""
    one, two = go(strategy="full", run_bn=policy), go(strategy=strategy)
    assert_same(one.personal, two.personal)
    assert one.server["params"].keys() == loads(Blocks(), strategy) & anatomy.shareable(Blocks())


def test_heads_of_their_own() -> None:
    """Models that differ in their heads: what they have in common is averaged, heads stay."""

    def other() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 4))

    for skip in (False, True):
        done = go(model=[mlp, other], strategy="full", skip_unused=skip)
        assert set(done.server["params"]) == {"0.weight", "0.bias"}
        assert [len(done.personal[client]["2.bias"]) for client in CLIENTS] == [3, 4, 3, 4]


def test_names_of_strategies_are_taken_before_labels() -> None:
    """All of the paper's strategies are well formed."""
    paper = ["full", "none", "s1", "s1-s2", "s1-s3", "s1-s4", "fc", "s4-fc", "s3-fc", "s2-fc", *loading.NAMED, *SKIPS]
    assert [name for name in paper if loading.form(name) is not None] == []


def test_the_bytes_in_the_docs(tiny: Federation) -> None:
    """cnn-small-bn on digits: 38,474 floats, of which wo_bn_fc loads 37,632; 4 clients, 2 rounds, and the tuning."""
    whole, loaded = 4 * 38_474, 4 * 37_632
    plain, lean = (
        go(model="cnn-small-bn", data=tiny, rounds=2, run_fraction=1.0, skip_unused=x) for x in (False, True)
    )
    assert (plain.result.bytes_up, plain.result.bytes_down) == (8 * whole, 12 * whole) == (1_231_168, 1_846_752)
    assert (lean.result.bytes_up, lean.result.bytes_down) == (8 * loaded, 4 * whole + 8 * loaded)
    assert (lean.result.bytes_up, lean.result.bytes_down) == (1_204_224, 1_819_808)
