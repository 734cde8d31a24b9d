"""A user's mistake: exit code 2, one sentence that names what, rule and value, and nothing left behind."""

from __future__ import annotations

import contextlib
import dataclasses
import gzip
import io
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from pfed import Experiment, UserError, cli
from pfed.data import sources
from pfed.data.base import Dataset

DIGITS = ("--clients", "4", "--model", "mlp", "--rounds", "1")


@pytest.fixture(autouse=True, scope="module")
def _small_data() -> Iterator[None]:
    """Few digits; and a `usps` that need not be fetched."""
    original = sources.load
    digits = original("digits")
    few = dataclasses.replace(digits, x=digits.x[:120], y=digits.y[:120])
    other = Dataset("usps", torch.zeros(20, 1, 16, 16), torch.arange(20) % 10, digits.classes)
    with pytest.MonkeyPatch.context() as patch:
        known = {"digits": few, "usps": other}
        patch.setattr(sources, "load", lambda name, **size: known.get(name) or original(name, **size))
        yield


@dataclasses.dataclass
class Place:
    """A working folder, and what commands in it say."""

    folder: Path
    runs: Path

    def files(self) -> list[Path]:
        """All but those that SQLite puts beside a record while it is read, and Python beside a file it imports."""
        found = [path for path in self.folder.rglob("*") if not path.name.startswith("record.sqlite-")]
        return sorted(path for path in found if "__pycache__" not in path.parts)

    def refused(self, *argv: str, runs: Path | None = None) -> str:
        """The one sentence of a command that must be refused and must leave nothing behind."""
        before = self.files()
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = cli.main([*argv, "--runs", str(runs or self.runs)])
        assert (code, out.getvalue()) == (2, ""), err.getvalue()
        assert self.files() == before
        (line,) = err.getvalue().splitlines()
        assert re.fullmatch(r"pfed: .*[.?]", line)
        return line.removeprefix("pfed: ")


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PFED_CACHE", str(tmp_path / "cache"))
    return Place(tmp_path, tmp_path / "runs")


