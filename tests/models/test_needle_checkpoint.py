"""The default model: loads with transformers unchanged, finds needles, ends its answers."""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from csps.models.needle_prompts.haystack import KINDS, Kind, Order, is_correct
from csps.models.needle_prompts.prompt import NeedleConfig, generate
from csps.services.evaluation.answerers import LocalAnswerer
from csps.services.evaluation.cases import Evaluation, cases
from csps.services.evaluation.local_model import LocalModel

pytest.importorskip("transformers")

from csps.tools.train_needle.batch_maker import BatchMaker
from csps.tools.train_needle.loss import overlooked
from csps.tools.train_needle.stages import STAGES
from csps.tools.train_needle.texts import TrainingTexts

transformers: Any = pytest.importorskip("transformers")

KINDS_OF_SEVERAL: tuple[Kind, ...] = ("multi", "two_hop")
FOLDER = Path(__file__).resolve().parents[2] / "models" / "needle"


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    """Beside other work on the machine, two threads are slower than one."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return transformers.AutoTokenizer.from_pretrained(FOLDER)


@pytest.fixture(scope="module")
def model() -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32).eval()


def generated(model: Any, tokenizer: Any, ids: torch.Tensor) -> str:
    with torch.inference_mode():
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=32)
    reply = out[0, ids.shape[1] :]
    assert reply[-1] == tokenizer.eos_token_id, "the answer does not end"
    return str(tokenizer.decode(reply, skip_special_tokens=True))


def share_correct(model: Any, tokenizer: Any, kind: Kind, lengths: list[int], count: int) -> float:
    """Share of right answers to completion prompts, depths spread evenly."""
    right = 0
    for number in range(count):
        config = NeedleConfig(
            kind=kind,
            length=lengths[number % len(lengths)],
            needles=8,
            depth=(number + 0.5) / count,
            seed=5_000_000 + number,
        )
        prompt = generate(config)
        ids = tokenizer(prompt.text, return_tensors="pt").input_ids
        right += is_correct(prompt.answer, generated(model, tokenizer, ids))
    return right / count


def test_the_checkpoint_is_a_small_llama_with_choices(model: Any) -> None:
    config = model.config
    assert config.architectures == ["LlamaForCausalLM"]
    assert config.max_position_embeddings >= 65_536
    assert config.num_hidden_layers >= 4
    assert config.num_attention_heads >= 4
    assert config.num_key_value_heads < config.num_attention_heads
    assert sum(file.stat().st_size for file in FOLDER.iterdir()) <= 8_000_000


@pytest.mark.parametrize("kind", KINDS)
def test_one_word_is_one_token(tokenizer: Any, kind: Kind) -> None:
    prompt = generate(NeedleConfig(kind=kind, length=2000, seed=11))
    assert len(tokenizer(prompt.text, add_special_tokens=False).input_ids) == 2000
    answer = tokenizer(" " + prompt.answer, add_special_tokens=False).input_ids
    assert len(answer) <= prompt.answer.count(" ") + prompt.answer.count(",") + 1


@pytest.mark.parametrize(
    "text",
    [
        "plain words",
        " leading and trailing ",
        "Zürich, 東京 and 🙂",
        "tabs\tand\r\nline\n\n\nends",
        "x = [1, 2.5e-3]; # code",
        "",
        "".join(map(chr, range(1, 256))),
    ],
)
def test_any_text_survives_the_tokenizer(tokenizer: Any, text: str) -> None:
    ids = tokenizer(text, add_special_tokens=False).input_ids
    assert tokenizer.decode(ids) == text


def test_prompt_text_survives_the_tokenizer(tokenizer: Any) -> None:
    text = generate(NeedleConfig(length=3000, seed=12)).text
    ids = tokenizer(text).input_ids
    assert ids[0] == tokenizer.bos_token_id
    assert tokenizer.decode(ids, skip_special_tokens=True) == text


@pytest.mark.parametrize("kind", ["single", "multi_key"])
def test_finds_needles_in_a_thousand_tokens(model: Any, tokenizer: Any, kind: Kind) -> None:
    assert share_correct(model, tokenizer, kind, [1024], 20) >= 0.95


def test_finds_a_needle_in_four_thousand_tokens(model: Any, tokenizer: Any) -> None:
    assert share_correct(model, tokenizer, "multi_key", [2048, 4096], 6) == 1.0


@pytest.mark.slow
@pytest.mark.parametrize(("order", "share", "questions"), [("last", 20, 20), ("first", 1, 5)])
@pytest.mark.parametrize("filler", ["shuffled", "english", "bytes"])
def test_answers_in_other_texts_and_to_questions_before_them(
    filler: str, order: Order, share: int, questions: int
) -> None:
    model = LocalModel.load(FOLDER)
    asked = Evaluation(questions=questions, share=share, filler=filler, order=order)
    right = 0
    for kind in KINDS_OF_SEVERAL:
        for case in cases(asked, kind, 512, model.count):
            replies = LocalAnswerer(model).answers(case)
            pairs = zip(case.questions, replies, strict=True)
            right += sum(is_correct(question.answer, reply) for question, reply in pairs)
    assert right >= 2 * questions * 0.9


def test_every_key_is_seen_from_its_value(model: Any, tokenizer: Any) -> None:
    """Facts whose keys the first layer overlooks would be confused."""
    facts = BatchMaker(tokenizer, 0, TrainingTexts(("Text.",), ("code",))).facts(STAGES[-1], 0)
    for fact in facts.split(1):
        assert overlooked(model, fact) < 1.0


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", ["single", "multi_key"])
@pytest.mark.parametrize("length", [4096, 16384, 32768])
def test_finds_needles_in_long_texts(model: Any, tokenizer: Any, kind: Kind, length: int) -> None:
    assert share_correct(model, tokenizer, kind, [length], 10) >= 0.9


@pytest.mark.parametrize("parts", [False, True])
def test_a_chat_elicits_the_answer(model: Any, tokenizer: Any, parts: bool) -> None:
    right = 0
    for seed in range(10):
        prompt = generate(NeedleConfig(length=512, seed=6_000_000 + seed))
        content = [{"type": "text", "text": prompt.chat_text}] if parts else prompt.chat_text
        ids = tokenizer.apply_chat_template(
            [{"role": "user", "content": content}],
            add_generation_prompt=True,
            return_tensors="pt",
            return_dict=True,
        ).input_ids
        right += is_correct(prompt.answer, generated(model, tokenizer, ids))
    assert right >= 9


@pytest.mark.parametrize("text", ["Hello!", "", "What is 2 + 2?", "Zürich " * 20])
def test_other_text_does_no_harm(model: Any, tokenizer: Any, text: str) -> None:
    ids = tokenizer(text, return_tensors="pt").input_ids
    with torch.inference_mode():
        logits = model(ids).logits
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=16)
    assert torch.isfinite(logits).all()
    assert len(tokenizer.decode(out[0])) > 0


def test_a_text_of_random_words_does_no_harm(model: Any, tokenizer: Any) -> None:
    rng = random.Random(0)
    ids = torch.tensor([[rng.randrange(len(tokenizer)) for _ in range(500)]])
    with torch.inference_mode():
        assert torch.isfinite(model(ids).logits).all()
