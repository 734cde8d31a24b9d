"""The command line: every command, its JSON, its options, and what it prints where."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import io
import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import pfed as package
from pfed import Experiment, cli, progress, registry
from pfed.data import sources
from pfed.data.catalog import SOURCES
from pfed.result import Result

SMALL: tuple[object, ...] = ("--clients", 4, "--rounds", 2, "--model", "mlp")
MAIN = "personal/local-test"


@pytest.fixture(autouse=True, scope="module")
def _few_digits() -> Iterator[None]:
    """Commands do not depend on the number of digits."""
    digits = sources.load("digits")
    few = dataclasses.replace(digits, x=digits.x[:120], y=digits.y[:120])
    original = sources.load
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            sources, "load", lambda name, *more, **size: few if name == "digits" else original(name, *more, **size)
        )
        yield


@dataclasses.dataclass
class Done:
    code: int | str | None
    out: str
    err: str

    @property
    def json(self) -> Any:
        """All that was printed, as one JSON value."""
        return json.loads(self.out)


def pfed(*argv: object, err: io.StringIO | None = None) -> Done:
    """A command in this process."""
    out, err = io.StringIO(), err or io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code: Any = cli.main([str(word) for word in argv])
        except SystemExit as end:
            code = end.code
    return Done(code, out.getvalue(), err.getvalue())


def good(*argv: object) -> Done:
    """A command that must work, and that says nothing on the side."""
    done = pfed(*argv)
    assert (done.code, done.err) == (0, "")
    return done


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with three runs: fedrep, then fedavg, then local."""
    folder = tmp_path_factory.mktemp("three") / "runs"
    for method in ("fedrep", "fedavg", "local"):
        good("run", method, *SMALL, "--runs", folder)
    return folder


def test_run_prints_a_table_and_where_the_run_is(tmp_path: Path) -> None:
    done = good("run", "fedrep", *SMALL, "--runs", tmp_path / "here")
    header, rule, row, blank, *notes, last = done.out.splitlines()
    assert re.split(r"\s{2,}", header) == [
        "method",
        "accuracy %",
        "worst decile",
        "gain over Local",
        "per client",
        "time",
    ]
    assert set(rule) == {"-", " "}
    assert row.startswith("fedrep ")
    assert blank == ""
    assert notes == ["no official test set: 20% of the samples were set apart for testing"]
    assert last == f"run fedrep-digits-s0-1 in {tmp_path / 'here'}"
    assert (tmp_path / "here" / "fedrep-digits-s0-1" / "record.sqlite").is_file()


def test_run_json_is_one_object_with_everything(tmp_path: Path) -> None:
    found = good("run", "fedrep", *SMALL, "--seed", 3, "--engine", "debug", "--runs", tmp_path, "--json").json
    keys = {"run", "method", "seed", "engine", "rounds", "metrics", "per_client", "bytes_up", "bytes_down", "seconds"}
    assert keys <= found.keys()
    assert (found["run"], found["method"], found["seed"]) == ("fedrep-digits-s3-1", "fedrep", 3)
    assert (found["engine"], found["rounds"], found["state"]) == ("debug", 2, "complete")
    assert {MAIN, f"{MAIN}/worst-decile", f"{MAIN}/best-decile", f"{MAIN}/std"} <= found["metrics"].keys()
    assert [row["client"] for row in found["per_client"]] == [0, 1, 2, 3]
    mean = sum(row[MAIN] for row in found["per_client"]) / 4
    assert found["metrics"][MAIN] == pytest.approx(mean)
    assert found["metrics"][f"{MAIN}/worst-decile"] == min(row[MAIN] for row in found["per_client"])
    for way in ("bytes_up", "bytes_down"):
        body = 4 * (64 * 200 + 200)  # bytes of the shared layer
        assert found[way] == sum(row[way] for row in found["per_client"]) == 4 * 2 * body
    assert found["seconds"] > 0


