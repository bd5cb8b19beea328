"""Prompts, demonstrations and preference pairs from sentences whose sentiment people rated.

The sentences and ratings are those of the paper on VADER, and lie in the source distribution of `vaderSentiment`:
snippets of movie and product reviews, and of newspaper editorials, each with the mean of 20 people's ratings from -4
(extremely negative) to 4 (extremely positive).

Reference:
    Hutto and Gilbert 2014, "VADER: A Parsimonious Rule-based Model for Sentiment Analysis of Social Media Text".
"""

import dataclasses
import io
import json
import random
import tarfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

RATINGS = "additional_resources/hutto_ICWSM_2014.tar.gz"
"""The archive of ratings within the source distribution."""
REVIEWS = {"movieReviewSnippets": "Movie review:", "amazonReviewSnippets": "Product review:"}
"""Kinds of reviews, by the names of their files, and how a text of each begins."""
EDITORIALS = "nytEditorialSnippets"
FEWEST_WORDS, MOST_WORDS = 4, 20
LEAST_MARGIN = 1.0
"""How far apart the ratings of a pair are at least. The mean of 20 ratings is uncertain by about a quarter."""
PAIRS_PER_SENTENCE = 2
PROMPTS, EDITORIAL_ROWS, LEAD_WORDS = 4096, 512, 3

Row = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Rated:
    """A sentence and the mean of its ratings."""

    text: str
    rating: float


def read_ratings(source: Path) -> dict[str, list[Rated]]:
    """The sentences of a source distribution by kind, each once: of some length, and without characters that were lost.

    Raises ValueError if the file is no such distribution.
    """
    kinds, seen = {}, set()
    try:
        with tarfile.open(source) as outer:
            inner = next(name for name in outer.getnames() if name.endswith(RATINGS))
            packed = outer.extractfile(inner)
            assert packed is not None
            with tarfile.open(fileobj=io.BytesIO(packed.read())) as archive:
                for kind in (*REVIEWS, EDITORIALS):
                    file = archive.extractfile(f"hutto_ICWSM_2014/{kind}_GroundTruth.txt")
                    assert file is not None
                    kinds[kind] = _sentences(file.read().decode("utf-8", "replace"), seen)
    except (tarfile.TarError, OSError, StopIteration, KeyError, ValueError) as error:
        raise ValueError(
            f"{source}: must be the source distribution of vaderSentiment with {RATINGS}. Got {error!r}. Remove it and "
            "fetch it again."
        ) from error
    return kinds


def _sentences(table: str, seen: set[str]) -> list[Rated]:
    """The sentences of a table of number, rating and text, without those seen before, which it adds to."""
    rated = []
    for line in table.splitlines():
        _, rating, text = line.split("\t", 2)
        text = " ".join(text.split())
        usable = "\ufffd" not in text and FEWEST_WORDS <= len(text.split()) <= MOST_WORDS
        if usable and text.lower() not in seen:
            seen.add(text.lower())
            rated.append(Rated(text, float(rating)))
    return rated


def make_rows(kinds: Mapping[str, Sequence[Rated]], *, seed: int = 0, held_out: float = 0.1) -> dict[str, list[Row]]:
    """All data sets by name. No sentence of a held-out one is in another, and no held-out prompt is trained on.

    `prompts`: a few first words of movie reviews. `demonstrations`: whole reviews. `pairs`: two reviews, the one that
    people rated higher first. Each of these as `<name>_train` and `<name>_held_out`. `editorials`: newspaper text, not
    trained on, by which one sees what training does to the rest of a model's English.
    """
    rng = random.Random(seed)
    rows: dict[str, list[Row]] = {}
    reviews: dict[str, list[tuple[str, Rated]]] = {"train": [], "held_out": []}
    for kind, lead in REVIEWS.items():
        sentences = rng.sample(kinds[kind], len(kinds[kind]))
        cut = int(len(sentences) * held_out)
        reviews["held_out"] += [(lead, each) for each in sentences[:cut]]
        reviews["train"] += [(lead, each) for each in sentences[cut:]]
    taken: set[str] = set()
    for split in ("held_out", "train"):
        part = rng.sample(reviews[split], len(reviews[split]))
        prompts = [prompt for prompt in dict.fromkeys(_prompts(part, rng)) if prompt not in taken]
        taken |= set(prompts)
        rows[f"prompts_{split}"] = [{"prompt": prompt} for prompt in prompts[:PROMPTS]]
        rows[f"demonstrations_{split}"] = [{"prompt": lead, "completion": f" {each.text}"} for lead, each in part]
        rows[f"pairs_{split}"] = list(_pairs(part, rng))
    editorials = rng.sample(kinds[EDITORIALS], min(EDITORIAL_ROWS, len(kinds[EDITORIALS])))
    rows["editorials"] = [_begun(each.text) for each in editorials]
    return rows


def _prompts(reviews: Sequence[tuple[str, Rated]], rng: random.Random) -> Iterable[str]:
    """The first two to four words of each longer movie review."""
    for lead, each in reviews:
        words = each.text.split()
        if lead == REVIEWS["movieReviewSnippets"] and len(words) >= 8:
            yield f"{lead} {' '.join(words[: rng.randint(2, 4)])}"


def _pairs(reviews: Sequence[tuple[str, Rated]], rng: random.Random) -> Iterable[Row]:
    """Pairs of reviews of one kind that people told apart, drawn at random."""
    by_lead: dict[str, list[Rated]] = {}
    for lead, each in reviews:
        by_lead.setdefault(lead, []).append(each)
    pairs = []
    for lead, rated in by_lead.items():
        for _ in range(PAIRS_PER_SENTENCE * len(rated)):
            better, worse = sorted(rng.sample(rated, 2), key=lambda each: -each.rating)
            if better.rating - worse.rating >= LEAST_MARGIN:
                margin = round(better.rating - worse.rating, 3)
                pairs.append(
                    {"prompt": lead, "chosen": f" {better.text}", "rejected": f" {worse.text}", "margin": margin}
                )
    return rng.sample(pairs, len(pairs))


def _begun(text: str) -> Row:
    """A text whose first words are given and whose others are to be told."""
    words = text.split()
    return {"prompt": " ".join(words[:LEAD_WORDS]), "completion": " " + " ".join(words[LEAD_WORDS:])}


def write_rows(rows: Mapping[str, Sequence[Row]], folder: Path) -> None:
    """Writes each data set as `<name>.jsonl`."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, each in rows.items():
        lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in each]
        (folder / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")
