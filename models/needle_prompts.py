"""Prompts with facts hidden in long filler text, and the questions that ask for them.

A haystack is English-like filler with needles between its sentences. A needle is a sentence of one
fixed form, ``The password of Lisbon is falcon.``: *Lisbon* is its key, *falcon* its value. Keys,
values and filler come from three disjoint word lists, so a reader sees at once what is hidden where
and a wrong answer is wrong beyond doubt.

Four kinds of questions (compare NeedleBench and RULER):

============  ==================================================  ==========================
kind          question                                            answer
============  ==================================================  ==========================
``single``    one needle in the text, asked for                   ``falcon``
``multi_key`` many needles of the same form, one asked for        ``falcon``
``multi``     many needles, several asked for                     ``Lisbon is falcon, Oslo is …``
``two_hop``   the value of the asked key is itself a key          ``Oslo is falcon``
============  ==================================================  ==========================

The text is assembled from *words*: a word with the space before it, or a punctuation mark. Each is
exactly one token of the default model's tokenizer, so its length in tokens is known without a
tokenizer. For another tokenizer, pass its count function.

Command: ``python -m csps.models.needle_prompts --length 16384 --needles 4 --kind multi_key``
"""

import argparse
import json
import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

Kind = Literal["single", "multi", "multi_key", "two_hop"]
KINDS: tuple[Kind, ...] = get_args(Kind)

Count = Callable[[str], int]
"""Number of tokens of a text, without special tokens."""


def _listed(words: str) -> list[str]:
    return words.split()


KEYS = _listed("""
Aachen Aarhus Accra Adana Adelaide Aleppo Algiers Almaty Amman Amsterdam Ankara Antwerp Arequipa
Asmara Astana Athens Atlanta Auckland Austin Baghdad Baku Baltimore Bamako Bangalore Bangkok
Barcelona Basel Basra Beijing Beirut Belfast Belgrade Bergen Berlin Bern Bilbao Birmingham Bogota
Bologna Bordeaux Boston Bratislava Bremen Brisbane Bristol Brussels Bucharest Budapest Bukhara
Bursa Cairo Calgary Canberra Caracas Cardiff Casablanca Catania Chengdu Chennai Chicago Cleveland
Cologne Colombo Copenhagen Cordoba Cork Cusco Dakar Dallas Damascus Danang Darwin Delhi Denver
Detroit Dhaka Dijon Doha Dortmund Dresden Dubai Dublin Durban Dushanbe Edinburgh Edmonton Essen
Florence Fortaleza Frankfurt Fukuoka Galway Gdansk Geneva Genoa Ghent Glasgow Gothenburg Granada
Graz Grenoble Guadalajara Haifa Halifax Hamburg Hamilton Hanoi Hanover Harare Havana Helsinki
Hiroshima Hobart Houston Hyderabad Incheon Innsbruck Isfahan Istanbul Izmir Jaipur Jakarta Jeddah
Jerusalem Johannesburg Kabul Kampala Karachi Kathmandu Kazan Khartoum Kiev Kigali Kingston Kinshasa
Kobe Kolkata Krakow Kyoto Lagos Lahore Lausanne Leeds Leipzig Lima Limerick Lisbon Liverpool
Ljubljana London Luanda Lucknow Lusaka Luxembourg Lviv Lyon Madrid Malaga Malmo Managua Manaus
Manchester Manila Maputo Marrakesh Marseille Medellin Melbourne Memphis Mendoza Miami Milan Minsk
Monaco Montreal Moscow Mumbai Munich Muscat Nagoya Nairobi Nantes Naples Nashville Nicosia
Novosibirsk Odessa Oman Oporto Oran Osaka Oslo Ottawa Oxford Palermo Panama Paris Perth
Philadelphia Phoenix Pittsburgh Portland Poznan Prague Pretoria Quebec Quito Rabat Ravenna
Reykjavik Riga Rome Rotterdam Salamanca Salzburg Samarkand Santiago Santos Sapporo Sarajevo Seattle
Seoul Seville Shanghai Shenzhen Sheffield Shiraz Singapore Skopje Sofia Stockholm Strasbourg
Stuttgart Surabaya Sydney Tabriz Taipei Tallinn Tampere Tashkent Tbilisi Tehran Tirana Tokyo Toledo
Toronto Toulouse Trieste Tripoli Tromso Tunis Turin Uppsala Utrecht Valencia Valletta Vancouver
Venice Verona Vienna Vilnius Warsaw Wellington Windhoek Winnipeg Wroclaw Wuhan Yangon Yerevan
Yokohama Zagreb Zanzibar Zurich
""")