def test_a_process_of_its_own_is_quiet_and_ends_with_0(tmp_path: Path) -> None:
    """Nothing on stderr where nobody looks, and stdout is one JSON object."""
    argv = [sys.executable, "-m", "pfed", "run", "local", *map(str, SMALL), "--test-fraction", "0.9", "--json"]
    done = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, timeout=200)
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["run"] == "local-digits-s0-1"
    assert [path.name for path in tmp_path.iterdir()] == ["runs"]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_sees_progress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Round, accuracy, samples per second, bytes and time left; gone at the end, and never on stdout."""
    every_time = functools.partial(progress._Bar, mininterval=0, miniters=1)  # else a fast round may not be shown
    monkeypatch.setattr(progress, "_Bar", every_time)
    screen = Terminal()
    done = pfed("run", "fedavg", *SMALL, "--runs", tmp_path, "--json", err=screen)
    assert done.code == 0
    *shown, wiped, end = screen.getvalue().split("\r")
    for word in ("fedavg", "2/2", "accuracy=", "samples/s=", "MB=", "<00:00"):
        assert word in shown[-1]
    assert (wiped.strip(), end) == ("", "")
    assert done.json["state"] == "complete"


def write_toml(path: Path, config: dict[str, Any]) -> Path:
    """The configuration as TOML, which has no word for none: such options are left out."""
    tables = {key: value for key, value in config.items() if isinstance(value, dict)}
    lines = [f"{k} = {json.dumps(v)}" for k, v in config.items() if k not in tables and v is not None]
    for name, table in tables.items():
        lines += ["", f"[{json.dumps(name)}]"]
        lines += [f"{key} = {json.dumps(value)}" for key, value in table.items() if value is not None]
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


def test_run_takes_a_toml_file_and_flags_win(tmp_path: Path) -> None:
    """The same settings as flags and as a file give the same numbers."""
    path = tmp_path / "preset.toml"
    path.write_text(
        'method = "fedprox"\nclients = 4\nrounds = 2\nmodel = "mlp"\nalpha = 0.5\nmin_size = 2\n'
        "[local]\nlr = 0.1\nmomentum = 0.5\n[hyper]\nmu = 0.25\n"
    )
    split = ("--alpha", 0.5, "--min-size", 2, "--local.lr", 0.1, "--local.momentum", 0.5)
    file = good("run", path, "--runs", tmp_path / "file", "--json").json
    flags = good("run", "fedprox", *SMALL, *split, "--set", "mu=0.25", "--runs", tmp_path / "flags", "--json").json
    assert file["metrics"] == flags["metrics"]
    assert file["per_client"] == flags["per_client"]
    configs = [Result.load(tmp_path / name / file["run"]).config for name in ("file", "flags")]
    assert configs[0] == configs[1]
    assert configs[0]["hyper"]["mu"] == 0.25
    other = good("run", path, "--rounds", 1, "--set", "fedprox.mu=0.5", "--runs", tmp_path / "other", "--json").json
    assert other["rounds"] == 1
    assert Result.load(tmp_path / "other" / other["run"]).config["hyper"]["mu"] == 0.5


OWN = '''
from dataclasses import dataclass

from pfed import Method, option, step


class Helper:
    pass


@dataclass(frozen=True)
class Mine(Method):
    """Mine: FedAvg with a factor (nobody, 2024)."""

    factor: float = option(1.0, "scales the update", gt=0)

    def round(self, server, cohort):
        server["params"] = cohort.mean(self.update, "params", **self.download(server))

    @step
    def update(self, client, params):
        model = client.model(params)
        client.fit(model)
        return {"params": params + self.factor * (client.share(model) - params)}

    def predictor(self, client, params):
        return client.model(params)
'''


def test_run_takes_a_method_from_a_file(tmp_path: Path) -> None:
    """With or without the class's name; its options are set as those of any method, and it resumes from its record."""
    path = tmp_path / "mine.py"
    path.write_text(OWN)
    named = good("run", f"{path}:Mine", *SMALL, "--set", "factor=0.5", "--runs", tmp_path, "--json").json
    alone = good("run", path, *SMALL, "--set", "factor=0.5", "--runs", tmp_path, "--json").json
    assert named["method"] == alone["method"] == "mine"
    assert [named["run"], alone["run"]] == ["mine-digits-s0-1", "mine-digits-s0-2"]
    assert named["metrics"] == alone["metrics"]
    assert Result.load(tmp_path / named["run"]).config["hyper"] == {"factor": 0.5}
    assert good("resume", named["run"], "--runs", tmp_path, "--json").json == named
    bad = pfed("run", f"{path}:Mine", *SMALL, "--set", "factor=0", "--runs", tmp_path)
    assert (bad.code, bad.err) == (2, "pfed: Mine.factor must be > 0. Got 0.0.\n")
    (described,) = good("methods", f"{path}:Mine", "--json").json
    assert (described["title"], described["paper"]) == ("Mine: FedAvg with a factor", "nobody, 2024")


