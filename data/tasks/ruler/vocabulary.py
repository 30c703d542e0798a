"""The words of RULER's keys and lists: our own by default, or those of the wonderwords package, as RULER has them."""

from __future__ import annotations

import random
from functools import lru_cache
from importlib import resources
from itertools import product
from typing import NamedTuple

SOURCES = ("own", "wonderwords")


def _split(text: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(text.split()))


_ADJECTIVES = _split(
    "able agile amber ample ancient angry arctic autumn awake bare basic big bitter blank bleak blind blond blunt bold "
    "brave brief brisk broad broken calm careful cheap chilly civil clean clear clever close cloudy coarse cold common "
    "cool coral costly cosy cruel curly damp daring dark dear deep dense dim distant double dry dull dusty eager early "
    "easy elder empty equal even exact faint fair famous fancy fast feeble fertile fierce final fine firm flat fluid "
    "fond formal fragile frank free fresh frosty frozen full funny fuzzy gentle giant glad golden good grand grateful "
    "gray great greedy green grim handy happy hard harsh hasty heavy hidden high hollow honest huge humble hungry icy "
    "idle inner ivory jolly just keen kind large last lazy lean light little lively local lone long loose loud low "
    "loyal lucky lunar major marble meek mellow merry mild minor misty modern modest moist narrow native neat nimble "
    "noble noisy novel odd old open orderly outer oval pale patient plain pleasant polite poor precious pretty proud "
    "pure quick quiet rapid rare raw ready recent regal remote rich rigid ripe robust rocky rough round royal rural "
    "rustic sacred safe salty sandy secret sharp shiny short shy silent silly simple sleek slim slow small smart "
    "smooth snowy sober soft solar solemn solid sour spare spicy stable stark steady steep stern still stormy strict "
    "strong subtle sunny sweet swift tall tame tan tart tender tense thick thin tidy timid tiny tired tough tragic "
    "urban useful vague valid vast vivid warm wary weak wealthy weary wet wide wild windy wise witty wooden young"
)
_NOUNS = _split(
    "acorn actor album alley anchor angle ankle apple apron arch arena armor arrow artist atlas attic author badge "
    "bakery balcony banana banjo banner barn barrel basin basket beach beacon bean bear bell bench berry bicycle "
    "blanket blossom boat bonnet book boot border bottle bowl box branch bread breeze brick bridge broom brush bucket "
    "bugle bundle butter button cabin cable cactus camel camera candle canoe canvas canyon captain caravan carpet "
    "carrot castle cave cellar chair chalk cherry chimney chord cider circle clay cliff clock cloth cloud clover coal "
    "coast coin collar comet compass copper corner cotton couch cousin cradle crane crater cricket crown crystal cup "
    "curtain cushion dancer dawn desert desk diamond dinner doctor dolphin donkey door dragon drawer dream drum eagle "
    "easel editor elbow engine envelope fable fabric falcon farmer feast feather fence fern ferry fiddle field finger "
    "flag flame flannel flour flute forest fork fossil fountain fox frame garden garlic gate ghost ginger glacier "
    "glass globe glove goat grain granite grape gravel guitar hammer hammock harbor harp harvest hat hawk hedge helmet "
    "herb heron hill honey hook horizon horn horse hotel island ivy jacket jar jewel journal judge jungle kernel "
    "kettle kitchen kite knight ladder lagoon lake lamp lantern lawn leaf lemon letter library lily linen lion lobster "
    "locket loom magnet mallet map maple market meadow melon mirror mitten monkey moon mosaic moss motor mountain "
    "museum napkin needle nephew nest nickel notebook oak oar ocean office onion orchard organ otter oven owl oyster "
    "paddle palace panda paper parade parrot pastry path peach pearl pebble pencil pepper piano pigeon pillow pilot "
    "pine pirate planet plate plum pocket poem pond pony potato powder prairie puddle pumpkin puppet quarry quilt "
    "rabbit radish raft rain ranch ribbon rider river road robin rocket roof rope rose ruler saddle sail salmon sand "
    "sandal scarf school seed shelf shell shepherd ship shoe shore shovel signal silk singer skate sled slope snail "
    "soap soldier soup spade sparrow spider spiral sponge spoon spring spruce stable stair star statue steam stone "
    "stove stream sugar suit summit sunset swan table tailor teacup temple tent theater thimble thread throne ticket "
    "tiger timber toast tower train tray treasure trumpet tulip tunnel turtle umbrella uncle valley vase velvet "
    "village vine violin visitor voyage wagon walnut watch water wave wheat wheel whistle willow window winter wolf "
    "wool writer yard zebra"
)
_SYLLABLES = ["".join(pair) for pair in product("bdfgklmnprstvz", "aeiou")]


class Vocabulary(NamedTuple):
    """Parts of keys (`calm-river`), and words that stand alone."""

    adjectives: tuple[str, ...]
    nouns: tuple[str, ...]
    words: tuple[str, ...]

    def key(self, rng: random.Random) -> str:
        """Return an adjective and a noun joined by a hyphen."""
        return f"{rng.choice(self.adjectives)}-{rng.choice(self.nouns)}"

    def distinct(self, rng: random.Random, count: int) -> list[str]:
        """Return that many different words; invented ones of four syllables if there are not enough real ones.

        RULER turns to a longer list of English words in that case; 24 million words can be invented.
        """
        if count <= len(self.words):
            return rng.sample(self.words, count)
        # Numbers written in base 70 are all different words.
        size = len(_SYLLABLES)
        return [
            "".join(_SYLLABLES[number // size**place % size] for place in range(4))
            for number in rng.sample(range(size**4), count)
        ]


def word_source(source: str) -> str:
    """Return where words come from, for results.json."""
    return "words of our own, not those of wonderwords" if source == "own" else f"words of {source}"


@lru_cache
def vocabulary(source: str) -> Vocabulary:
    """Return the words of a source: "own" or "wonderwords".

    Raises:
        ValueError: If there is no such source, or the package is not installed.
    """
    if source == "own":
        words = sorted({*_ADJECTIVES, *_NOUNS})
        return Vocabulary(_ADJECTIVES, _NOUNS, tuple(words))
    if source != "wonderwords":
        raise ValueError(f'words="{source}" is not a source of words; choose one of {", ".join(SOURCES)}')
    try:
        folder = resources.files("wonderwords") / "assets"
    except ModuleNotFoundError:
        raise ValueError(
            'words="wonderwords" needs the package of that name; install it with `pip install wonderwords`, '
            'or use words="own"'
        ) from None
    adjectives, nouns, verbs = (
        (folder / f"{kind}list.txt").read_text(encoding="utf-8").split("\n") for kind in ("adjective", "noun", "verb")
    )
    lists = [tuple(sorted({word.strip() for word in found} - {""})) for found in (adjectives, nouns, verbs)]
    return Vocabulary(lists[0], lists[1], tuple(sorted({word for found in lists for word in found})))
