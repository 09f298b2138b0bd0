"""Train the small default model, which finds needles in long text.

Four ideas make this work on one CPU core within an hour or two:

1. *Copy first.* Training on retrieval alone stays for thousands of steps at "any value of the
   context". Copying shuffled segments of random words teaches the two-layer circuit (look at the
   previous word; find what followed this word) within some hundred steps.
2. *Then hints.* From copying, retrieval still falls back to "any value": every value follows the
   same "is". So for a while the value is asked for already at the key in the question, and at each
   word from there to the answer. At the key only the look-up is to be learnt, and 250 steps do it.
3. *Pretend to be long.* What makes a 64K-token text hard is the number of words that compete for
   attention and the distances between them, and both can be had in a short one: positions skip
   at random between sentences (PoSE), and each filler word's attention logit is raised by ln(R),
   which is what R copies of it would weigh. A 500-token text then costs attention as much mass as
   any length does up to the longest the model serves.
4. *Many questions to one text.* Each question stands behind the text as if it were alone: it sees
   the text and itself, never another question. Intermediate layers must answer as well (deep
   supervision), so that retrieval happens in several layers, not in just the last one.

Run ``python -m csps.models.train_needle --out DIR``; the same command resumes it if interrupted.
Batches depend on seed, stage and step alone, so that a resumed run sees what an uninterrupted one
would have seen.
"""

import argparse
import csv
import itertools
import json
import math
import random
import string
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
import torch.nn.functional as F
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers, processors
from tokenizers.models import BPE
from torch import Tensor
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from csps.models import needle_prompts
from csps.models.needle_prompts import ANSWER_HEAD, Haystack, Question, split_words

BEGIN, END, PAD = "<|begin|>", "<|end|>", "<|pad|>"
ROLES = ("<|system|>", "<|user|>", "<|assistant|>")

REPLY_TO_NO_QUESTION = " Which password?"
"""To a chat message that asks nothing the model can answer."""

_CHARACTERS = string.ascii_letters + string.digits + string.punctuation + " \n"

CONTEXT = 131072
"""Positions served, in tokens."""

ROPE_THETA = 1e12
"""So large that more than half of a head's dimensions hardly turn within the context: these match
content over any distance, the fast ones find neighbours."""

CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>' }}"
    "{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] %}{{ part['text'] }}{% endfor %}{% endif %}"
    "{{ '<|end|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


@dataclass(frozen=True, kw_only=True)
class Stage:
    """A stretch of training with one mixture of data."""

    name: str
    steps: int
    batch: int
    """Sequences in a step."""
    tokens: int
    """Length of a haystack; of a whole sequence when copying."""
    needles: tuple[int, int] = (1, 1)
    """Fewest and most needles in a haystack."""
    questions: int = 0
    """Questions to each haystack."""
    longest: int = CONTEXT
    """The haystack pretends to be of any length up to this, in tokens."""
    copying: float = 0.0
    """Share of the steps that train copying instead of questions."""
    hints: bool = False
    """Ask for the value at every word from the key on, in the question already."""
    everyday: bool = False
    """Also what users do: values that are ordinary words, questions in the middle of a message,
    and messages without any question, to which the answer is ``REPLY_TO_NO_QUESTION``."""
    idle: float = 0.0
    """Share of the sequences that are short and have neither facts nor questions."""
    mentions: float = 0.0
    """Share of the filler's nouns that name a key without telling its value."""
    misspelt: float = 0.0
    """Share of the haystacks with words outside the vocabulary, spelt in bytes."""
    continued: int = 0
    """Filler words of each haystack to be predicted, so that the model writes some English."""
    pool: int | None = None
    """Fewest different words in a text to copy; None: as many as there are."""
    hard_kinds: float = 0.0
    """Share of the questions that ask for several needles or for two hops."""
    learning_rate: tuple[float, float] = (2e-3, 2e-3)
    """At the stage's first and last step, linear between."""


