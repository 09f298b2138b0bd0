"""List all words of generated text, and split a text into them.

Keys, values and filler have disjoint lists, so a reader sees at once what is hidden where, and a
wrong answer is wrong beyond doubt. A *word* is a word with the space before it, or a punctuation
mark. Each is exactly one token of the default model's tokenizer, so a text's length in tokens is
known without a tokenizer. For another tokenizer, pass its count function.
"""

from __future__ import annotations

import re
from collections.abc import Callable

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

WORD_CLASSES = {
    "A": ADJECTIVES,
    "N": NOUNS,
    "V": VERBS,
    "P": PREPOSITIONS,
    "R": ADVERBS,
    "T": TIMES,
}
"""Word classes of filler, by their symbol in a template."""

SENTENCE_STARTS = ("The", "In", "Every", "When", *TIMES)
"""The only words that ever stand at the start of a line."""

STRUCTURE_WORDS = _listed("""
the and because a but it was password passwords of is are What Tell me Which word Please say now
Question Answer
""")

_WORD = re.compile(r" ?[A-Za-z]+|[^A-Za-z]")


def split_words(text: str) -> list[str]:
    """Split a generated text into its words, and every other text into pieces that join to it."""
    return _WORD.findall(text)


def count_words(text: str) -> int:
    """Count the tokens of a generated text in the default model's tokenizer."""
    return len(split_words(text))


def vocabulary() -> list[str]:
    """Return all words of generated text with the space before them.

    Their order is that of the default model's token ids.
    """
    inner = [*STRUCTURE_WORDS, *KEYS, *VALUES, *SENTENCE_STARTS]
    inner += [word for words in WORD_CLASSES.values() for word in words]
    line_starts = [*SENTENCE_STARTS, "Question", "Answer"]
    return list(dict.fromkeys([f" {word}" for word in inner] + line_starts))
