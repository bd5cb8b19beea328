"""Converts a GGUF file into a folder in Hugging Face's format, from which runs start.

    python -m scripts.convert MODEL.gguf FOLDER [--dtype bfloat16]

Models: Llama, Qwen 2, Qwen 3, with a byte-level BPE. Needs the package gguf: pip install 'jaxrlhf[gguf]'.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

from jaxrlhf.data.gguf_folder import convert_gguf
from jaxrlhf.models.architecture import num_parameters
from jaxrlhf.models.gguf_files import Dtype
from jaxrlhf.writing import UnwritableError


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line. Returns the exit status."""
    parser = argparse.ArgumentParser(description="Convert a GGUF file into a folder in Hugging Face's format.")
    parser.add_argument("source", type=Path, metavar="MODEL.gguf")
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="made, or its files replaced")
    parser.add_argument(
        "--dtype", choices=get_args(Dtype), default="float32", help="float32 (default) holds every number exactly"
    )
    options = parser.parse_args(arguments)
    try:
        config = convert_gguf(options.source, options.folder, dtype=options.dtype)
    except (ValueError, UnwritableError) as error:
        print(f"Error: {error}", file=sys.stderr)
        return 1
    print(f"{options.folder}: {num_parameters(config):,} parameters in {options.dtype}, {config.vocab_size:,} tokens")
    return 0


if __name__ == "__main__":
    sys.exit(main())