def test_compare_json_is_a_list_of_runs(tmp_path: Path) -> None:
    """Methods by seeds, each as `run --json`, with the gain over Local."""
    argv = ("compare", "local", "fedavg", "fedprox", *SMALL, "--seeds", 2, "--set", "fedprox.mu=0")
    found = good(*argv, "--runs", tmp_path, "--json").json
    assert [(row["method"], row["seed"]) for row in found] == [
        (method, seed) for seed in (0, 1) for method in ("local", "fedavg", "fedprox")
    ]
    assert all(row["state"] == "complete" for row in found)
    assert {row["run"] for row in found} == {path.name for path in tmp_path.iterdir()}
    _, fedavg, fedprox, *_ = found
    assert fedprox["metrics"] == fedavg["metrics"]  # with mu = 0 they are the same
    local = {row["client"]: row[MAIN] for row in found[0]["per_client"]}
    gains = [row[MAIN] - local[row["client"]] for row in fedavg["per_client"]]
    assert fedavg["metrics"]["gain-over-local"] == pytest.approx(sum(gains) / 4)
    assert found[0]["metrics"]["gain-over-local"] == 0


def test_compare_prints_one_row_per_method(tmp_path: Path) -> None:
    done = good("compare", "local", "fedavg", *SMALL, "--seeds", "3,5", "--runs", tmp_path)
    header, _, *rows, blank, note = done.out.splitlines()
    assert "gain over Local" in header
    assert [row.split()[0] for row in rows] == ["local", "fedavg"]
    assert (blank, note) == ("", "no official test set: 20% of the samples were set apart for testing")
    assert "±" in rows[1]
    assert re.search(r"[+-]\d+\.\d\d", rows[1])
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        f"{method}-digits-s{seed}-1" for method in ("fedavg", "local") for seed in (3, 5)
    ]


def test_compare_counts_seeds_from_the_given_one(tmp_path: Path) -> None:
    found = good("compare", "local", *SMALL, "--seed", 7, "--seeds", 2, "--runs", tmp_path, "--json").json
    assert [row["seed"] for row in found] == [7, 8]


def test_compare_sets_options_method_by_method(tmp_path: Path) -> None:
    argv = ("compare", "fedprox", "ditto", *SMALL, "--set", "fedprox.mu=0.5", "--set", "ditto.lam=2", "--set", "seed=4")
    found = good(*argv, "--set", "local.lr=0.01", "--runs", tmp_path, "--json").json
    configs = [Result.load(tmp_path / row["run"]).config for row in found]
    assert configs[0]["hyper"]["mu"] == 0.5
    assert configs[1]["hyper"]["lam"] == 2
    assert [config["seed"] for config in configs] == [4, 4]
    assert [config["local"]["lr"] for config in configs] == [0.01, 0.01]


def test_compare_writes_a_report(tmp_path: Path) -> None:
    page = tmp_path / "out" / "page.html"
    good("compare", "local", "fedavg", *SMALL, "--runs", tmp_path / "runs", "--report", page)
    assert "fedavg" in page.read_text(encoding="utf-8")


def test_the_method_local_and_local_training_do_not_get_mixed_up(tmp_path: Path) -> None:
    """[local] is how a client trains, also for the method of that name; its own option stays reachable."""
    argv = ("run", "local", *SMALL, "--local.lr", 0.2, "--set", "local.momentum=0.5")
    found = good(*argv, "--runs", tmp_path, "--json").json
    config = Result.load(tmp_path / found["run"]).config
    experiment = Experiment.from_config(config)
    assert experiment.options.local.lr == 0.2
    assert experiment.options.local.momentum == 0.5
    assert experiment.config() == config
    good("compare", "local", "fedavg", *SMALL, "--local.lr", 0.2, "--runs", tmp_path)
    done = good("run", "local", *SMALL, "--set", "matched_participation=true", "--runs", tmp_path, "--json").json
    again = Experiment.from_config(Result.load(tmp_path / done["run"]).config)
    assert again.method.hyperparameters() == {"matched_participation": True}


CONFIGS = {
    **{name: {} for name in registry.methods()},
    "fedavg+ft": {"ft_epochs": 3, "ft_scope": "all", "agg": "uniform"},
    "fedprox": {"mu": 0.125},
}