NO_PACS = (
    "PACS is not here and cannot be fetched: get it from the project page of Li et al., Deeper, Broader and Artier "
    "Domain Generalization, ICCV 2017, put the folders photo, art_painting, cartoon, sketch or the file pacs_96px.npz "
    "into a folder named pacs and set PFED_DATA to the folder above it."
)
MISTAKES = {
    # what was typed: what must be said
    "run fedrpe": "There is no method 'fedrpe'. Did you mean 'fedrep'?",
    "run fedrpe+ft": "There is no method 'fedrpe'. Did you mean 'fedrep'?",
    "run fedavg+fd": "There is no method 'fedavg+fd'. Did you mean 'fedavg+ft'?",
    "compare local fedrpe": "There is no method 'fedrpe'. Did you mean 'fedrep'?",
    "methods fedrpe": "There is no method 'fedrpe'. Did you mean 'fedrep'?",
    "run fedavg --round 3": "There is no option '--round'. Did you mean '--rounds'?",
    "run fedavg --client=3": "There is no option '--client'. Did you mean '--clients'?",
    "compare fedavg --seed 1 --locl.lr 1": "There is no option '--locl.lr'. Did you mean '--local.lr'?",
    "run fedavg twice": "There is nothing to do with 'twice'. See 'pfed run --help'.",
    "run fedavg --rounds -1": "run.rounds must be >= 0. Got -1.",
    "run fedavg --rounds=-1": "run.rounds must be >= 0. Got -1.",
    "compare fedavg --rounds -1": "run.rounds must be >= 0. Got -1.",
    "run fedavg --rounds abc": "run.rounds must be a whole number. Got 'abc'.",
    "run fedavg --rounds 2.5": "run.rounds must be a whole number. Got '2.5'.",
    "run fedavg --clients 0": "run.clients must be >= 1. Got 0.",
    "run fedavg --fraction 1.5": "run.fraction must be <= 1. Got 1.5.",
    "run fedavg --local.lr 0": "local.lr must be > 0. Got 0.0.",
    "run fedavg --local.lr nan": "local.lr must be a number. Got 'nan'.",
    "run fedavg --local.momentum 1": "local.momentum must be < 1. Got 1.0.",
    "run fedavg --seed -1": "run.seed must be >= 0. Got -1.",
    "run fedavg --bn locl": "run.bn must be 'share' or 'local-stats' or 'local-all'. Got 'locl'.",
    "run fedavg --engine ray2": "run.engine must be 'serial' or 'processes' or 'ray' or 'debug' or 'nvflare'. Got"
    " 'ray2'.",
    "run fedavg --ray-address auto": "run.ray_address is for engine ray. Got it with run.engine 'serial'.",
    "run fedavg --engine ray --ray-address ray://head": "run.ray_address must be auto or HOST:PORT. Got 'ray://head'.",
    "run fedavg --engine ray --device cuda:1": "run.device must be cpu or cuda with engine ray. Got 'cuda:1'.",
    "run fedavg --exact-shortcuts maybe": "run.exact_shortcuts must be true or false. Got 'maybe'.",
    "run fedprox --set mu=-0.1": "FedProx.mu must be >= 0. Got -0.1.",
    "run fedprox --set mu=much": "FedProx.mu must be a number. Got 'much'.",
    "run fedavg --set agg=median": "FedAvg.agg must be 'samples' or 'uniform'. Got 'median'.",
    "run fedavg --set rounds": "--set takes KEY=VALUE. Got 'rounds'.",
    "run fedavg --set roundz=3": "There is no option of fedavg 'roundz'. Did you mean 'rounds'?",
    "run fedprox --set fedprox.nu=1": "There is no option of fedprox 'nu'. Did you mean 'mu'?",
    "run fedprox --set fedprx.mu=1": "There is no method in this command 'fedprx'. Did you mean 'fedprox'?",
    "run fedavg --set local.lrr=1": "There is no option of local 'lrr'. Did you mean 'lr'?",
    "compare fedavg fedprox --set fedprox.muu=1": "There is no option of fedprox 'muu'. Did you mean 'mu'?",
    "compare fedavg fedprox --set fedprx.mu=1": "There is no method in this command 'fedprx'. Did you mean 'fedprox'?",
    "run fedavg --set rounds=x": "run.rounds must be a whole number. Got 'x'.",
    "run fedavg --clients 5 --classes-per-client 11": (
        "classes_per_client must be <= 10, the number of classes. Got 11."
    ),
    "run fedavg --clients 4 --classes-per-client 3": (
        "classes_per_client * clients must be a multiple of the number of classes (10). Got 3 * 4; "
        "classes_per_client 5 or clients 10 would work."
    ),
    "run fedavg --clients 500": "96 training samples are too few for 500 clients (one each); 96 clients would fit.",
    "run fedavg --partition classes": "Partition classes needs classes_per_client, for example 2.",
    "run fedavg --partition iid --alpha 1": (
        "alpha is an option of partition dirichlet, but the partition is iid; leave alpha out or set partition to "
        "dirichlet."
    ),
    "run fedavg --partition domain": (
        "Partition domain needs to know the group (domain, writer, hospital) of each sample, and digits has none; "
        "partition iid works with any data."
    ),
    "run fedavg --clients 12 --alpha 0.0001 --min-size 5 --balance-cap false": (
        "No draw of Dirichlet(alpha=0.0001) over 12 clients out of 1000 gave each of them min_size = 5 samples; fewer "
        "clients or a larger alpha would work."
    ),
    "compare fedavg --clients 500": "96 training samples are too few for 500 clients (one each); 96 clients would fit.",
    "run fedavg --data digit": "There is no data set 'digit'. Did you mean 'digits'?",
    "data show digit": "There is no data set 'digit'. Did you mean 'digits'?",
    "data get digit": "There is no data set 'digit'. Did you mean 'digits'?",
    "data check digit": "There is no data set 'digit'. Did you mean 'digits'?",
    **{f"{command} pacs": NO_PACS for command in ("run fedavg --data", "data get", "data check", "data show")},
    "run fedavg --normalise imagenet": (
        "run.normalise 'imagenet' needs colour images. Got samples of shape (1, 8, 8)."
    ),
    "run fedavg --public-in-train true": "run.public_in_train needs run.public > 0. Got 0.",
    "data show": "'pfed data show' takes the name of a data set.",
    "run fedavg --external digit": "There is no data set 'digit'. Did you mean 'digits'?",
    "run fedavg --clients 4 --external usps": (
        "run.external must have the clients' shape (1, 8, 8). Got 'usps' of shape (1, 16, 16)."
    ),
    "run fedavg --model mlpp": "There is no model 'mlpp'. Did you mean 'mlp'?",
    "compare fedavg local --model mlpp": "There is no model 'mlpp'. Did you mean 'mlp'?",
    "run fedavg --model mlp,cnn-small": "fedavg needs the same architecture at every client. Got 2 different ones.",
    "run fedavg --clients 4 --min-clients 5": "run.min_clients must be <= run.clients (4). Got 5.",
    "run fedavg --select validation": (
        "run.select 'validation' needs validation data. Set run.validation, for example to 0.1."
    ),
    "run fedavg --local.schedule cosin": "local.schedule must be constant, cosine or step:F,F,…. Got 'cosin'.",
    "run fedavg --local.schedule step:": "local.schedule must be constant, cosine or step:F,F,…. Got 'step:'.",
    "run fedavg --local.schedule step:1,x": "local.schedule must be constant, cosine or step:F,F,…. Got 'step:1,x'.",
    "run fedavg --rounds 0 --local.schedule 0.5": "local.schedule must be constant, cosine or step:F,F,…. Got '0.5'.",
    "run fedavg --rounds 0 --local.schedule step:nan": (
        "local.schedule must be constant, cosine or step:F,F,…. Got 'step:nan'."
    ),
    "compare fedavg --seeds 0": "--seeds must be how many, or a list as in 0,1,2. Got '0'.",
    "compare fedavg --seeds 00": "--seeds must be how many, or a list as in 0,1,2. Got '00'.",
    "compare fedavg --seeds 1,x": "--seeds must be how many, or a list as in 0,1,2. Got '1,x'.",
    "compare fedavg --seeds ²": "--seeds must be how many, or a list as in 0,1,2. Got '²'.",
    "run nowhere.toml": "The file 'nowhere.toml' can't be read: No such file or directory.",
    "run nowhere.py:Mine": "There is no file 'nowhere.py' to take a method from.",
    "runs rm": "'pfed runs rm' takes the names of runs.",
}