STAGES = (
    Stage(name="copy", steps=500, batch=48, tokens=128, copying=1.0),
    # Only the frame of an answer: it is one of the values, then comes the end.
    Stage(
        name="facts",
        steps=250,
        batch=32,
        tokens=96,
        needles=(2, 8),
        questions=6,
        copying=0.25,
        longest=4096,
    ),
    # Words repeat, so the word before does not tell what comes next, but the two before do: the
    # step from "Lisbon" to "Lisbon is".
    Stage(name="pairs", steps=200, batch=48, tokens=128, copying=1.0, pool=16),
    Stage(
        name="lookup",
        steps=300,
        batch=32,
        tokens=96,
        needles=(2, 8),
        questions=6,
        copying=0.25,
        pool=16,
        longest=256,
        hard_kinds=0.5,
    ),
    Stage(
        name="hints",
        steps=250,
        batch=24,
        tokens=96,
        needles=(2, 8),
        questions=6,
        copying=0.1,
        pool=16,
        longest=256,
        hard_kinds=0.4,
        hints=True,
    ),
    Stage(
        name="text",
        steps=250,
        batch=12,
        tokens=256,
        needles=(1, 20),
        questions=12,
        hard_kinds=0.4,
        hints=True,
        learning_rate=(2e-3, 1e-3),
    ),
    Stage(
        name="long",
        steps=250,
        batch=8,
        tokens=512,
        needles=(1, 50),
        questions=16,
        hard_kinds=0.4,
        misspelt=0.2,
        continued=48,
        learning_rate=(1.5e-3, 1.25e-3),
    ),
    Stage(
        name="polish",
        steps=500,
        batch=8,
        tokens=512,
        needles=(1, 60),
        questions=16,
        hard_kinds=0.5,
        everyday=True,
        misspelt=0.2,
        continued=96,
        learning_rate=(1.25e-3, 1e-5),
    ),
    # How to behave when nothing is asked; and texts that name keys in passing.
    Stage(
        name="manners",
        steps=300,
        batch=8,
        tokens=512,
        needles=(1, 60),
        questions=14,
        hard_kinds=0.5,
        everyday=True,
        idle=0.4,
        mentions=0.02,
        misspelt=0.2,
        continued=128,
        learning_rate=(6e-4, 1e-5),
    ),
)


@dataclass(frozen=True, kw_only=True)
class Batch:
    """B sequences of T tokens and the N places in them where a word is to be predicted."""

    ids: Tensor
    """(B, T)"""
    positions: Tensor
    """(B, T)"""
    mask: Tensor
    """(B, 1, T, T), added to the attention logits: -inf, 0, or ln(R)."""
    rows: Tensor
    """(N,) sequence of each prediction."""
    columns: Tensor
    """(N,) the token behind which it is made."""
    targets: Tensor
    """(N,)"""
    answers: int
    """The first of the N belong to answers, all others to filler."""


def build_tokenizer() -> PreTrainedTokenizerFast:
    """A word (with its space) is one token; all else falls back to bytes, so any text encodes."""
    words = [word.replace(" ", "Ġ") for word in needle_prompts.vocabulary()]
    entries = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *words]
    vocabulary = {entry: index for index, entry in enumerate(entries)}
    tokenizer = Tokenizer(BPE(vocab=vocabulary, merges=[], ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    specials = [BEGIN, END, PAD, *ROLES]
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in specials])
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BEGIN} $A", special_tokens=[(BEGIN, tokenizer.token_to_id(BEGIN))]
    )
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer,
        bos_token=BEGIN,
        eos_token=END,
        pad_token=PAD,
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=CONTEXT,
    )


def build_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=CONTEXT,
        rope_parameters={"rope_type": "default", "rope_theta": ROPE_THETA},
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return LlamaForCausalLM(config)


