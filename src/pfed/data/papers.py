"""What is known of the papers' data sets beside the usual ones; most of them must be put into a folder by hand."""

from __future__ import annotations

import string

from pfed.data import fonts, formats, leaf, matlab, pictures, styles
from pfed.data.fetch import File, Official, Package
from pfed.data.forms import Archive, Form, Layout, Source

_DIGITS = tuple(string.digits)

_CIFAR100_PYTHON = Form(
    (File("train", "md5:16019d7e3df5f24257cddd939b257f8d"), File("test", "md5:f0ef6b0ae62326f3e7ffdfab6717acfc")),
    formats.cifar100_pickle,
)
_CIFAR100_BINARY = Form((File("train.bin", ""), File("test.bin", "")), formats.cifar100_binary)
_CIFAR100_OFFICIAL = Official(
    ("https://www.cs.toronto.edu/~kriz/",),
    (File("cifar-100-python.tar.gz", "md5:eb9058c3a382ffc7106e4002c42a8d85"),),
)
_CIFAR100_CLASSES = """
apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus butterfly camel can castle
caterpillar cattle chair chimpanzee clock cloud cockroach couch crab crocodile cup dinosaur dolphin elephant
flatfish forest fox girl hamster house kangaroo keyboard lamp lawn_mower leopard lion lizard lobster man maple_tree
motorcycle mountain mouse mushroom oak_tree orange orchid otter palm_tree pear pickup_truck pine_tree plain plate
poppy porcupine possum rabbit raccoon ray road rocket rose sea seal shark shrew skunk skyscraper snail snake spider
squirrel streetcar sunflower sweet_pepper table tank telephone television tiger tractor train trout tulip turtle
wardrobe whale willow_tree wolf woman worm
"""

_SVHN = Form(
    (
        File("train_32x32.mat", "md5:e26dedcc434d2e4c54c9b2d4a06d8373"),
        File("test_32x32.mat", "md5:eb5a983be6a315427106f1b164d9cef3"),
    ),
    matlab.cropped_digits,
)
_SVHN_OFFICIAL = Official(("http://ufldl.stanford.edu/housenumbers/",), _SVHN.files)
_SYNTH = Form((File("synth_train_32x32.mat", ""), File("synth_test_32x32.mat", "")), matlab.cropped_digits)

_EMNIST_IDX = Form(
    tuple(
        File(f"emnist-letters-{kind}-{what}-ubyte", "")
        for kind in ("train", "test")
        for what in ("images-idx3", "labels-idx1")
    ),
    formats.emnist_idx,
)
_EMNIST_MATLAB = Form((File("emnist-letters.mat", ""),), matlab.emnist)
_EMNIST_OFFICIAL = Official(
    ("https://biometrics.nist.gov/cs_links/EMNIST/",), (File("gzip.zip", "md5:58c8d27c78d21e728a6bc7b3cc06412e"),)
)
_LEAF = ("train/*.json", "test/*.json")
_LEAF_ORIGIN = "LEAF (TalwalkarLab/leaf, data/femnist: ./preprocess.sh writes the folders train and test)"

_FONT_FILES = (
    File("AllerDisplay.ttf", "sha256:0077f4202e8daed0275acc0a550f7b81e07a00d64c20d20686373eace5a0ace7"),
    File("Amatic-Bold.ttf", "sha256:889989f6a49973c1ad244732ab7baae5caacd5d45a8b001dcd5f027b80e14e76"),
    File("BEBAS___.ttf", "sha256:9150a3daca54b2734801e723414c21ed23c228cd9f33dc92a43f7f3c0d62146b"),
    File("Capture_it.ttf", "sha256:5aad444ef04e063ec3d154f00cdca706042e8c9257632975a4dd8f77d289db59"),
    File("CaviarDreams.ttf", "sha256:48e64216270cb5efebde50ba3a0acf8e20db3fbf745bdc5ff03e54596f8e062a"),
    File("DroidSans-Bold.ttf", "sha256:2f529a3e60c007979d95d29794c3660694217fb882429fb33919d2245fe969e9"),
    File("FFF_Tusj.ttf", "sha256:e375efcb239e901d0740782b4fa582489724b5a2de2ccca6014b238c9b9b3eeb"),
    File("Lato-Black.ttf", "sha256:4ed66fa3928ae769205635c916b4f9e6a63f6a77f5d9693ac31a83d0d96ae1ef"),
    File("OpenSans-Regular.ttf", "sha256:e64e508b2aa2880f907e470c4550980ec4c0694d103a43f36150ac3f93189bee"),
    File("Pacifico.ttf", "sha256:8b0262a477f576b73ecfabe72558940caa11e3e8aa778d1b6f6acd039f5bbbd1"),
    File("Raleway-Bold.ttf", "sha256:ca9de8b3be7ccd4b80774a9c7dd56a98c49c276771c5957729b5958d1d579112"),
    File("Roboto-Regular.ttf", "sha256:b2efabca5ea4bc56eea829713706b5cd0788b82aca153bd4adde9b1573933b4f"),
    File("RobotoCondensed-BoldItalic.ttf", "sha256:1b7b805a79e932723b2f052df899a14fb4570c311b73968f2899c63e923c06ec"),
    File("SEASRN__.ttf", "sha256:880ca380e872976cec67355896df756937113dcc92d0c1be76dfdf18549dbd30"),
    File("Sansation-Regular.ttf", "sha256:6d47039ee6665d78b143a1b264abc02017a33ffa52a4e9f6645ce357f92d4f09"),
    File("Walkway_Bold.ttf", "sha256:b1b15ef15bda6cd043a9b161ec07b1416be3e9a3656995a62699c66860de7081"),
)
_FONTS = Form(_FONT_FILES, fonts.rendered_digits)

