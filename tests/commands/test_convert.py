"""The command that makes a folder in Hugging Face's format of a GGUF file."""

from jaxrlhf.commands.convert import main
from jaxrlhf.models.config import ModelConfig
from jaxrlhf.models.config_json import read_config
from jaxrlhf.models.huggingface import save_params
from tests.gguf_models import parts_of
from tests.random_weights import params_of

SMALL = ModelConfig(vocab_size=16, hidden_size=8, intermediate_size=12, num_layers=1, num_heads=2, num_kv_heads=1)


def test_it_converts_and_says_what_it_wrote(tmp_path, capsys):
    save_params(params_of(SMALL), SMALL, tmp_path / "from", dtype="float32")
    path, folder = parts_of(tmp_path / "from", "llama").write(tmp_path / "model.gguf"), tmp_path / "to"
    assert main([str(path), str(folder), "--dtype", "bfloat16"]) == 0
    assert capsys.readouterr().out == f"{folder}: 760 parameters in bfloat16, 16 tokens\n"
    assert read_config(folder) == SMALL


def test_errors_are_one_line(tmp_path, capsys):
    (tmp_path / "model.gguf").write_text("text")
    assert main([str(tmp_path / "model.gguf"), str(tmp_path / "to")]) == 1
    assert capsys.readouterr().err.startswith(f"Error: {tmp_path / 'model.gguf'}: must be a whole GGUF file. Got: ")