VALUES = _listed("""
acorn agate alder almond alpaca amber anchor anvil apricot arrow aspen aster badger bagel bamboo
banjo barley basil beaver beetle beryl birch bison bobcat bramble brass bronze buffalo bugle cactus
camel canary candle canoe caramel cashew cedar cello cherry chestnut chisel cicada cinder cinnamon
citron clarinet clover cobalt cobra coconut comet compass copper coral cougar coyote cricket
crimson crocus crystal cumin cypress daffodil dagger dahlia daisy damson diamond dingo dolphin
donkey dragon drum eagle ebony egret elm ember emerald ermine falcon fennel fern ferret fiddle fig
finch flamingo flint flute fossil foxglove garlic garnet gazelle gecko gibbon ginger giraffe goblet
gopher granite grouse guava guitar gypsum hammer hamster harp hawk hazel hedgehog helmet hemlock
heron hickory holly hornet hyena ibex ibis indigo iris ivory ivy jackal jade jaguar jasmine jasper
juniper kayak kestrel kettle kiwi koala ladle lantern larch lark lava lavender lemon leopard
lettuce lilac lily lime linden lizard llama lobster locket lotus lynx magnet magnolia magpie
mahogany mallet mango maple marble marten mastiff meerkat melon mercury mink mitten mole mongoose
moose mosaic moss mulberry muskrat mustard myrtle narwhal nectar needle nettle nickel nutmeg oboe
ocelot octopus olive onyx opal orchid oregano osprey ostrich otter oyster panda panther papaya
paprika parrot parsnip peach peacock peanut pearl pebble pelican penguin peony pepper pewter
pheasant piano pigeon pistachio platinum plum poplar poppy porcupine puffin puma pumpkin quail
quartz quince rabbit raccoon radish raven rhubarb robin ruby saddle saffron sage salmon sapphire
sardine scarab scarlet sequoia sesame shark silver sparrow spruce squid starling stork sultan sumac
swan tarragon teal thimble thistle thyme tiger timber topaz tortoise toucan trumpet tulip tundra
turnip turquoise turtle umber vanilla velvet violet viper vulture walnut walrus wasp weasel willow
wombat yak yarrow zebra zinc zinnia
""")

NOUNS = _listed("""
actor apple aunt baker barn basket bell bench bird boat book bottle bowl boy bread bridge brother
bucket builder bus cabin captain car carpet cart castle cat chair chapel child city clerk cloak
clock cloth coat cook corner cottage cousin crowd cup dancer daughter desk doctor dog door dress
driver engine farm farmer father fence field fire fisher floor flower forest friend garden gate
girl glass grandmother guard guest hall harbor hat hill horse hotel house hunter island judge key
king kitchen ladder lady lake lamp lawyer letter library mailman map market master meadow merchant
mill miller mirror mother mountain museum neighbor net nurse office orchard page painter palace
paper park path pen picture pilot pipe plate player poet pond porter pot priest prince queen
railway ribbon river road roof room rope sailor school sea servant shepherd ship shirt shoe shop
singer sister soldier son spoon stable stair station stone store story stranger street student
table tailor teacher tent theater tower town trader train traveler tree truck uncle valley village
visitor wagon wall watch well wheel widow wife window winter woman wood worker writer yard
""")

VERBS = _listed("""
admired answered asked avoided believed borrowed bought brought built called carried caught chose
cleaned closed counted covered crossed described drew dropped entered examined feared filled
finished fixed followed forgot found gathered greeted guarded heard helped hid hired invited joined
kept knew left liked lifted lost loved made met missed moved needed noticed opened ordered packed
painted passed praised promised pulled pushed reached remembered repaired returned saved saw sent
served showed sold studied thanked touched trusted understood visited wanted warned washed watched
welcomed wrapped
""")