class BatchMaker:
    """Draws training batches; the same seed, stage and step give the same batch."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, seed: int) -> None:
        vocabulary: dict[str, int] = tokenizer.get_vocab()
        self._ids = {
            word: vocabulary[word.replace(" ", "Ġ").replace("\n", "Ċ")]
            for word in [*needle_prompts.vocabulary(), *_CHARACTERS, BEGIN, END, PAD, *ROLES]
        }
        self._words = [self._ids[word] for word in needle_prompts.vocabulary()]
        self._seed = seed

    def draw(self, stage: Stage, step: int, *, copying: bool | None = None) -> Batch:
        rng = random.Random(f"{self._seed}/{stage.name}/{step}")
        if copying is None:
            copying = rng.random() < stage.copying
        make = self._copy_sequence if copying else self._text_sequence
        return _collate([make(rng, stage) for _ in range(stage.batch)], self._ids[PAD])

    def _text_sequence(self, rng: random.Random, stage: Stage) -> "_Sequence":
        idle = stage.idle and rng.random() < stage.idle
        return (self._idle_sequence if idle else self._question_sequence)(rng, stage)

    def _copy_sequence(self, rng: random.Random, stage: Stage) -> "_Sequence":
        """Random words, then their segments in another order; within a segment the next word is
        known from the first half."""
        half, segment = stage.tokens // 2, 8
        words = rng.choices(self._pool(rng, stage), k=half)
        starts = list(range(0, half, segment))
        rng.shuffle(starts)
        copied = [word for start in starts for word in words[start : start + segment]]
        gap = int(_log_uniform(rng, 1, CONTEXT // 2))
        sequence = _Sequence(
            ids=words + copied,
            positions=[*range(half), *range(half + gap, 2 * half + gap)],
            blocks=[0] * (2 * half),
            filler=[False] * (2 * half),
        )
        for index in range(half - 1):
            if index % segment != segment - 1:
                sequence.predictions.append((half + index, copied[index + 1]))
        return sequence

    def _pool(self, rng: random.Random, stage: Stage) -> list[int]:
        if stage.pool is None:
            return self._words
        return rng.sample(self._words, round(_log_uniform(rng, stage.pool, len(self._words))))

    def _question_sequence(self, rng: random.Random, stage: Stage) -> "_Sequence":
        needles = round(_log_uniform(rng, *stage.needles))
        hops = rng.randint(0, needles // 2) if stage.hard_kinds else 0
        facts = needle_prompts.draw_facts(rng, needles, hops=hops)
        if stage.everyday:
            facts = [*facts[:hops], *_with_ordinary_values(rng, facts[hops:])]
        misspelt = rng.random() < stage.misspelt
        # A misspelt word is several tokens: start from fewer words.
        tokens = stage.tokens * 3 // 5 if misspelt else stage.tokens
        haystack = needle_prompts.build_haystack(rng, max(tokens, 8 * (needles + 1)), facts)
        chat = rng.random() < 0.3
        length = _log_uniform(rng, stage.tokens, stage.longest)
        sequence = self._haystack_sequence(rng, stage, haystack, length, chat, misspelt)
        for block in range(1, stage.questions + 1):
            if chat and stage.everyday and rng.random() < 0.15:
                self._append(sequence, block, _chatter(rng), REPLY_TO_NO_QUESTION, chat)
                continue
            question = _draw_question(rng, haystack, hops, stage.hard_kinds)
            text = question.text
            if chat and stage.everyday:
                text = _casual(rng, text)
            self._append(sequence, block, text, f" {question.answer}", chat)
            if stage.hints:
                self._hint(sequence, haystack, question, block)
        return sequence

    def _idle_sequence(self, rng: random.Random, stage: Stage) -> "_Sequence":
        chat = rng.random() < 0.5
        tokens = rng.randint(4, 64)
        haystack = needle_prompts.build_haystack(rng, tokens, [])
        misspelt = rng.random() < 0.5
        sequence = self._haystack_sequence(rng, stage, haystack, tokens, chat, misspelt)
        if chat:
            for block in range(1, 9):
                self._append(sequence, block, _chatter(rng), REPLY_TO_NO_QUESTION, chat)
        return sequence

    def _haystack_sequence(
        self,
        rng: random.Random,
        stage: Stage,
        haystack: Haystack,
        length: float,
        chat: bool,
        misspelt: bool,
    ) -> "_Sequence":
        fact_places = {i for needle in haystack.needles for i in range(*needle.words)}
        spelt = [(word, i not in fact_places) for i, word in enumerate(haystack.words)]
        if stage.mentions:
            spelt = list(_mention(rng, spelt, stage.mentions))
        if misspelt:
            spelt = list(_misspell(rng, spelt))
        head = [BEGIN, "<|user|>"] if chat else [BEGIN]
        words = head + [word for word, _ in spelt]
        filler = [False] * len(head) + [is_filler for _, is_filler in spelt]
        sequence = _Sequence(
            ids=[self._ids[word] for word in words],
            positions=_skipping_positions(rng, words, int(length)),
            blocks=[0] * len(words),
            filler=filler,
            copies=length / len(words),
        )
        # Characters of misspelt words are no example to follow.
        places = [
            i
            for i in range(len(words) - 1)
            if filler[i] and filler[i + 1] and (len(words[i + 1]) > 1 or words[i + 1] in ".,\n")
        ]
        for place in rng.sample(places, min(stage.continued, len(places))):
            sequence.continuations.append((place, sequence.ids[place + 1]))
        return sequence

    def _append(
        self, sequence: "_Sequence", block: int, text: str, answer: str, chat: bool
    ) -> None:
        """Put a question, or what stands in its place, behind the haystack."""
        tail = [END, "<|assistant|>"] if chat else ANSWER_HEAD
        prompt = [*self._spell(text), *(self._ids[word] for word in tail)]
        reply = [*self._spell(answer), self._ids[END]]
        first = len(sequence.ids) + len(prompt) - 1
        sequence.predictions += [(first + index, word) for index, word in enumerate(reply)]
        position = sequence.positions[sequence.blocks.count(0) - 1] + 1
        ids = prompt + reply
        sequence.ids += ids
        sequence.positions += range(position, position + len(ids))
        sequence.blocks += [block] * len(ids)
        sequence.filler += [False] * len(ids)

    def _spell(self, text: str) -> list[int]:
        """The tokenizer's ids, without its overhead."""
        return [
            self._ids[piece]
            for word in split_words(text)
            for piece in ([word] if word in self._ids else word)
        ]

    def _hint(
        self, sequence: "_Sequence", haystack: Haystack, question: Question, block: int
    ) -> None:
        """Predict a key's value at the key, where nothing but the look-up has to be learnt, and
        at the words between a last key and the answer."""
        values = {self._ids[f" {n.key}"]: self._ids[f" {n.value}"] for n in haystack.needles}
        begin = sequence.blocks.index(block)
        (answer, _) = min(place for place in sequence.predictions if place[0] > begin)
        asked = [i for i in range(begin, answer) if sequence.ids[i] in values]
        if len(asked) == 1 and question.kind != "two_hop":
            asked = list(range(asked[0], answer))
        value = 0
        for index in asked:
            value = values.get(sequence.ids[index], value)
            sequence.predictions.append((index, value))