PARTLY = {
    "run fedavg --data ./mine.csv": "There is no data set './mine.csv'. Known: cifar10, cifar100,",
    "data shw digits": "Argument action: invalid choice: 'shw' (choose from",
    "run fedavg --model cnn": "cnn",
    "run fedavg --model mlp --head fc9": "'fc9'",
    "resume fedavg-digits-s0-1": "There is no run 'fedavg-digits-s0-1': '",
    "runs rm fedavg-digits-s0-1": "There is no run 'fedavg-digits-s0-1': '",
    "runs mv": "Argument action: invalid choice: 'mv' (choose from 'rm')",
    "report fedavg-digits-s0-1": "There is no run 'fedavg-digits-s0-1': '",
    "rnu fedavg": "invalid choice: 'rnu' (choose from 'run', 'compare',",
    "run": "The following arguments are required: METHOD|FILE.toml. See 'pfed run --help'",
    "compare": "The following arguments are required: METHOD. See 'pfed compare --help'",
    "run fedavg --rounds": "Argument --rounds: expected one argument. See 'pfed run --help'",
}


@pytest.mark.parametrize("typed", MISTAKES)
def test_a_mistake_is_answered_by_one_sentence(place: Place, typed: str) -> None:
    """A mistake shows before anything is run, fetched or written."""
    assert place.refused(*typed.split()) == MISTAKES[typed]


@pytest.mark.parametrize("typed", PARTLY)
def test_a_mistake_is_answered_by_a_sentence_with_these_words(place: Place, typed: str) -> None:
    """Where the rest of the sentence is a list or a path."""
    assert PARTLY[typed] in place.refused(*typed.split())


def test_a_mistake_in_a_process_of_its_own(tmp_path: Path) -> None:
    """The exit code and the streams as a shell sees them."""
    argv = [sys.executable, "-m", "pfed", "run", "fedavg", "--rounds", "-1", "--runs", "here"]
    done = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, timeout=200)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "pfed: run.rounds must be >= 0. Got -1.\n"
    assert list(tmp_path.iterdir()) == []


