"""The Turkish Web Treebank (Apache-2.0) out of the PyPI package turkish-treebanks: words and their universal tags."""

import collections
import importlib.metadata
from typing import NamedTuple

import numpy as np

FILES = ("web.conllu", "wiki.conllu")
LONGEST_SUFFIX = 5
TEST_SHARE = 0.2


def sentences():
    """Lists of (word, tag), in the order of the files.

    Raises:
        ImportError: if the package is not installed.
    """
    try:
        package = importlib.metadata.distribution("turkish-treebanks")
    except importlib.metadata.PackageNotFoundError:
        raise ImportError("tagging expects the package turkish-treebanks: pip install turkish-treebanks") from None
    read = []
    for name in FILES:
        for block in package.locate_file(f"data/{name}").read_text(encoding="utf-8").split("\n\n"):
            rows = [line.split("\t") for line in block.splitlines() if line and not line.startswith("#")]
            if rows:
                read.append([(row[1], row[3]) for row in rows])
    return read


def split(read, seed):
    """Training and test sentences."""
    order = np.random.default_rng(seed).permutation(len(read))
    tested = int(TEST_SHARE * len(read))
    return [read[i] for i in order[tested:]], [read[i] for i in order[:tested]]


def keys(word):
    """What a guess can rest on, the best first: the word, its endings from the longest on, nothing."""
    endings = [("suffix", word[-n:]) for n in range(min(LONGEST_SUFFIX, len(word)), 0, -1)]
    return [("word", word), *endings, ("any", "")]


def baseline(trained, tested):
    """Share of right tags: a word's most frequent tag; of an unknown word, that of its longest known suffix."""
    tags_of = collections.defaultdict(collections.Counter)
    for word, tag in (pair for sentence in trained for pair in sentence):
        for key in keys(word.lower()):
            tags_of[key][tag] += 1

    def guess(word):
        return next(tags_of[key].most_common(1)[0][0] for key in keys(word.lower()) if key in tags_of)

    hits = [guess(word) == tag for sentence in tested for word, tag in sentence]
    return sum(hits) / len(hits)


class Vocabularies(NamedTuple):
    """Numbers of what was seen at least twice in training; 0 is padding, 1 is anything else."""

    word: dict
    suffix_3: dict
    suffix_2: dict
    tag: dict  # from 0


def shape(word):
    """1 lower case, 2 capital, 3 digit, 4 anything else."""
    return 3 if word[0].isdigit() else 2 if word[0].isupper() else 1 if word[0].islower() else 4


def features(word):
    word = word.lower()
    return word, word[-3:], word[-2:]


def vocabularies(trained):
    counts = [collections.Counter() for _ in range(3)]
    for word, _ in (pair for sentence in trained for pair in sentence):
        for count, feature in zip(counts, features(word), strict=True):
            count[feature] += 1
    known = [[f for f, seen in count.most_common() if seen > 1] for count in counts]
    tags = sorted({tag for sentence in trained for _, tag in sentence})
    return Vocabularies(*({f: i + 2 for i, f in enumerate(of)} for of in known), {t: i for i, t in enumerate(tags)})


def arrays(read, vocabulary, width):
    """x (n, width, 4) int32 with words, suffixes and shapes, mask (n, width) bool, tags (n, width) int32, -1 behind."""
    x = np.zeros((len(read), width, 4), np.int32)
    tags = np.full((len(read), width), -1, np.int32)
    for of_sentence, tags_of_sentence, sentence in zip(x, tags, read, strict=True):
        for t, (word, tag) in enumerate(sentence[:width]):
            known = zip(vocabulary[:3], features(word), strict=True)
            of_sentence[t] = [*(numbers.get(feature, 1) for numbers, feature in known), shape(word)]
            tags_of_sentence[t] = vocabulary.tag.get(tag, -1)
    return x, tags >= 0, tags