@dataclass(kw_only=True)
class _Sequence:
    """One training sequence while it is being written."""

    ids: list[int]
    positions: list[int]
    blocks: list[int]
    """0: text that all may see; n: seen by the n-th question alone."""
    filler: list[bool]
    copies: float = 1.0
    """How many times each filler word counts."""

    def __post_init__(self) -> None:
        self.predictions: list[tuple[int, int]] = []
        """(index of the token before, word to predict)"""
        self.continuations: list[tuple[int, int]] = []
        """The same in filler."""


def _log_uniform(rng: random.Random, low: float, high: float) -> float:
    return math.exp(rng.uniform(math.log(low), math.log(high)))


def _skipping_positions(rng: random.Random, words: Sequence[str], length: int) -> list[int]:
    """Increasing positions that spread the words over ``length``, skipping between sentences."""
    ends = [index for index, word in enumerate(words) if word == "."]
    # Uneven shares: some sentences stay neighbours while others move far apart.
    shares = [rng.random() ** 4 for _ in ends]
    scale = max(0, length - len(words)) / (sum(shares) or 1.0)
    skips = {index: int(share * scale) for index, share in zip(ends, shares, strict=True)}
    positions: list[int] = []
    position = 0
    for index in range(len(words)):
        positions.append(position)
        position += 1 + skips.get(index, 0)
    return positions