@pytest.mark.parametrize("form", ["json", "toml"])
@pytest.mark.parametrize("name", CONFIGS)
def test_a_configuration_survives_json_and_toml(tmp_path: Path, name: str, form: str) -> None:
    """Every option explicit, written, read, and the same again."""
    changes = {"clients": 7, "alpha": 0.3, "deadline": 2.5, "keep_optimizer": True, "seed": 2**40, "bn": "local-stats"}
    local = {"lr": 1e-3, "epochs": 2, "nesterov": True, "momentum": 0.9, "schedule": "step:0.5,0.75"}
    config = Experiment(name, hyper=CONFIGS[name], local=local, **changes).config()
    if form == "json":
        read = json.loads(json.dumps(config))
    else:
        read = tomllib.loads(write_toml(tmp_path / "config.toml", config).read_text(encoding="utf-8"))
    again = Experiment.from_config(read)
    assert again.config() == config
    assert again.options.local.lr == 1e-3
    assert again.options.deadline == 2.5
    assert again.method.hyperparameters().items() >= CONFIGS[name].items()


def test_methods_lists_all_of_them() -> None:
    found = good("methods", "--json").json
    assert [entry["name"] for entry in found] == list(registry.methods())
    first = {"local", "all", "fedavg", "fedprox", "fedper", "lg-fedavg", "fedrep", "fedbn", "silobn", "ditto"}
    assert first <= {entry["name"] for entry in found}
    for entry in found:
        assert {"name", "title", "paper", "fields", "needs"} <= entry.keys()
        assert entry["title"]
        assert isinstance(entry["needs"], list)
        for field in entry["fields"].values():
            assert {"default", "type", "help"} <= field.keys()
    fedprox = next(entry for entry in found if entry["name"] == "fedprox")
    assert fedprox["paper"] == "Li et al., MLSys 2020"
    assert fedprox["fields"]["mu"] == {"default": 0.1, "type": "float", "help": "weight of the proximal term"}
    text = good("methods").out
    assert all(re.search(rf"^{re.escape(entry['name'])} ", text, re.MULTILINE) for entry in found)
    assert "+ft" in text


def test_methods_describes_one() -> None:
    text = good("methods", "fedprox").out
    assert text.startswith("FedProx: FedAvg with a pull towards the received model (Li et al., MLSys 2020).")
    assert "Deviations from the paper" in text
    assert "  mu = 0.1  (float)  weight of the proximal term" in text
    assert "  agg = samples  (samples|uniform)" in text
    assert "ft_epochs = 10" in good("methods", "fedavg+ft").out
    (entry,) = good("methods", "ditto", "--json").json
    assert entry["name"] == "ditto"


def test_runs_lists_the_newest_first(runs: Path) -> None:
    found = good("runs", "--runs", runs, "--json").json
    assert [row["method"] for row in found] == ["local", "fedavg", "fedrep"]
    assert [row["run"] for row in found] == ["local-digits-s0-1", "fedavg-digits-s0-1", "fedrep-digits-s0-1"]
    assert all((row["state"], row["round"], row["rounds"]) == ("complete", 2, 2) for row in found)
    lines = good("runs", "--runs", runs).out.splitlines()
    assert lines[0].split() == ["run", "state", "round", "age", "size"]
    assert [line.split()[0] for line in lines[2:]] == [row["run"] for row in found]
    assert all("complete" in line and "2/2" in line for line in lines[2:])


def test_runs_of_an_empty_folder(tmp_path: Path) -> None:
    assert good("runs", "--runs", tmp_path / "none").out == f"No runs in {tmp_path / 'none'}.\n"
    assert good("runs", "--runs", tmp_path / "none", "--json").json == []
    assert not (tmp_path / "none").exists()