_PACS = {"photo": 1670, "art_painting": 2048, "cartoon": 2344, "sketch": 3929}
_OFFICE_HOME = {"Art": 2427, "Clipart": 4365, "Product": 4439}
_REAL_WORLD = ("Real World", "Real_World", "RealWorld")
_OFFICE_HOME_CLASSES = """
Alarm_Clock Backpack Batteries Bed Bike Bottle Bucket Calculator Calendar Candles Chair Clipboards Computer Couch
Curtains Desk_Lamp Drill Eraser Exit_Sign Fan File_Cabinet Flipflops Flowers Folder Fork Glasses Hammer Helmet
Kettle Keyboard Knives Lamp_Shade Laptop Marker Monitor Mop Mouse Mug Notebook Oven Pan Paper_Clip Pen Pencil
Postit_Notes Printer Push_Pin Radio Refrigerator Ruler Scissors Screwdriver Shelf Sink Sneakers Soda Speaker Spoon
TV Table Telephone ToothBrush Toys Trash_Can Webcam
"""
_OFFICE_CALTECH = {"amazon": 958, "caltech": 1123, "dslr": 157, "webcam": 295}
_OFFICE_CALTECH_CLASSES = (
    *("back_pack", "bike", "calculator", "headphones", "keyboard"),
    *("laptop_computer", "monitor", "mouse", "mug", "projector"),
)
_DOMAINNET = ("clipart", "infograph", "painting", "quickdraw", "real", "sketch")
_DOMAINNET_CLASSES = (
    *("bird", "feather", "headphones", "ice_cream", "teapot"),
    *("tiger", "whale", "windmill", "wine_glass", "zebra"),
)
_TISSUES = ("ADI", "BACK", "DEB", "LYM", "MUC", "MUS", "NORM", "STR", "TUM")
_CENTRES = ("NCT-CRC-HE-100K", "CRC-VAL-HE-7K")
_FLICKR = "the page of Ren et al., Personalized Image Aesthetics, ICCV 2017 (alanspike/personalizedImageAesthetics)"