def _mention(
    rng: random.Random, words: Sequence[tuple[str, bool]], share: float
) -> Iterator[tuple[str, bool]]:
    """Name keys where nothing is told about them."""
    nouns = {f" {noun}" for noun in needle_prompts.NOUNS}
    for word, is_filler in words:
        if is_filler and word in nouns and rng.random() < share:
            # No filler that stands for many: a text names each key a few times.
            yield f" {rng.choice(needle_prompts.KEYS)}", False
        else:
            yield word, is_filler


def _misspell(rng: random.Random, words: Sequence[tuple[str, bool]]) -> Iterator[tuple[str, bool]]:
    """Replace some filler words by characters: text as a user may have it."""
    share = rng.uniform(0.0, 0.3)
    for word, is_filler in words:
        if not is_filler or not word.startswith(" ") or rng.random() > share:
            yield word, is_filler
            continue
        for character in " " + "".join(rng.choices(_CHARACTERS[:-2], k=rng.randint(1, 8))):
            yield character, True


def _with_ordinary_values(
    rng: random.Random, facts: Sequence[tuple[str, str, float]]
) -> Iterator[tuple[str, str, float]]:
    """Some of the values are words that otherwise occur in filler."""
    ordinary = [*needle_prompts.NOUNS, *needle_prompts.ADJECTIVES]
    for key, value, depth in facts:
        yield key, rng.choice(ordinary) if rng.random() < 0.1 else value, depth


def _chatter(rng: random.Random) -> str:
    """The end of a message that asks nothing."""
    kind = rng.randrange(3)
    if kind == 0:
        return ""
    if kind == 1:
        return "".join(needle_prompts.filler_sentence(rng))
    return "".join(rng.choices(_CHARACTERS, k=rng.randint(1, 20)))


def _casual(rng: random.Random, text: str) -> str:
    """A question as it comes, or without its heading, on a line of its own or not."""
    question = text.removeprefix("".join(needle_prompts.QUESTION_HEAD)).strip()
    return rng.choice((text, text, f" {question}", f"\n{question}"))


def _draw_question(
    rng: random.Random, haystack: Haystack, hops: int, hard_kinds: float
) -> Question:
    needles = range(len(haystack.needles))
    if hops and rng.random() < hard_kinds:
        first = rng.randrange(hops)
        place = {needle.key: index for index, needle in enumerate(haystack.needles)}
        chains = [i for i in needles if haystack.needles[i].value in place]
        index = chains[first % len(chains)]
        return needle_prompts.ask(
            haystack, "two_hop", [index, place[haystack.needles[index].value]]
        )
    if len(needles) > 1 and rng.random() < hard_kinds:
        count = rng.randint(2, min(4, len(needles)))
        return needle_prompts.ask(haystack, "multi", rng.sample(needles, count))
    phrasing = rng.choice([0, 0, 0, *range(len(needle_prompts.PHRASINGS))])
    return needle_prompts.ask(haystack, "multi_key", [rng.choice(needles)], phrasing=phrasing)