ADJECTIVES = _listed("""
angry ancient big bitter black blue brave bright broken brown busy calm careful cheap clean clever
cold cool dark dear deep dirty dry dull early empty fair famous fast fine fresh friendly full
gentle gray great green happy hard heavy high honest hot huge hungry kind large late lazy light
little lonely long loud lucky narrow new noisy old open pale patient plain pleasant polite poor
pretty proud quick quiet rare ready red rich rough round sad safe sharp short shy silent simple
slow small smooth soft strange strong sweet tall thick thin tiny tired warm weak wet white wide
wild wise wooden yellow young
""")

PREPOSITIONS = _listed("""
above across against along around before behind below beside beyond inside near opposite outside
past through toward under without
""")

ADVERBS = _listed("""
again almost always carefully easily finally gladly happily hardly often quickly quietly rarely
sadly safely seldom slowly soon suddenly twice
""")

TIMES = _listed("Later Yesterday Meanwhile Afterwards Today Sometimes Eventually Once")

_TEMPLATES = (
    "The A N V the N .",
    "The N R V the A N P the N .",
    "The A N P the N V the N .",
    "T the N V the A N .",
    "T , the A N R V the N .",
    "The N and the A N V the N P the N .",
    "The N V the N because the A N V the N .",
    "In the A N , the N V the N .",
    "Every N P the A N V a A N .",
    "The N V the N , but the N V the A N .",
    "When the N V the N , the A N R V it .",
    "The N was A , and the N was A .",
)
"""Filler sentences. A: adjective, N: noun, V: verb, P: preposition, R: adverb, T: time."""

_SLOTS = {
    "A": ADJECTIVES,
    "N": NOUNS,
    "V": VERBS,
    "P": PREPOSITIONS,
    "R": ADVERBS,
    "T": TIMES,
}

SENTENCE_STARTS = ("The", "In", "Every", "When", *TIMES)
"""The only words that ever stand at the start of a line."""

STRUCTURE_WORDS = _listed("""
the and because a but it was password passwords of is are What Tell me Which word Please say now
Question Answer
""")

PHRASINGS = (
    "What is the password of {key}?",
    "Tell me the password of {key}.",
    "Which word is the password of {key}?",
    "Please say the password of {key} now.",
)
"""Ways to ask for one needle. Measurements use the first; training mixes them."""

_PARAGRAPH_PROBABILITY = 1 / 8
_SHORTEST_SENTENCE = 4
_WORD = re.compile(r" ?[A-Za-z]+|[^A-Za-z]")

QUESTION_HEAD = ("\n", "Question", ":")
ANSWER_HEAD = ("\n", "Answer", ":")

_KEYS_ASKED_TOGETHER = 3


@dataclass(frozen=True, kw_only=True)
class NeedleConfig:
    """One prompt, reproducible from its fields."""

    length: int = 1024
    """Tokens of the whole prompt, question included, without special tokens."""
    kind: Kind = "multi_key"
    needles: int = 4
    """Needles in the haystack: those asked for and the distractors. ``single`` has just one."""
    depth: float | None = None
    """Where the (first) needle asked for lies: 0 is the start of the text, 1 its end. None: random.
    All other needles lie at random depths."""
    seed: int = 0

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"kind must be one of {', '.join(KINDS)}, not {self.kind!r}")
        if self.depth is not None and not 0.0 <= self.depth <= 1.0:
            raise ValueError(f"depth must lie between 0 and 1, not {self.depth}")
        if not 1 <= self.needles <= min(len(KEYS), len(VALUES)):
            raise ValueError(f"needles must be between 1 and {len(VALUES)}, not {self.needles}")
        if self.kind in ("multi", "two_hop") and self.needles < 2:
            raise ValueError(f"a {self.kind} question needs at least two needles")


