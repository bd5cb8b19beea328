"""Whether transformers continues the held-out prompts as the run did: the same greedy text from the exported folder.

    python -m examples.sentiment.in_transformers runs/sentiment/grpo/latest

Reads the samples of a run's last evaluation, which was greedy, and what the run exported: a whole model, or adapters on
the model that they were trained on. Needs torch==2.14.1 and transformers==5.23.0, with peft==0.21.2 for adapters.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch  # pyright: ignore[reportMissingImports]
import transformers  # pyright: ignore[reportMissingImports]


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line. Returns the exit status: 0 if every text is the same."""
    parser = argparse.ArgumentParser(description="Compare a run's greedy text with that of transformers.")
    parser.add_argument("run", type=Path, metavar="RUN", help="its folder, such as runs/sentiment/grpo/latest")
    parser.add_argument("--new-tokens", type=int, default=24, metavar="N", help="max_new_tokens of the evaluation")
    options = parser.parse_args(arguments)
    samples = last_samples(options.run / "samples.jsonl")
    model = load_model(options.run / "actor")
    tokenizer = transformers.AutoTokenizer.from_pretrained(options.run / "actor")
    num_same = 0
    for sample in samples:
        text = continue_greedily(model, tokenizer, sample["prompt"], options.new_tokens)
        num_same += text == sample["completion"]
        if text != sample["completion"]:
            print(f"{sample['prompt']}\n  the run      {sample['completion']!r}\n  transformers {text!r}")
    print(f"{num_same} of {len(samples)} texts are the same.")
    return 0 if samples and num_same == len(samples) else 1


def last_samples(path: Path) -> list[dict[str, Any]]:
    """The samples of the last evaluation."""
    samples = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    samples = [sample for sample in samples if sample["split"] == "held-out"]
    return [sample for sample in samples if sample["step"] == samples[-1]["step"]]


def load_model(folder: Path) -> Any:
    """The model in a folder, in float32; adapters are laid over the model that they name."""
    if not (folder / "adapter_config.json").is_file():
        return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    import peft  # pyright: ignore[reportMissingImports]

    base = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))["base_model_name_or_path"]
    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    return peft.PeftModel.from_pretrained(model, str(folder))


def continue_greedily(model: Any, tokenizer: Any, prompt: str, num_new: int) -> str:
    """The text that a model gives, without the special tokens at its end."""
    ids = tokenizer(prompt, return_tensors="pt").input_ids
    with torch.no_grad():
        out = model.generate(ids, max_new_tokens=num_new, do_sample=False, attention_mask=torch.ones_like(ids))
    return tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)


if __name__ == "__main__":
    sys.exit(main())