PAPERS = (
    Source(
        name="cifar100",
        title="CIFAR-100",
        shape=(3, 32, 32),
        classes=tuple(_CIFAR100_CLASSES.split()),
        train=50000,
        test=10000,
        mean=(0.5071, 0.4865, 0.4409),
        std=(0.2673, 0.2564, 0.2762),
        licence="none stated; the authors ask to cite Krizhevsky (2009)",
        size=169_001_437,
        forms=(_CIFAR100_PYTHON, _CIFAR100_BINARY, Archive("cifar100_12k.npz", "12k pool", 32, 10000, 2000)),
        routes=((_CIFAR100_OFFICIAL, _CIFAR100_PYTHON),),
        folders=("cifar-100-python", "cifar-100-binary"),
    ),
    Source(
        name="svhn",
        title="SVHN, cropped digits",
        shape=(3, 32, 32),
        classes=_DIGITS,
        train=73257,
        test=26032,
        mean=(0.4377, 0.4438, 0.4728),
        std=(0.1980, 0.2010, 0.1970),
        licence="for non-commercial use; cite Netzer et al. (2011)",
        size=246_316_178,
        forms=(_SVHN, Archive("svhn_28px.npz", "a tenth, 28 px", 28, 7325, 2603)),
        routes=((_SVHN_OFFICIAL, _SVHN),),
        folders=("SVHN",),
    ),
    Source(
        name="mnist-m",
        title="MNIST-M",
        shape=(3, 28, 28),
        classes=_DIGITS,
        train=59001,
        test=9001,
        mean=(0.4633, 0.4669, 0.4202),  # of the tenth
        std=(0.2541, 0.2388, 0.2621),
        licence="none stated; cite Ganin et al. (2016)",
        forms=(
            Layout(
                ("mnist_m_train_labels.txt", "mnist_m_test_labels.txt", "mnist_m_train", "mnist_m_test"),
                pictures.mnist_m,
                (("mnist_m_train", 59001), ("mnist_m_test", 9001)),
            ),
            Archive("mnist_m_28px.npz", "a tenth, 28 px", 28, 6000, 1000),
        ),
        origin="the page of Ganin et al., Domain-Adversarial Training of Neural Networks, JMLR 2016 (mnist_m.tar.gz)",
        folders=("mnist_m", "MNIST-M"),
    ),
    Source(
        name="synthdigits",
        title="SynthDigits",
        shape=(3, 32, 32),
        classes=_DIGITS,
        train=479400,
        test=9553,
        licence="none stated; cite Ganin and Lempitsky (2015)",
        forms=(_SYNTH,),
        origin="the page of Ganin and Lempitsky, Unsupervised Domain Adaptation, ICML 2015 (SynthDigits.zip)",
        folders=("SynthDigits",),
    ),
    Source(
        name="rendered-digits",
        title="Digits rendered in sixteen fonts",
        shape=(3, 28, 28),
        classes=_DIGITS,
        train=fonts.TRAIN,
        test=fonts.TEST,
        licence="those of the fonts; the package that carries them: MIT",
        size=98_623_751,
        forms=(_FONTS,),
        routes=((Package("pip", "trdg==1.8.0"), _FONTS),),
    ),
    Source(
        name="digits-five",
        title="Digits-Five: MNIST, SVHN, USPS, SynthDigits, MNIST-M",
        shape=(3, 28, 28),
        classes=_DIGITS,
        domains=styles.STYLES_FIVE,
        train=5 * styles.FIVE_TRAIN - (styles.FIVE_TRAIN - 7291),  # USPS has fewer
        test=10000 + 26032 + 2007 + 9553 + 9001,
        licence="those of its five data sets",
        parts=("mnist", "svhn", "usps", "synthdigits", "mnist-m"),
    ),
    Source(
        name="digits-5r",
        title="Digits-Five with rendered digits in place of SynthDigits",
        shape=(3, 28, 28),
        classes=_DIGITS,
        domains=styles.STYLES_5R,
        train=5 * styles.TRAIN,
        test=5 * styles.TEST,
        licence="those of MNIST, USPS, MNIST-M, SVHN and the fonts",
        parts=("mnist", "usps", "mnist-m", "svhn", "rendered-digits"),
    ),
    Source(
        name="emnist-letters",
        title="EMNIST letters, capital and small as one",
        shape=(1, 28, 28),
        classes=tuple(string.ascii_lowercase),
        train=124800,
        test=20800,
        mean=(0.1722,),
        std=(0.3309,),
        licence="none stated; cite Cohen et al. (2017)",
        size=561_753_746,
        forms=(_EMNIST_IDX, _EMNIST_MATLAB),
        routes=((_EMNIST_OFFICIAL, _EMNIST_IDX),),
        folders=("gzip", "matlab", "EMNIST/raw", "EMNIST/raw/gzip"),
    ),
    Source(
        name="femnist",
        title="FEMNIST by writer (LEAF)",
        shape=(1, 28, 28),
        classes=leaf.CLASSES,
        licence="BSD 2-clause (LEAF); the images: NIST",
        forms=(Layout(_LEAF, leaf.femnist),),
        origin=_LEAF_ORIGIN,
        folders=("data",),
    ),
    Source(
        name="femnist-10",
        title="FEMNIST, the letters a to j, 4,000 each",
        shape=(1, 28, 28),
        classes=leaf.LETTERS,
        licence="BSD 2-clause (LEAF); the images: NIST",
        forms=(Layout(_LEAF, leaf.femnist_letters),),
        origin=_LEAF_ORIGIN,
        folders=("data", "femnist", "femnist/data"),
    ),
    Source(
        name="pacs",
        title="PACS",
        shape=(3, 96, 96),
        classes=("dog", "elephant", "giraffe", "guitar", "horse", "house", "person"),
        domains=tuple(_PACS),
        train=9991,
        mean=(0.7633, 0.7438, 0.7150),
        std=(0.2996, 0.3091, 0.3382),
        licence="none stated; cite Li et al. (2017)",
        forms=(
            Layout(tuple(_PACS), pictures.pacs(*_PACS), tuple(_PACS.items())),
            Archive("pacs_96px.npz", "96 px", 96, 9991),
        ),
        folders=("kfold",),
        origin="the project page of Li et al., Deeper, Broader and Artier Domain Generalization, ICCV 2017",
    ),
    Source(
        name="office-home",
        title="Office-Home",
        shape=(3, 96, 96),
        classes=tuple(_OFFICE_HOME_CLASSES.split()),
        domains=(*_OFFICE_HOME, _REAL_WORLD[0]),
        train=15588,
        licence="for research; cite Venkateswara et al. (2017)",
        forms=(
            Layout(
                (*_OFFICE_HOME, _REAL_WORLD),
                pictures.domain_folders({**{name: (name,) for name in _OFFICE_HOME}, _REAL_WORLD[0]: _REAL_WORLD}),
                (*_OFFICE_HOME.items(), ("Real*World", 4357)),
            ),
        ),
        folders=("OfficeHomeDataset_10072016", "OfficeHome"),
        origin="the project page of Venkateswara et al., Deep Hashing Network, CVPR 2017",
    ),
    Source(
        name="office-caltech-10",
        title="Office-Caltech-10",
        shape=(3, 96, 96),
        classes=_OFFICE_CALTECH_CLASSES,
        domains=tuple(_OFFICE_CALTECH),
        train=2533,
        licence="none stated; cite Gong et al. (2012)",
        forms=(
            Layout(
                tuple(_OFFICE_CALTECH),
                pictures.domain_folders(
                    {name: (name,) for name in _OFFICE_CALTECH},
                    aliases={"backpack": "back_pack", "laptop": "laptop_computer"},
                ),
                tuple(_OFFICE_CALTECH.items()),
            ),
        ),
        folders=("office_caltech_10",),
        origin="the page of Gong et al., Geodesic Flow Kernel, CVPR 2012, or of FedBN (med-air/FedBN)",
    ),
    Source(
        name="domainnet-10",
        title="DomainNet, ten classes",
        shape=(3, 96, 96),
        classes=_DOMAINNET_CLASSES,
        domains=_DOMAINNET,
        licence="for research; cite Peng et al. (2019)",
        forms=(
            Layout(
                (*_DOMAINNET, *(pictures.list_names(name, kind) for name in _DOMAINNET for kind in ("train", "test"))),
                pictures.domain_lists(_DOMAINNET_CLASSES, *_DOMAINNET),
            ),
        ),
        folders=("DomainNet", "domainnet"),
        origin="the page of Peng et al., Moment Matching for Multi-Source Domain Adaptation, ICCV 2019 (cleaned)",
    ),
    Source(
        name="flickr-aes",
        title="FLICKR-AES, raters of 60 to 290 images",
        shape=(3, 96, 96),
        classes=pictures.RATINGS,
        licence="for research; the images: Creative Commons; cite Ren et al. (2017)",
        forms=(Layout((pictures.FLICKR_TABLE, pictures.FLICKR_IMAGES), pictures.flickr_aes),),
        folders=("FLICKR-AES",),
        origin=_FLICKR,
    ),
    Source(
        name="real-cur",
        title="REAL-CUR, albums rated by their owners",
        shape=(3, 96, 96),
        classes=pictures.RATINGS,
        licence="for research; cite Ren et al. (2017)",
        forms=(Layout(("*/[1-5]",), pictures.real_cur),),
        folders=("REAL-CUR",),
        origin=_FLICKR,
    ),
    Source(
        name="histology",
        title="NCT-CRC-HE and CRC-VAL-HE, a centre per client",
        shape=(3, 96, 96),
        classes=_TISSUES,
        domains=_CENTRES,
        more_domains=True,
        licence="CC BY 4.0 (Kather et al., 2018)",
        forms=(
            Layout(
                _CENTRES, pictures.centres(_TISSUES, *_CENTRES), (("NCT-CRC-HE-100K", 100000), ("CRC-VAL-HE-7K", 7180))
            ),
        ),
        origin="Kather et al., 100,000 histological images (Zenodo record 1214456)",
    ),
)