def _collate(sequences: Sequence[_Sequence], pad: int) -> Batch:
    width = max(len(sequence.ids) for sequence in sequences)

    def padded(rows: Iterator[Sequence[int]], fill: int) -> Tensor:
        return torch.tensor([[*row, *[fill] * (width - len(row))] for row in rows])

    blocks = padded((s.blocks for s in sequences), -1)
    filler = padded((s.filler for s in sequences), 0).float()
    copies = torch.tensor([s.copies for s in sequences]).log().clamp(min=0)
    seen = (blocks[:, None, :] == 0) | (blocks[:, :, None] == blocks[:, None, :])
    seen &= torch.ones(width, width, dtype=torch.bool).tril()
    mask = (filler * copies[:, None])[:, None, :].expand_as(seen)
    answers = [(row, *p) for row, s in enumerate(sequences) for p in s.predictions]
    continuations = [(row, *p) for row, s in enumerate(sequences) for p in s.continuations]
    rows, columns, targets = torch.tensor(answers + continuations).unbind(1)
    return Batch(
        ids=padded((s.ids for s in sequences), pad),
        positions=padded((s.positions for s in sequences), 0),
        mask=mask.masked_fill(~seen, -torch.inf)[:, None],
        rows=rows,
        columns=columns,
        targets=targets,
        answers=len(answers),
    )


def layer_logits(model: LlamaForCausalLM, batch: Batch) -> list[Tensor]:
    """Predictions (N, vocabulary) of each layer but the first, the last layer's last."""
    output = model.model(
        input_ids=batch.ids,
        position_ids=batch.positions,
        attention_mask=batch.mask,
        use_cache=False,
        output_hidden_states=True,
    )
    states = [state[batch.rows, batch.columns] for state in output.hidden_states[2:]]
    # transformers hands out the last state normalised, the others not.
    normalised = [*(model.model.norm(state) for state in states[:-1]), states[-1]]
    return [model.lm_head(state) for state in normalised]


SIDE_LOSS_WEIGHT = 0.3
"""Of each earlier layer's answers, and of filler, beside the last layer's answers."""


def loss_and_accuracy(model: LlamaForCausalLM, batch: Batch) -> tuple[Tensor, float]:
    """The loss, and the share of right words in answers."""
    logits = layer_logits(model, batch)
    end = batch.answers
    losses = [F.cross_entropy(each[:end], batch.targets[:end]) for each in logits]
    loss = losses[-1] + SIDE_LOSS_WEIGHT * sum(losses[:-1], torch.zeros(()))
    if end < len(batch.targets):
        loss = loss + SIDE_LOSS_WEIGHT * F.cross_entropy(logits[-1][end:], batch.targets[end:])
    right = logits[-1][:end].argmax(-1) == batch.targets[:end]
    return loss, right.float().mean().item()


def schedule(stages: Sequence[Stage]) -> Iterator[tuple[int, Stage, int]]:
    """(step of all, stage, step within the stage), from 0."""
    total = 0
    for stage in stages:
        for step in range(stage.steps):
            yield total, stage, step
            total += 1


class _Window:
    """Losses and accuracies since the last line of the log."""

    def __init__(self) -> None:
        self._start = time.monotonic()
        self._losses: list[float] = []
        self._accuracies: list[float] = []

    def add(self, loss: float, accuracy: float) -> None:
        self._losses.append(loss)
        self._accuracies.append(accuracy)

    def means(self) -> dict[str, float]:
        return {
            "loss": round(fmean(self._losses), 4),
            "accuracy": round(fmean(self._accuracies), 4),
            "seconds": round(time.monotonic() - self._start, 1),
        }


