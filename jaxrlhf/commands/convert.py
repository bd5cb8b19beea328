"""Converts a GGUF file, or the checkpoint of a run, into a folder in Hugging Face's format, from which runs start.

    jaxrlhf convert MODEL.gguf FOLDER [--dtype bfloat16]
    jaxrlhf convert RUN/checkpoints/steps/40 FOLDER [--role critic] [--merge-adapters]

GGUF: Llama, Qwen 2, Qwen 3, with a byte-level BPE; needs the package gguf: pip install 'jaxrlhf[gguf]'. A checkpoint is
read on the devices and by the data that its run's config names; of a role with adapters the folder holds these, in
PEFT's format.
"""

import argparse
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

from jaxrlhf.data.gguf_folder import convert_gguf
from jaxrlhf.models.architecture import num_parameters
from jaxrlhf.models.gguf_files import Dtype
from jaxrlhf.train import leave
from jaxrlhf.train import main as train
from jaxrlhf.writing import UnwritableError


def parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="jaxrlhf convert", description="Convert a GGUF file or a checkpoint into Hugging Face's format."
    )
    parser.add_argument("source", type=Path, metavar="SOURCE", help="MODEL.gguf, or RUN/checkpoints/steps/NUMBER")
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="made; of a GGUF file, its files are replaced")
    parser.add_argument(
        "--dtype", choices=get_args(Dtype), help="of a GGUF file: float32 (default) holds every number exactly"
    )
    parser.add_argument("--role", help="of a checkpoint: whose weights; actor if left out")
    parser.add_argument("--merge-adapters", action="store_true", help="of a checkpoint: a whole model in their place")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """The command. Returns the exit status."""
    options = parser().parse_args(arguments)
    source, folder = options.source, options.folder
    try:
        if source.is_dir():
            if options.dtype:
                raise ValueError(f"--dtype: is for GGUF files. Got the folder {source}. Leave it out.")
            return convert_checkpoint(source, folder, options.role or "actor", merge=options.merge_adapters)
        if options.role or options.merge_adapters:
            raise ValueError(f"--role, --merge-adapters: are for checkpoints. Got the file {source}. Leave them out.")
        dtype: Dtype = options.dtype or "float32"
        config = convert_gguf(source, folder, dtype=dtype)
    except (ValueError, UnwritableError) as error:
        print(f"Error: {error}", file=sys.stderr)
        return 1
    print(f"{folder}: {num_parameters(config):,} parameters in {dtype}, {config.vocab_size:,} tokens")
    return 0


def convert_checkpoint(checkpoint: Path, folder: Path, role: str, *, merge: bool) -> int:
    """Exports a role of a checkpoint, by a run that ends where it begins. Returns its exit status."""
    *_, checkpoints, steps, number = ("", "", "", *checkpoint.resolve().parts)
    config = checkpoint.resolve().parents[2] / "config.yaml"
    if (checkpoints, steps) != ("checkpoints", "steps") or not number.isdecimal() or not config.is_file():
        raise ValueError(
            f"{checkpoint}: must be RUN/checkpoints/steps/NUMBER, with a run's config.yaml in RUN. Got "
            f"{checkpoints}/{steps}/{number}, and {'one' if config.is_file() else 'none'}."
        )
    if folder.exists():
        raise ValueError(f"{folder}: must be new. Got a file or folder that is there. Name another, or remove it.")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        settings = (
            f"steps={number}", f"output.folder={scratch}", f"output.export=[{role}]", "output.export_every=0",
            f"output.merge_adapters={str(merge).lower()}", "output.tensorboard=false", "output.wandb=null",
            "output.mlflow=null",
            "evaluation=null",
        )  # fmt: skip
        told = [part for setting in settings for part in ("--set", setting)]
        status = train(["--config", str(config), "--resume", str(checkpoint), *told])
        if status == 0:
            shutil.move((Path(scratch) / "latest").resolve() / role, folder)
            print(f"{folder}: {role} after {number} steps")
    return status


if __name__ == "__main__":
    leave(main())