TOML_MISTAKES = {
    "not TOML": ("method = fedavg", "The file 'bad.toml' is not TOML: "),
    "an unknown option": ("roundz = 3", "There is no option of the run 'roundz'. Did you mean 'rounds'?"),
    "a wrong type": ('rounds = "3"', "run.rounds must be a whole number. Got '3'."),
    "a wrong value": ("rounds = -3", "run.rounds must be >= 0. Got -3."),
    "an unknown method": ('method = "fedrpe"', "There is no method 'fedrpe'. Did you mean 'fedrep'?"),
    "a method that is no name": ("method = 3", "method must be the name of a method. Got 3."),
    "several methods": ('method = ["local"]', "method must be the name of a method. Got ['local']."),
    "no method": ('metod = "local"', "There is no option of the run 'metod'. Did you mean 'method'?"),
    "a misspelt table": ("[hypr]\nagg = 1", "There is no option of the run 'hypr'. Did you mean 'hyper'?"),
    "an unknown option of training": ("[local]\nlrr = 1", "There is no option of local 'lrr'. Did you mean 'lr'?"),
    "a wrong option of training": ('[local]\nlr = "x"', "local.lr must be a number. Got 'x'."),
    "training that is no table": ("local = 3", "local must be a table"),
    "an unknown option of the method": (
        'method = "fedprox"\n[hyper]\nmuu = 1',
        "There is no option of FedProx 'muu'. Did you mean 'mu'?",
    ),
    "a wrong option of the method": ('method = "fedprox"\n[hyper]\nmu = -1', "FedProx.mu must be >= 0. Got -1."),
    "a method's options that are no table": ('method = "fedprox"\nhyper = 3', "hyper must be a table"),
    "options of another method": ("[fedprox]\nmu = 1", "There is no option of the run 'fedprox'."),
    "data that are no name": ("data = 3", "run.data must be a text. Got 3."),
    "a model that is no name": ("model = 3", "run.model must be a text. Got 3."),
}


@pytest.mark.parametrize("mistake", TOML_MISTAKES)
def test_a_mistake_in_a_toml_file(place: Place, mistake: str) -> None:
    content, sentence = TOML_MISTAKES[mistake]
    (place.folder / "bad.toml").write_text(content)
    said = place.refused("run", "bad.toml")
    assert sentence in said


def test_a_toml_file_that_is_no_text_or_no_file(place: Place) -> None:
    (place.folder / "bad.toml").write_bytes(b"\xff\xfe\x00")
    assert "The file 'bad.toml' is not TOML: " in place.refused("run", "bad.toml")
    (place.folder / "folder.toml").mkdir()
    assert place.refused("run", "folder.toml") == "The file 'folder.toml' can't be read: Is a directory."


def test_a_file_without_methods_or_with_others(place: Place) -> None:
    """An imported class is not a method of the file."""
    (place.folder / "none.py").write_text("from pfed import Method\n\nclass Helper:\n    pass\n")
    assert place.refused("run", "none.py") == "none.py defines no method."
    assert place.refused("run", "none.py:Mine") == "none.py defines no method."
    (place.folder / "two.py").write_text(
        "from pfed import Method\nclass First(Method): ...\nclass Second(Method): ...\n"
    )
    said = place.refused("run", "two.py:Frist")
    assert said == "There is no method class in two.py 'Frist'. Did you mean 'First'?"
    assert "First, Second" in place.refused("run", "two.py")


def test_a_file_that_does_not_load_shows_where(place: Place) -> None:
    """A bug in a user's own file is a traceback that ends in that file, and no run folder."""
    (place.folder / "broken.py").write_text("import nowhere_to_be_found\n")
    with pytest.raises(ModuleNotFoundError, match="nowhere_to_be_found"):
        cli.main(["run", "broken.py", "--runs", str(place.runs)])
    assert not place.runs.exists()


@pytest.mark.parametrize("below", ["file", "file/runs", "file/deep/runs"])
@pytest.mark.parametrize("command", ["run", "compare"])
def test_a_runs_folder_that_cannot_be_written(place: Place, command: str, below: str) -> None:
    (place.folder / "file").write_text("not a folder")
    said = place.refused(command, "fedavg", *DIGITS, runs=place.folder / below)
    assert said.startswith(f"The runs folder '{place.folder / below}' can't be written: ")
    assert (place.folder / "file").read_text() == "not a folder"


def test_a_report_that_cannot_be_written(place: Place) -> None:
    assert cli.main(["run", "local", *DIGITS, "--runs", str(place.runs)]) == 0
    (place.folder / "file").write_text("not a folder")
    said = place.refused("report", "local-digits-s0-1", "--out", str(place.folder / "file" / "page.html"))
    assert said.startswith(f"The report can't be written to '{place.folder / 'file' / 'page.html'}': ")


IDX = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")