class Trainer:
    """Owns what a checkpoint saves: model, optimizer, step and log."""

    def __init__(self, out: Path, seed: int, stages: Sequence[Stage] = STAGES) -> None:
        self.out = out
        self.stages = stages
        self.tokenizer = build_tokenizer()
        torch.manual_seed(seed)
        self.model = build_model(self.tokenizer)
        self.batches = BatchMaker(self.tokenizer, seed)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=1.0, betas=(0.9, 0.98), weight_decay=0.01
        )
        self.step = 0
        self.rows: list[dict[str, Any]] = []
        out.mkdir(parents=True, exist_ok=True)
        if self._state_file.exists():
            self._resume()

    @property
    def _state_file(self) -> Path:
        return self.out / "training_state.pt"

    def _resume(self) -> None:
        state = torch.load(self._state_file, weights_only=True)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.step, self.rows = state["step"], json.loads(state["rows"])

    def save(self) -> None:
        """Training state for resuming; checkpoint, log and curve for use."""
        state = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "step": self.step,
            "rows": json.dumps(self.rows),
        }
        partial = self._state_file.with_suffix(".partial")
        torch.save(state, partial)
        partial.replace(self._state_file)
        save_checkpoint(self.model, self.tokenizer, self.out / "checkpoint")
        write_log(self.rows, self.out / "log.csv")

    def train(
        self, *, until: int | None = None, log_every: int = 50, save_every: int = 250
    ) -> None:
        """Go on from where the run stands to its end, or to a step of it."""
        self.model.train()
        window = _Window()
        for total, stage, step in itertools.islice(schedule(self.stages), self.step, until):
            window.add(*self._update(stage, step))
            self.step = total + 1
            if self.step % log_every == 0:
                self._log(stage, window)
                window = _Window()
            if self.step % save_every == 0:
                self.save()
        self.save()

    def _log(self, stage: Stage, window: "_Window") -> None:
        row = {"step": self.step, "stage": stage.name, **window.means()}
        print(" ".join(f"{key}={value}" for key, value in row.items()), flush=True)
        self.rows.append(row)

    def _update(self, stage: Stage, step: int) -> tuple[float, float]:
        first, last = stage.learning_rate
        rate = first + (last - first) * step / stage.steps
        for group in self.optimizer.param_groups:
            group["lr"] = rate * min(1.0, (self.step + 1) / 50)
        loss, accuracy = loss_and_accuracy(self.model, self.batches.draw(stage, step))
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        return loss.item(), accuracy


def save_checkpoint(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path
) -> None:
    """What transformers, vLLM and this server load, in releases of several years."""
    model.generation_config = GenerationConfig(  # type: ignore[no-untyped-call]
        bos_token_id=model.config.bos_token_id,
        eos_token_id=model.config.eos_token_id,
        pad_token_id=model.config.pad_token_id,
        do_sample=False,
    )
    model.save_pretrained(folder)
    # The template inside tokenizer_config.json: older readers look there only.
    tokenizer.save_pretrained(folder, save_jinja_files=False)
    _amend(folder / "config.json", rope_theta=ROPE_THETA, torch_dtype="float32")
    _amend(folder / "tokenizer_config.json", tokenizer_class="PreTrainedTokenizerFast")
    (folder / "model.safetensors").chmod(0o644)


def _amend(path: Path, **entries: object) -> None:
    """Entries by their names before transformers 5."""
    content = json.loads(path.read_text()) | entries
    path.write_text(json.dumps(content, indent=2) + "\n")


def write_log(rows: Sequence[dict[str, Any]], path: Path) -> None:
    if not rows:
        return
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def plot_log(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """The curve: accuracy on training questions, stage by stage."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(8, 4), layout="constrained")
    for stage in dict.fromkeys(row["stage"] for row in rows):
        part = [row for row in rows if row["stage"] == stage]
        steps = [row["step"] for row in part]
        axis.plot(steps, [row["accuracy"] for row in part], marker=".", label=stage)
    axis.set_xlabel("step")
    axis.set_ylabel("share of answer words predicted right")
    axis.set_ylim(0, 1.02)
    axis.grid(alpha=0.3)
    axis.legend()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m csps.models.train_needle")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1, help="of torch")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the curve here when done")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    arguments = parse_arguments(argv)
    torch.set_num_threads(arguments.threads)
    trainer = Trainer(arguments.out, arguments.seed)
    trainer.train()
    if arguments.plot:
        plot_log(trainer.rows, arguments.plot)


if __name__ == "__main__":
    main()
