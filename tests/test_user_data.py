"""Data of one's own: folders, tables and arrays become federations, and every mistake gets one clear sentence."""

from __future__ import annotations

import logging
import unicodedata
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import Dataset as TorchDataset
from torch.utils.data import IterableDataset, TensorDataset

from pfed.data.base import Dataset, Federation
from pfed.data.pool import stratified
from pfed.data.user import federation, open_user
from pfed.errors import UserError

RNG = np.random.default_rng(0)


def image(path: Path, value: int = 0, size: tuple[int, int] = (5, 4), mode: str = "L") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new(mode, size, value if mode == "L" else (value, 0, 255)).save(path)
    return path


def table(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def opened_federation(path: Path, **options: Any) -> Federation:
    found = open_user(path, **options)
    assert isinstance(found, Federation)
    return found


def opened_dataset(path: Path, **options: Any) -> Dataset:
    found = open_user(path, **options)
    assert isinstance(found, Dataset)
    return found


def pixels(samples: Any) -> list[int]:
    """The first pixel of each sample: by it the tests know the images."""
    return samples.x[samples.rows].flatten(1)[:, 0].tolist()


def check_whole(data: Federation) -> None:
    """Every row belongs to one client once, and the common test set is the union of the clients'."""
    rows = [row for client in data.clients for part in (client.train, client.test) for row in part.rows.tolist()]
    assert sorted(rows) == list(range(len(data.test.x)))
    tests = [row for client in data.clients for row in client.test.rows.tolist()]
    assert sorted(tests) == data.test.rows.tolist()
    assert all(part.x is data.test.x for client in data.clients for part in (client.train, client.test))


class TestFolders:
    def test_a_folder_per_client_with_train_and_test(self, tmp_path: Path) -> None:
        for number, client in enumerate(["oslo", "rome"]):
            for position, place in enumerate(["train/cat", "train/dog", "test/dog"]):
                image(tmp_path / client / place / "0.png", 10 * number + position)
        data = opened_federation(tmp_path)
        check_whole(data)
        assert [client.name for client in data.clients] == ["oslo", "rome"]
        assert data.classes == ("cat", "dog")
        assert data.shape == (1, 4, 5)
        rome = data.clients[1]
        assert (pixels(rome.train), rome.train.labels.tolist()) == ([10, 11], [0, 1])
        assert (pixels(rome.test), rome.test.labels.tolist()) == ([12], [1])
        assert data.source == tmp_path.name
        assert data.notes == ()

    def test_a_client_without_test_folder_gives_some_of_its_images(self, tmp_path: Path) -> None:
        for name in "ab":
            for number in range(10):
                image(tmp_path / "one" / name / f"{number}.png", number)
        image(tmp_path / "two" / "train" / "a" / "0.png")
        image(tmp_path / "two" / "test" / "b" / "0.png")
        data = opened_federation(tmp_path, test_fraction=0.3)
        check_whole(data)
        assert data.clients[0].test.counts(2).tolist() == [3, 3]
        assert len(data.clients[1].test) == 1
        assert data.notes == (
            "1 of 2 clients came without test data: 30% of their samples were set apart with seed 0.",
        )

    def test_class_folders_are_a_data_set(self, tmp_path: Path) -> None:
        for name in ["10", "9"]:
            image(tmp_path / name / "b.png", int(name))
            image(tmp_path / name / "a.png", int(name) + 100)
        data = opened_dataset(tmp_path)
        assert data.classes == ("9", "10")
        assert data.x[:, 0, 0, 0].tolist() == [110, 10, 109, 9]
        assert data.y.tolist() == [1, 1, 0, 0]
        assert data.train is None
        assert data.test is None

    def test_class_folders_with_an_official_split(self, tmp_path: Path) -> None:
        for place in ["Train/a", "Train/b", "Test/a"]:
            image(tmp_path / place / "x.png")
        data = opened_dataset(tmp_path)
        assert data.train is not None
        assert data.test is not None
        assert sorted(data.y[data.train].tolist()) == [0, 1]
        assert data.y[data.test].tolist() == [0]

    def test_names_in_any_script(self, tmp_path: Path) -> None:
        composed, apart = (unicodedata.normalize(form, "café") for form in ("NFC", "NFD"))
        image(tmp_path / "東京" / composed / "図.png")
        image(tmp_path / "東京" / "θ" / "図.png")
        image(tmp_path / "Århus" / apart / "図.png")
        data = opened_federation(tmp_path)
        assert data.classes == (composed, "θ")
        assert {client.name for client in data.clients} == {"東京", "Århus"}

    def test_files_that_are_no_images_are_left_out_and_noted(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        for place in ["c/a", "c/b", "d/a"]:
            image(tmp_path / place / "x.png")
        (tmp_path / "c" / "a" / "notes.txt").write_text("not an image")
        (tmp_path / "c" / "a" / ".DS_Store").write_text("hidden")
        (tmp_path / "c" / ".hidden").mkdir()
        note = "Files left out, for they are no images in a class folder: 1, such as "
        assert opened_federation(tmp_path).notes[0].startswith(note)
        with caplog.at_level(logging.WARNING):
            opened_dataset(tmp_path / "c")
        assert note in caplog.text

    def test_the_first_image_decides_between_grey_and_colour(self, tmp_path: Path) -> None:
        image(tmp_path / "a" / "0.png", 7, mode="RGB")
        image(tmp_path / "b" / "0.png", 9, mode="L")
        data = opened_dataset(tmp_path)
        assert data.x[:, :, 0, 0].tolist() == [[7, 0, 255], [9, 9, 9]]
        image(tmp_path / "a" / "#.png", 5, mode="L")
        assert opened_dataset(tmp_path).x.shape[1] == 1

    def test_sixteen_bits_of_grey_are_scaled_not_cut(self, tmp_path: Path) -> None:
        for name, value in [("a", 256), ("b", 65535)]:
            (tmp_path / name).mkdir()
            Image.fromarray(np.full((2, 2), value, np.uint16)).save(tmp_path / name / "0.png")
        assert opened_dataset(tmp_path).x[:, 0, 0, 0].tolist() == [1, 255]

    def test_images_of_other_sizes_need_a_size(self, tmp_path: Path) -> None:
        image(tmp_path / "a" / "0.png", 3)
        image(tmp_path / "b" / "0.png", 4, size=(6, 7))
        with pytest.raises(UserError, match=r"b/0.png is 6x7 but .*a/0.png is 5x4: pass image_size=N"):
            open_user(tmp_path)
        data = opened_dataset(tmp_path, image_size=8)
        assert data.x.shape == (2, 1, 8, 8)
        assert data.x[:, 0, 7, 7].tolist() == [3, 4]
        with pytest.raises(UserError, match=r"image_size must be >= 1. Got 0"):
            open_user(tmp_path, image_size=0)

    @pytest.mark.parametrize(
        ("places", "message"),
        [
            ([], "must hold images as CLASS/image.* Got none"),
            (["x.png"], "must hold images as .* Got none"),
            (["a/x.png"], "at least two classes. Got a"),
            (["a/x.png", "b/c/x.png"], "all classes or all clients. Got 'a' with images and 'b' with folders"),
            (["a/b/x.png", "c/d/e/x.png"], "Client folder .*c must hold images in class folders"),
            (["train/a/x.png", "train/b/x.png", "val/a/x.png"], "train and test, .* must hold no other. Got 'val'"),
            (["test/a/x.png", "test/b/x.png"], "must hold at least one training sample"),
            (["c/test/a/x.png", "c/test/b/x.png"], "Client 'c' must hold at least one training sample"),
        ],
    )
    def test_other_layouts_are_explained(self, tmp_path: Path, places: list[str], message: str) -> None:
        for place in places:
            image(tmp_path / place)
        with pytest.raises(UserError, match=message):
            open_user(tmp_path)

    def test_an_image_that_cannot_be_read_is_named(self, tmp_path: Path) -> None:
        whole = image(tmp_path / "a" / "0.png", size=(50, 50)).read_bytes()
        for content in (b"text", whole[: len(whole) // 2]):
            (tmp_path / "b").mkdir(exist_ok=True)
            (tmp_path / "b" / "1.png").write_bytes(content)
            with pytest.raises(UserError, match=r"b/1.png cannot be read as an image"):
                open_user(tmp_path)


class TestTables:
    def test_rows_belong_to_clients(self, tmp_path: Path) -> None:
        rows = ["client,age,Label,mass", "b,1,ill,2.5", "a,3,well,4", "b,5,well,6", "a,7,ill,8e0"]
        data = opened_federation(table(tmp_path / "x.csv", "\n".join(rows)))
        check_whole(data)
        assert [client.name for client in data.clients] == ["a", "b"]
        assert data.classes == ("ill", "well")
        assert data.test.x.tolist() == [[1, 2.5], [3, 4], [5, 6], [7, 8]]
        assert data.clients[0].train.rows.tolist() == [1, 3]

    def test_without_clients_it_is_a_data_set(self, tmp_path: Path) -> None:
        data = opened_dataset(table(tmp_path / "x.csv", "label,a\n10,1\n-1,2\n9,3\n"))
        assert data.classes == ("-1", "9", "10")
        assert data.y.tolist() == [2, 0, 1]
        assert data.train is None

    def test_a_split_column(self, tmp_path: Path) -> None:
        text = "label,a,split\nx,1,train\ny,2,Test\ny,3,train\n"
        data = opened_dataset(table(tmp_path / "x.csv", text))
        assert data.train is not None
        assert data.test is not None
        assert (data.train.tolist(), data.test.tolist()) == ([0, 2], [1])

    def test_clients_keep_the_split_they_came_with(self, tmp_path: Path) -> None:
        text = "label,a,split,client\nx,1,train,k\ny,2,test,k\ny,3,train,k\nx,4,train,m\ny,5,train,m\n"
        data = opened_federation(table(tmp_path / "x.csv", text))
        assert data.clients[0].test.rows.tolist() == [1]
        assert data.clients[1].test.rows.tolist() == []  # one sample of each class: both are needed to train
        assert "1 of 2 clients have too few samples to test on, such as m." in data.notes

    def test_columns_by_other_names_marks_and_order_of_bytes(self, tmp_path: Path) -> None:
        text = "\ufeffsite;diagnosis;a\nn;yes;1\nn;no;2\n"
        data = opened_federation(table(tmp_path / "x.csv", text), label="diagnosis", client="site")
        assert data.classes == ("no", "yes")
        assert data.test.x.shape == (2, 1)

    def test_images_by_path(self, tmp_path: Path) -> None:
        image(tmp_path / "deep" / "ä.png", 5)
        image(tmp_path / "b.png", 6)
        text = "path,label,client,comment\ndeep/ä.png,x,c,hello\nb.png,y,c,\n"
        data = opened_federation(table(tmp_path / "x.csv", text))
        assert pixels(data.clients[0].train) == [5, 6]
        assert data.notes[0] == "Beside images, the columns comment were left out."
        table(tmp_path / "x.csv", "file,label\nb.png,x\nnone.png,y\n")
        with pytest.raises(UserError, match=r"There is no image .*none.png"):
            open_user(tmp_path / "x.csv")

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("", "Got an empty file"),
            ("label,a\n", "Got only a header"),
            ("0,1.5\n1,2.5\n", "must name the columns, 'label' too. Got '0, 1.5'"),
            ("cat,1.5\ndog,2.5\n", "must name the columns, 'label' too. Got 'cat, 1.5'"),
            ("labels,a\nx,1\n", "no column in x.csv named 'label'. Did you mean 'labels'"),
            ("label,a,a\nx,1,2\n", "different names. Got 'a' twice"),
            (",label,a\n0,x,1\n", "must have a name. Got none for column 1 .*index=False"),
            ("label,a\nx,1\n\ny,two\n", "line 4, column 'a' must be a finite number. Got 'two'"),
            ("label,a\nx,1\ny,\n", "line 3, column 'a' must be a finite number. Got ''"),
            ("label,a\nx,1\ny,inf\n", "line 3, column 'a' must be a finite number. Got 'inf'"),
            ("label,a\nx,1\ny,1e39\n", "must be a finite number. Got '1e39'"),
            ("label,a\nx,1\n ,2\n", "line 3, column 'label' must not be empty"),
            ("label,a\nx,1\ny\n", "line 3 must have 2 cells. Got 1"),
            ("label,a,split\nx,1,train\ny,2,valid\n", "line 3, column 'split' must be train or test. Got 'valid'"),
            ("label,client\nx,a\ny,a\n", "columns of features, or a path column of images"),
            ("label,a\nx,1\nx,2\n", "at least two classes. Got x"),
            ('label,a\nx,"1\n', "cannot be read as CSV"),
        ],
    )
    def test_mistakes_are_named_by_line_and_column(self, tmp_path: Path, text: str, message: str) -> None:
        with pytest.raises(UserError, match=message):
            open_user(table(tmp_path / "x.csv", text))

    def test_a_client_column_asked_for_must_be_there(self, tmp_path: Path) -> None:
        with pytest.raises(UserError, match=r"named 'sites'. Did you mean 'site'"):
            open_user(table(tmp_path / "x.csv", "label,a,site\nx,1,n\ny,2,n\n"), client="sites")

    def test_text_in_another_encoding(self, tmp_path: Path) -> None:
        (tmp_path / "x.csv").write_bytes("label,a\nø,1\n".encode("latin-1"))
        with pytest.raises(UserError, match="cannot be read as CSV in UTF-8"):
            open_user(tmp_path / "x.csv")


def test_other_paths_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"There is no file or folder '.*nowhere'"):
        open_user(tmp_path / "nowhere")
    (tmp_path / "x.parquet").write_text("")
    with pytest.raises(UserError, match=r"must be a .csv file or a folder .*x.parquet"):
        open_user(tmp_path / "x.parquet")


def arrays(n: int = 10, shape: tuple[int, ...] = (3,), classes: int = 2) -> tuple[np.ndarray, np.ndarray]:
    return RNG.normal(size=(n, *shape)), np.arange(n) % classes


class Items(TorchDataset[Any]):
    def __init__(self, items: list[Any]) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> Any:
        return self.items[index]


class Stream(IterableDataset[Any]):
    def __len__(self) -> int:
        return 2

    def __iter__(self) -> Iterator[Any]:
        return iter(())


class TestArrays:
    def test_every_form_gives_the_same(self) -> None:
        (x, y), (x2, y2) = arrays(), arrays(4)
        tensors = torch.tensor(x), torch.tensor(y)
        tests = torch.tensor(x2), torch.tensor(y2)
        data = federation(
            {
                "arrays": ((x, y), (x2, y2)),
                "tensors": (tensors, tests),
                "lists": [[x, y.tolist()], [x2, y2.tolist()]],
                "sets": (TensorDataset(*tensors), TensorDataset(*tests)),
                "mixed": (TensorDataset(*tensors), (x2, y2)),
            }
        )
        check_whole(data)
        for client in data.clients:
            np.testing.assert_array_equal(client.train.take()[0].numpy(), x.astype(np.float32))
            np.testing.assert_array_equal(client.test.take()[0].numpy(), x2.astype(np.float32))
            assert client.train.labels.tolist() == y.tolist()
        assert data.notes == ()

    def test_undivided_forms_are_divided_alike(self) -> None:
        x, y = arrays(20)
        tensors = TensorDataset(torch.tensor(x), torch.tensor(y))
        for entry in ((x, y), tensors, (tensors, None), Items(list(zip(x, y, strict=True)))):
            data = federation([entry])
            assert data.clients[0].name == "client-0"
            np.testing.assert_array_equal(data.test.x.numpy(), x.astype(np.float32))
            assert data.test.rows.tolist() == federation([(x, y)]).test.rows.tolist()
            assert data.test.counts(2).tolist() == [2, 2]

    def test_the_split_depends_on_seed_and_client_only(self) -> None:
        clients = [arrays(50), arrays(50), arrays(30)]
        splits = [client.test.rows.tolist() for client in federation(clients, seed=3).clients]
        assert splits == [client.test.rows.tolist() for client in federation(clients, seed=3).clients]
        assert splits[:2] == [client.test.rows.tolist() for client in federation(clients[:2], seed=3).clients]
        assert splits != [client.test.rows.tolist() for client in federation(clients, seed=4).clients]
        assert [row + 50 for row in splits[0]] != splits[1]

    def test_this_split_stays_as_it_is(self) -> None:
        """Results of earlier runs hang on it."""
        x, y = np.zeros((12, 1)), np.arange(12) % 3
        assert federation([(x, y)], test_fraction=0.25).test.rows.tolist() == [4, 5, 6]

    def test_a_single_sample_is_kept_for_training(self) -> None:
        data = federation({"many": arrays(), "one": arrays(1)})
        assert (len(data.clients[1].train), len(data.clients[1].test)) == (1, 0)
        assert "1 of 2 clients have too few samples to test on, such as one." in data.notes
        check_whole(data)

    def test_an_empty_test_part_counts_as_none(self) -> None:
        data = federation([(arrays(20), (np.zeros((0, 3)), np.zeros(0)))])
        assert len(data.clients[0].test) == 4

    @pytest.mark.parametrize(
        ("labels", "classes", "names", "indices"),
        [
            ([3, 10, 3], None, ("3", "10"), [0, 1, 0]),
            ([-1, 1, -1], None, ("-1", "1"), [0, 1, 0]),
            ([1.0, 0.0, 1.0], None, ("0", "1"), [1, 0, 1]),
            ([True, False, True], None, ("0", "1"), [1, 0, 1]),
            (["b", "a", "b"], None, ("a", "b"), [1, 0, 1]),
            (["b", "a", "b"], ["b", "c", "a"], ("b", "c", "a"), [0, 2, 0]),
            ([0, 2, 0], ["cat", "dog", "eel"], ("cat", "dog", "eel"), [0, 2, 0]),
            ([1, 1, 1], 3, ("0", "1", "2"), [1, 1, 1]),
            (np.array([[1], [0], [1]]), None, ("0", "1"), [1, 0, 1]),
            (torch.tensor([4, 5, 4]), None, ("4", "5"), [0, 1, 0]),
        ],
    )
    def test_labels_become_class_indices(
        self, labels: Any, classes: Any, names: tuple[str, ...], indices: list[int]
    ) -> None:
        data = federation([(np.zeros((3, 2)), labels)], classes=classes)
        assert data.classes == names
        assert data.test.y.tolist() == indices

    def test_classes_are_those_of_all_clients(self) -> None:
        data = federation([(np.zeros((2, 1)), ["a", "c"]), (np.zeros((2, 1)), ["b", "b"])])
        assert data.classes == ("a", "b", "c")
        assert data.test.y.tolist() == [0, 2, 1, 1]

    @pytest.mark.parametrize(
        ("shape", "expected"), [((6, 5), (1, 6, 5)), ((6, 5, 3), (3, 6, 5)), ((3, 6, 5), (3, 6, 5)), ((4,), (4,))]
    )
    def test_bytes_are_images_with_channels_first(self, shape: tuple[int, ...], expected: tuple[int, ...]) -> None:
        x = RNG.integers(0, 256, (4, *shape)).astype(np.uint8)
        data = federation([(x, [0, 1, 0, 1])])
        assert data.shape == expected
        assert data.test.x.dtype == torch.uint8
        if shape == (6, 5, 3):
            np.testing.assert_array_equal(data.test.x[:, 2].numpy(), x[..., 2])

    def test_pillow_images_in_a_torch_data_set(self) -> None:
        data = federation([Items([(Image.new("RGB", (5, 4), (1, 2, 3)), "a"), (Image.new("RGB", (5, 4)), "b")])])
        assert data.shape == (3, 4, 5)
        assert data.test.x[0, :, 0, 0].tolist() == [1, 2, 3]

    @pytest.mark.parametrize(
        ("clients", "options", "message"),
        [
            ([], {}, "at least one client"),
            ({1: arrays(), "1": arrays()}, {}, "names of clients must differ"),
            ({"a": arrays(), "b": arrays(4, (4,))}, {}, r"'b' has samples of shape \(4,\) but client 'a' .*\(3,\)"),
            ({"a": (arrays(), arrays(4, (4,)))}, {}, r"'a' has samples of shape \(4,\)"),
            ([arrays(), (np.zeros((2, 3), np.uint8), [0, 1])], {}, "'client-1' has samples of torch.uint8"),
            ([(np.zeros((3, 2)), [0, 1])], {}, "Got 3 samples, 2 labels"),
            ([arrays(), arrays(0)], {}, "'client-1' must hold at least one sample"),
            ([Items([])], {}, "'client-0' must hold at least one sample"),
            ([arrays()[0]], {}, r"must be \(x, y\), .* Got an object of ndarray"),
            ([(Items([]), 3)], {}, r"must be \(x, y\), .* Got an object of tuple"),
            ([(np.zeros(3), [0, 1, 0])], {}, r"of shape \(n, ...\). Got .*shape \(3,\)"),
            ([([["a"], ["b"]], [0, 1])], {}, "must be numbers"),
            ([(np.full((2, 1), np.nan), [0, 1])], {}, "must be finite"),
            ([(np.zeros((2, 1)), [0.5, 1])], {}, "whole numbers or texts. Got 0.5"),
            ([(np.zeros((2, 1)), [None, "a"])], {}, "whole numbers or texts. Got None"),
            ([(np.zeros((2, 1)), np.eye(2))], {}, r"one dimension. Got shape \(2, 2\)"),
            ([arrays(classes=1)], {}, "at least two classes. Got 0"),
            ([arrays()], {"classes": ["0", "2"]}, "one of the classes 0, 2. Got '1'"),
            ([arrays(classes=4)], {"classes": 3}, "one of the classes 0, 1, 2. Got '3'"),
            ([arrays()], {"classes": ["a", "a"]}, "names of classes must differ"),
            ([arrays()], {"test_fraction": 1.0}, "test_fraction must be > 0 and < 1. Got 1.0"),
            ([arrays()], {"seed": -1}, "seed must be >= 0. Got -1"),
            ([Stream()], {}, "must have a length and an index"),
            ([Items([1, 2])], {}, r"Item 0 of client 'client-0' must be \(x, y\). Got an object of int"),
            ([Items([(np.zeros(2), 0), (np.zeros(3), 1)])], {}, r"Item 1 .* shape \(3,\) but item 0 .*\(2,\)"),
            ([((np.zeros((0, 3)), []), arrays())], {}, "'client-0' must hold at least one sample"),
        ],
    )
    def test_mistakes_name_the_client(self, clients: Any, options: dict[str, Any], message: str) -> None:
        with pytest.raises(UserError, match=message):
            federation(clients, **options)

    def test_many_clients_are_no_burden(self) -> None:
        data = federation([arrays(3) for _ in range(2000)])
        assert len(data.clients) == 2000
        check_whole(data)


@pytest.mark.parametrize("fraction", [0.05, 0.2, 0.5, 0.95])
@pytest.mark.parametrize("counts", [[1], [1, 1, 1], [2], [5, 1], [3, 4, 50], [2] * 10, [100, 7]])
def test_a_stratified_split_is_fair(counts: list[int], fraction: float) -> None:
    y = RNG.permutation(np.repeat(np.arange(len(counts)), counts))
    test = stratified(y, fraction, np.random.default_rng(1))
    n, k = len(y), len(counts)
    assert test.sum() == min(max(1, round(fraction * n)), n - k)
    for index, count in enumerate(counts):
        taken = test[y == index].sum()
        assert taken <= count - 1
        if n > 20 and fraction <= 0.5:  # beyond that the last samples of small classes are missing
            assert abs(taken - fraction * count) <= 1