@dataclass(frozen=True, kw_only=True)
class Needle:
    """A fact and where it lies in its haystack."""

    key: str
    value: str
    depth: float
    """Tokens before the sentence / tokens of the haystack."""
    chars: tuple[int, int]
    """The sentence is ``text[start:end]``, the space before it included."""
    words: tuple[int, int]
    """The sentence is ``words[start:end]``: token positions in the default model's tokenizer,
    not counting a beginning-of-text token."""


@dataclass(frozen=True, kw_only=True)
class Haystack:
    """Filler with needles; ``"".join(words)`` is the text."""

    words: tuple[str, ...]
    needles: tuple[Needle, ...]
    """In the order in which the facts were given."""
    tokens: int
    """Length by the count function in use."""

    @property
    def text(self) -> str:
        return "".join(self.words)


@dataclass(frozen=True, kw_only=True)
class Question:
    """A question about a haystack, to be put right behind it."""

    kind: Kind
    text: str
    """Question alone: a chat user's last line."""
    answer: str
    needles: tuple[int, ...]
    """Indices into the haystack's needles of all those that the answer needs."""

    @property
    def completion_text(self) -> str:
        """Question and the cue that makes a completion model answer."""
        return self.text + "".join(ANSWER_HEAD)


@dataclass(frozen=True, kw_only=True)
class NeedlePrompt:
    """A haystack with one question: what is sent to a model, and what it should answer."""

    config: NeedleConfig
    haystack: Haystack
    question: Question
    tokens: int
    """Length of ``text`` by the count function in use, without special tokens."""

    @property
    def text(self) -> str:
        """For /v1/completions."""
        return self.haystack.text + self.question.completion_text

    @property
    def chat_text(self) -> str:
        """For the content of a user message in /v1/chat/completions."""
        return self.haystack.text + self.question.text

    @property
    def answer(self) -> str:
        return self.question.answer

    @property
    def asked(self) -> tuple[Needle, ...]:
        """The needles that the answer needs, in the order of the answer."""
        return tuple(self.haystack.needles[i] for i in self.question.needles)


@dataclass(frozen=True, kw_only=True)
class _Fact:
    key: str
    value: str
    depth: float


def split_words(text: str) -> list[str]:
    """Cut a generated text into its words; every other text into pieces that join to it."""
    return _WORD.findall(text)


def count_words(text: str) -> int:
    """Tokens of a generated text in the default model's tokenizer."""
    return len(split_words(text))


def vocabulary() -> list[str]:
    """All words of generated text as they occur in it, with the space before them."""
    inner = [*STRUCTURE_WORDS, *KEYS, *VALUES, *SENTENCE_STARTS]
    inner += [word for words in _SLOTS.values() for word in words]
    line_starts = [*SENTENCE_STARTS, "Question", "Answer"]
    return list(dict.fromkeys([f" {word}" for word in inner] + line_starts))


def is_correct(answer: str, reply: str) -> bool:
    """Whether a reply is the answer: the same words, whatever the spacing around them."""
    return split_words(answer.strip()) == split_words(reply.strip())


def needle_words(key: str, value: str) -> list[str]:
    return [" The", " password", " of", f" {key}", " is", f" {value}", "."]


def filler_sentence(rng: random.Random, *, paragraphs: bool = True) -> list[str]:
    """One random sentence; now and then it starts a new paragraph if it may."""
    words: list[str] = []
    for item in rng.choice(_TEMPLATES).split():
        word = rng.choice(_SLOTS[item]) if item in _SLOTS else item
        words.append(word if word in ".," else f" {word}")
    if paragraphs and rng.random() < _PARAGRAPH_PROBABILITY:
        words[0:1] = ["\n", words[0].lstrip()]
    return words


def _padding_sentence(rng: random.Random, length: int) -> list[str]:
    """A sentence of exactly ``length`` words: ``The small old … pilot returned .``"""
    adjectives = [f" {rng.choice(ADJECTIVES)}" for _ in range(length - _SHORTEST_SENTENCE)]
    verb = rng.choice(("answered", "moved", "remembered", "returned", "studied", "understood"))
    return [" The", *adjectives, f" {rng.choice(NOUNS)}", f" {verb}", "."]