def test_runs_rm_deletes_what_it_is_told(tmp_path: Path) -> None:
    good("compare", "local", *SMALL, "--rounds", 0, "--seeds", 3, "--runs", tmp_path)
    good("runs", "rm", "local-digits-s0-1", "local-digits-s2-1", "--runs", tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["local-digits-s1-1"]
    bad = pfed("runs", "rm", "local-digits-s1-1", "local-digits-s9-1", "--runs", tmp_path)
    assert bad.code == 2
    assert [path.name for path in tmp_path.iterdir()] == ["local-digits-s1-1"]  # all or none
    good("runs", "rm", "local-digits-s1-1", "local-digits-s1-1", "--runs", tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_resume_prints_a_complete_run(runs: Path) -> None:
    found = good("resume", "fedavg-digits-s0-1", "--runs", runs, "--json").json
    assert (found["run"], found["method"], found["rounds"]) == ("fedavg-digits-s0-1", "fedavg", 2)
    assert MAIN in found["metrics"]
    text = good("resume", runs / "fedavg-digits-s0-1", "--runs", runs).out
    assert "fedavg" in text.splitlines()[2]
    assert text.endswith(f"run fedavg-digits-s0-1 in {runs}\n")


def test_report_writes_a_page_about_runs(runs: Path, tmp_path: Path) -> None:
    path = tmp_path / "deep" / "page.html"
    done = good("report", "fedrep-digits-s0-1", "local-digits-s0-1", "--runs", runs, "--out", path)
    assert done.out == f"{path}\n"
    page = path.read_text(encoding="utf-8")
    assert "<html" in page
    assert "fedrep" in page
    assert "local" in page
    assert not re.search(r"""(src|href)=["']https?:""", page)


def test_report_writes_figures_and_their_numbers(runs: Path, tmp_path: Path) -> None:
    names = ("fedrep-digits-s0-1", "local-digits-s0-1", "--runs", runs)
    for form in ("svg", "csv"):
        done = good("report", *names, "--format", form, "--out", tmp_path)
        paths = [Path(line) for line in done.out.splitlines()]
        assert tmp_path / f"accuracy-by-round.{form}" in paths
        assert sorted(paths) == sorted(tmp_path.glob(f"*.{form}"))


def test_data_list_get_check_show(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PFED_CACHE", str(tmp_path / "cache"))
    header, _, *rows = good("data", "list").out.splitlines()
    assert header.split() == ["name", "what", "samples", "classes", "download", "here"]
    here = {row.split()[0]: row.split()[-1] for row in rows}
    assert here == {name: "yes" if name == "digits" else "no" for name in SOURCES}
    assert re.search(r"by hand +no$", rows[-1])
    listed = good("data", "list", "--json").json
    assert {entry["name"]: "yes" if entry["cached"] else "no" for entry in listed} == here
    assert listed[0]["classes"] == 10
    assert Path(good("data", "get", "digits").out.strip()).is_dir()
    assert good("data", "check", "digits").out == "digits is fine.\n"
    missing = pfed("data", "check", "mnist")
    assert (missing.code, missing.err) == (1, "")
    assert missing.out == "mnist is not here: `pfed data get mnist` fetches it.\n"
    assert not (tmp_path / "cache").exists()


def test_data_show_draws_the_clients(tmp_path: Path) -> None:
    picture = tmp_path / "split.svg"
    done = good("data", "show", "digits", "--clients", 5, "--classes-per-client", 2, "--seed", 1, "--out", picture)
    assert "5 clients, 10 classes" in done.out
    assert [line.split()[0] for line in done.out.splitlines()[-5:]] == [f"client-{k}" for k in range(5)]
    assert "<svg" in picture.read_text(encoding="utf-8")
    other = good("data", "show", "digits", "--clients", 5, "--classes-per-client", 2, "--seed", 2)
    assert other.out != done.out
    found = good("data", "show", "digits", "--clients", 5, "--classes-per-client", 2, "--json").json
    assert found["clients"] == [f"client-{k}" for k in range(5)]
    assert all(sum(count > 0 for count in row) <= 2 for row in found["class_counts"])


def test_where_runs_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """--runs, else PFED_RUNS, else ./runs."""
    monkeypatch.chdir(tmp_path)
    argv = ("run", "local", "--clients", 2, "--rounds", 0, "--model", "mlp")
    good(*argv)
    monkeypatch.setenv("PFED_RUNS", str(tmp_path / "env"))
    good(*argv)
    good(*argv, "--runs", "given")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["env", "given", "runs"]
    assert [row["run"] for row in good("runs", "--json").json] == ["local-digits-s0-1"]
    assert all(len(list(path.iterdir())) == 1 for path in tmp_path.iterdir())


def test_version_and_bare_command() -> None:
    assert good("--version").out == f"pfed {package.__version__}\n"
    assert good().out == good("--help").out


COMMON = {"--help", "--json", "--runs"}
SPLIT = {
    *("--alpha", "--balance-cap", "--classes-per-client", "--client-column", "--clients", "--distinct-classes"),
    *("--femnist-pointer", "--groups", "--image-size", "--label-column", "--min-size", "--partition", "--public"),
    *("--public-in-train", "--shift", "--sigma", "--test-fraction", "--test-split", "--train-cap", "--validation"),
}
RUN = {
    *(
        "--augment",
        "--bn",
        "--channels-last",
        "--checkpoint-every",
        "--data",
        "--deadline",
        "--device",
        "--dropout",
        "--engine",
        "--eval-every",
        "--eval-last",
    ),
    *("--eval-point", "--exact-shortcuts", "--external", "--fraction", "--head", "--keep-optimizer", "--min-clients"),
    *(
        "--model",
        "--new-test",
        "--new-test-every",
        "--normalise",
        "--pretrained",
        "--ray-address",
        "--representation",
        "--rounds",
        "--seed",
        "--select",
        "--set",
        "--preset",
        "--state-memory",
        "--together",
        "--track",
        "--workers",
    ),
    *("--slowdown", "--stragglers", "--task", "--local.batch-size", "--local.epochs", "--local.lr", "--local.momentum"),
    *("--local.nesterov", "--local.schedule", "--local.weight-decay"),
}
COMMANDS = {
    "run": COMMON | SPLIT | RUN,
    "compare": COMMON | SPLIT | RUN | {"--seeds", "--report", "--reuse"},
    "tune": COMMON | SPLIT | RUN | {"--try", "--rates", "--search", "--least", "--seeds", "--out"},
    "resume": COMMON | {"--rounds"},
    "stop": COMMON,
    "runs": COMMON,
    "methods": COMMON,
    "data": COMMON | SPLIT | {"--force", "--out", "--seed"},
    "deploy": {"--help"},
    "report": COMMON | {"--format", "--out"},
    "watch": COMMON | {"--host", "--port", "--no-open"},
    "reproduce": COMMON | {"--scale", "--methods", "--seeds", "--seed", "--out", "--engine", "--workers", "--device"},
}
DEPLOY = {
    "init": {"--help", "--sites", "--server", "--port"},
    "request": {"--help", "--out"},
    "sign": {"--help", "--out", "--folder"},
    "kit": {"--help", "--request", "--out", "--fingerprint"},
    "server": {"--help", "--runs", "--classes", "--public", "--image-size", "--detach"},
    "join": {
        *("--help", "--data", "--model", "--label-column", "--device", "--approve-within", "--server"),
        *("--classes", "--public", "--image-size", "--detach"),
    },
    "approve": {"--help", "--kit", "--show"},
    "run": (COMMON - {"--runs"})
    | SPLIT
    | RUN
    | {"--resume", "--records", "--dp-clip", "--dp-noise", "--dp-delta", "--folder"},
    "status": {"--help"},
    "stop": {"--help"},
}


@pytest.fixture
def _plain_help(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("NO_COLOR", "1")


@pytest.mark.usefixtures("_plain_help")
def test_the_commands_are_these() -> None:
    """Frozen: who changes a command or an option changes this list too."""
    listed = re.findall(r"^    (\w+) ", good("--help").out, re.MULTILINE)
    assert listed == list(COMMANDS)


@pytest.mark.usefixtures("_plain_help")
@pytest.mark.parametrize("command", COMMANDS)
def test_the_options_are_these_and_help_lists_every_one(command: str) -> None:
    """Words are joined by -; as in Python and TOML, _ is understood too."""
    text = good(command, "--help").out
    described = text[text.index("options:") :]
    found = set(re.findall(r"--[a-z][\w.-]*", "\n".join(re.findall(r"^ +-.*?(?:  |$)", described, re.MULTILINE))))
    assert found == COMMANDS[command]
    underscored = {option[:2] + option[2:].replace("-", "_") for option in COMMANDS[command]}
    assert underscored <= set(cli._flags(cli._parser(), command))


@pytest.mark.usefixtures("_plain_help")
@pytest.mark.parametrize("command", DEPLOY)
def test_the_options_of_deploy_are_these(command: str) -> None:
    text = good("deploy", command, "--help").out
    described = text[text.index("options:") :]
    found = set(re.findall(r"--[a-z][\w.-]*", "\n".join(re.findall(r"^ +-.*?(?:  |$)", described, re.MULTILINE))))
    assert found == DEPLOY[command]


@pytest.mark.usefixtures("_plain_help")
def test_help_tells_what_an_option_does_and_its_default() -> None:
    text = good("run", "--help").out
    assert re.search(r"--rounds int +communication rounds \[20\]", text)
    assert re.search(r"--local\.lr float +learning rate \[0\.05\]", text)
    entries = re.split(r"^  (?=-)", text[text.index("options:") :], flags=re.MULTILINE)[1:]
    assert len(entries) == len(COMMANDS["run"])
    assert [entry for entry in entries if not re.search(r"\s{2,}\w.*\w", entry)] == []


def test_help_does_not_wait_for_torch() -> None:
    code = "import sys; from pfed import cli; cli._parser(); print([m for m in ('torch', 'numpy') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("[]\n", "")