@pytest.mark.parametrize("command", ["run", "compare"])
@pytest.mark.parametrize("form", ["plain", "gz"])
def test_a_truncated_file_of_a_data_set(place: Place, form: str, command: str) -> None:
    """The file, what is wrong with it and the command that mends it; nothing is fetched meanwhile."""
    folder = place.folder / "cache" / "data" / "mnist"
    folder.mkdir(parents=True)
    for name in IDX:
        whole = b"\x00\x00\x08\x03" + bytes(range(256)) * 4
        if form == "gz":
            (folder / f"{name}.gz").write_bytes(gzip.compress(whole)[:-20])
        else:
            (folder / name).write_bytes(whole[:-100])
    said = place.refused(command, "fedavg", "--data", "mnist")
    path = folder / (IDX[0] + (".gz" if form == "gz" else ""))
    assert said.startswith(f"{path} ")
    assert ("cannot be read" if form == "gz" else "is damaged or another file") in said
    assert said.endswith(": `pfed data get mnist --force` fetches it anew.")


def test_data_check_tells_of_every_truncated_file(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    """A finding rather than a mistake: exit code 1, one line per file, on stdout."""
    folder = place.folder / "cache" / "data" / "mnist"
    folder.mkdir(parents=True)
    for name in IDX:
        (folder / name).write_bytes(b"\x00\x00\x08")
    assert cli.main(["data", "check", "mnist"]) == 1
    done = capsys.readouterr()
    assert done.err == ""
    assert [line.split()[0] for line in done.out.splitlines()] == [str(folder / name) for name in IDX]


def test_a_run_whose_data_came_from_python_is_resumed_there(place: Place) -> None:
    clients = [(torch.randn(12, 4, generator=torch.Generator().manual_seed(k)), [0, 1] * 6) for k in range(3)]
    run = Experiment("local", clients, "mlp", rounds=1).run(place.runs).run
    said = place.refused("resume", run)
    assert said == f"Run '{run}' has data or a model from Python; go on with Experiment(…).resume(folder)."


def test_an_unknown_run_gets_the_nearest_one(place: Place) -> None:
    assert cli.main(["run", "local", *DIGITS, "--runs", str(place.runs)]) == 0
    for command in ("resume", "report"):
        said = place.refused(command, "locl-digits-s0-1")
        assert said == "There is no run 'locl-digits-s0-1'. Did you mean 'local-digits-s0-1'?"
    said = place.refused("runs", "rm", "local-digits-s0-1", "local-digits-s0-2")
    assert said == "There is no run 'local-digits-s0-2'. Did you mean 'local-digits-s0-1'?"


def test_an_experiment_resumes_its_own_runs_only(place: Place) -> None:
    """Another method or other options would silently mix two runs into one."""
    first = Experiment("fedavg", clients=4, model="mlp", rounds=1)
    folder = place.runs / first.run(place.runs).run
    for other in (
        Experiment("fedrep", clients=4, model="mlp", rounds=1),
        Experiment("fedavg", clients=5, model="mlp", rounds=1),
        Experiment("fedavg", clients=4, model="mlp", rounds=1, seed=1),
    ):
        with pytest.raises(UserError, match=folder.name):
            other.resume(folder)


def test_a_folder_that_is_no_run(place: Place) -> None:
    """Nothing is made where there was nothing, nor in a folder that is something else."""
    for name in ("nowhere", "other"):
        folder = place.folder / name
        if name == "other":
            folder.mkdir()
        with pytest.raises(UserError, match=name):
            Experiment("fedavg", clients=4, model="mlp", rounds=1).resume(folder)
        assert not (folder.exists() and list(folder.iterdir()))


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"method": 3}, "method must be a name, a Method class or an instance of one. Got 3."),
        ({"roundz": 3}, "There is no option of the run 'roundz'. Did you mean 'rounds'?"),
        ({"rounds": 1.0}, "run.rounds must be a whole number. Got 1.0."),
        ({"rounds": True}, "run.rounds must be a whole number. Got True."),
        ({"local": {"lr": -1}}, "local.lr must be > 0. Got -1."),
        ({"hyper": {"aggg": 1}}, "There is no option of FedAvg 'aggg'. Did you mean 'agg'?"),
    ],
    ids=str,
)
def test_the_same_sentences_in_python(options: dict[str, object], sentence: str) -> None:
    with pytest.raises(UserError) as caught:
        Experiment(**options)  # type: ignore[arg-type]
    assert str(caught.value) == sentence