def _filler(rng: random.Random, tokens: int, count: Count | None) -> list[list[str]]:
    """Sentences with ``tokens`` tokens in total: exactly so when words are tokens."""
    sentences: list[list[str]] = []
    left = tokens
    while left >= _SHORTEST_SENTENCE:
        sentence = filler_sentence(rng, paragraphs=bool(sentences))
        size = len(sentence) if count is None else count("".join(sentence))
        if left - size < _SHORTEST_SENTENCE and left != size:
            if count is None:
                sentences.append(_padding_sentence(rng, left))
            break
        sentences.append(sentence)
        left -= size
    return sentences


def _weave(filler: list[list[str]], facts: Sequence[_Fact]) -> tuple[list[str], list[Needle]]:
    """Put each fact before the first filler sentence at or beyond its depth."""
    total = sum(map(len, filler))
    waiting = sorted(facts, key=lambda fact: fact.depth)
    words: list[str] = []
    starts: dict[str, int] = {}
    seen = 0
    for sentence in [*filler, []]:
        while waiting and (seen >= waiting[0].depth * total or not sentence):
            fact = waiting.pop(0)
            starts[fact.key] = len(words)
            words += needle_words(fact.key, fact.value)
        words += sentence
        seen += len(sentence)
    # The text starts at the margin.
    words[0] = words[0].lstrip(" ")
    return words, [_locate(fact, starts[fact.key], words) for fact in facts]


def _locate(fact: _Fact, start: int, words: list[str]) -> Needle:
    end = start + len(needle_words(fact.key, fact.value))
    char = sum(map(len, words[:start]))
    return Needle(
        key=fact.key,
        value=fact.value,
        depth=start / len(words),
        chars=(char, char + sum(map(len, words[start:end]))),
        words=(start, end),
    )


def build_haystack(
    rng: random.Random,
    tokens: int,
    facts: Sequence[tuple[str, str, float]],
    count: Count | None = None,
) -> Haystack:
    """Hide ``(key, value, depth)`` facts in filler, ``tokens`` tokens in all.

    With a count function, in as many as its counts of the sentences add up to, and at most one
    sentence fewer.
    """
    needles = [_Fact(key=key, value=value, depth=depth) for key, value, depth in facts]
    size = count or count_words
    hidden = sum(size("".join(needle_words(fact.key, fact.value))) for fact in needles)
    room = tokens - hidden
    if room < _SHORTEST_SENTENCE:
        raise ValueError(f"{len(needles)} needles do not fit into {tokens} tokens")
    words, located = _weave(_filler(rng, room, count), needles)
    text_tokens = len(words) if count is None else count("".join(words))
    return Haystack(words=tuple(words), needles=tuple(located), tokens=text_tokens)


def ask(haystack: Haystack, kind: Kind, needles: Sequence[int], *, phrasing: int = 0) -> Question:
    """Ask for needles by their indices: the keys asked for, or the two hops in order."""
    chosen = [haystack.needles[index] for index in needles]
    first = chosen[0]
    if kind == "two_hop":
        if len(chosen) != 2 or first.value != chosen[1].key:
            raise ValueError("two hops need two needles, the second keyed by the first's value")
        text = f"What is the password of the password of {first.key}?"
        answer = f"{chosen[1].key} is {chosen[1].value}"
    elif kind == "multi":
        keys = [needle.key for needle in chosen]
        text = f"What are the passwords of {', '.join(keys[:-1])} and {keys[-1]}?"
        answer = ", ".join(f"{needle.key} is {needle.value}" for needle in chosen)
    else:
        text = PHRASINGS[phrasing].format(key=first.key)
        answer = first.value
    head = "".join(QUESTION_HEAD)
    return Question(kind=kind, text=f"{head} {text}", answer=answer, needles=tuple(needles))


def draw_facts(
    rng: random.Random, needles: int, *, depths: Sequence[float] = (), hops: int = 0
) -> list[tuple[str, str, float]]:
    """Distinct keys with distinct values; the first ``hops`` facts lead to the ``hops`` next ones.

    The first facts lie at the given depths, all others anywhere.
    """
    keys = rng.sample(KEYS, needles)
    values = rng.sample(VALUES, needles)
    values[:hops] = keys[hops : 2 * hops]
    places = [*depths, *(rng.random() for _ in keys[len(depths) :])]
    return list(zip(keys, values, places, strict=True))


def generate(config: NeedleConfig, count: Count | None = None) -> NeedlePrompt:
    """The prompt that a config describes; never longer than asked for."""
    aim = config.length
    while True:
        prompt = _draw(config, aim, count)
        if prompt.tokens <= config.length:
            return prompt
        # A tokenizer may count more for a text than for its sentences.
        aim -= prompt.tokens - config.length


def _draw(config: NeedleConfig, length: int, count: Count | None) -> NeedlePrompt:
    rng = random.Random(repr(config))
    needles = 1 if config.kind == "single" else config.needles
    hops = int(config.kind == "two_hop")
    depths = [] if config.depth is None else [config.depth]
    facts = draw_facts(rng, needles, depths=depths, hops=hops)
    asked = {"single": 1, "multi_key": 1, "multi": min(needles, _KEYS_ASKED_TOGETHER), "two_hop": 2}
    indices = range(asked[config.kind])
    size = count or count_words
    tail = ask(_bare(facts), config.kind, indices).completion_text
    haystack = build_haystack(rng, length - size(tail), facts, count)
    question = ask(haystack, config.kind, indices)
    return NeedlePrompt(
        config=config,
        haystack=haystack,
        question=question,
        tokens=size(haystack.text + question.completion_text),
    )


def _bare(facts: Sequence[tuple[str, str, float]]) -> Haystack:
    """A haystack of needles only: enough to phrase a question, and to know its length."""
    needles = [
        Needle(key=key, value=value, depth=depth, chars=(0, 0), words=(0, 0))
        for key, value, depth in facts
    ]
    return Haystack(words=(), needles=tuple(needles), tokens=0)


def grid(
    base: NeedleConfig, *, lengths: Sequence[int], depths: int, repeats: int
) -> Iterator[NeedleConfig]:
    """Depth x length grid: every length at ``depths`` evenly spread depths, ``repeats`` times each.

    Seeds count up from the base's, so no two cells share a text.
    """
    seed = base.seed
    for length in lengths:
        for step in range(depths):
            for _ in range(repeats):
                depth = (step + 0.5) / depths
                yield replace(base, length=length, depth=depth, seed=seed)
                seed += 1


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m csps.models.needle_prompts",
        description="Print a prompt with facts hidden in filler text, and its answer.",
    )
    parser.add_argument("--length", type=int, default=1024, help="tokens of the prompt")
    parser.add_argument("--kind", choices=KINDS, default="multi_key")
    parser.add_argument("--needles", type=int, default=4, help="facts, distractors included")
    parser.add_argument(
        "--depth", type=float, help="of the fact asked for, 0 to 1; default: random"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="as JSON, with the positions")
    return parser.parse_args(argv)


def describe(prompt: NeedlePrompt) -> dict[str, object]:
    """A JSON-ready description with the positions of the needles asked for."""
    return {
        "prompt": prompt.text,
        "answer": prompt.answer,
        "tokens": prompt.tokens,
        "needles": [
            {
                "key": needle.key,
                "value": needle.value,
                "depth": round(needle.depth, 4),
                "chars": needle.chars,
                "tokens": needle.words,
            }
            for needle in prompt.asked
        ],
    }


def main(argv: Sequence[str] | None = None) -> None:
    arguments = parse_arguments(argv)
    prompt = generate(
        NeedleConfig(
            length=arguments.length,
            kind=arguments.kind,
            needles=arguments.needles,
            depth=arguments.depth,
            seed=arguments.seed,
        )
    )
    if arguments.json:
        print(json.dumps(describe(prompt)))
    else:
        print(prompt.text)
        print(f"\n[{prompt.tokens} tokens; expected answer: {prompt.answer}]")


if __name__ == "__main__":
    main()
