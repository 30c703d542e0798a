"""The words of generated texts: what facts are about, and what stands around them."""


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


# Names of facts ("The number of Oslo is ..."): one token each, so that facts differ in exactly one token.
NAMES = _words(
    "Oslo Rome Paris Cairo Lima Quito Delhi Tokyo Seoul Hanoi Accra Tunis Dakar Lagos Miami Boston Dallas Denver "
    "Madrid London Dublin Berlin Vienna Prague Warsaw Athens Sofia Riga Minsk Kiev Baku Doha Dubai Manila Perth "
    "Sydney Havana Bogota Ottawa Lisbon Geneva Zurich Milan Turin Naples Genoa Venice Malta Tehran Amman Beirut Kabul "
    "Lahore Mumbai Dhaka Osaka Kyoto Taipei Jakarta Nairobi Kigali Luanda Harare Maputo Rabat Tripoli Khartoum Dodoma "
    "Caracas Panama Managua Santiago Brasilia Asuncion Phoenix Houston Chicago Seattle Toronto Oxford Bristol Glasgow "
    "Dresden Munich"
)
# Variables of assignment chains ("VAR ALPHA = 48213."), one token each.
VARIABLES = _words(
    "ALPHA BRAVO CHARLIE DELTA ECHO FOXTROT GOLF HOTEL INDIA JULIET KILO LIMA MIKE NOVEMBER OSCAR PAPA QUEBEC ROMEO "
    "SIERRA TANGO UNIFORM VICTOR WHISKEY XRAY YANKEE ZULU BETA GAMMA EPSILON ZETA THETA IOTA KAPPA LAMBDA OMEGA SIGMA "
    "TAU PHI CHI PSI"
)
COLORS = _words(
    "red green blue white black yellow orange purple pink brown gray cyan magenta violet indigo teal maroon navy olive "
    "gold silver beige turquoise"
)
NOUNS = _words(
    "house door garden river road bridge tower market ship train wagon horse dog cat bird fish tree stone lamp table "
    "chair window letter book map clock box bag coat boat farm field forest hill valley island harbor castle church "
    "school shop kitchen cellar wall gate"
)
ADJECTIVES = _words(
    "red green blue white black yellow old new small large long short warm cold dark bright quiet heavy empty narrow "
    "wide high low round"
)
VERBS = _words("stands waits rests moves turns falls opens closes shines sleeps grows stays")
PLACES = _words("behind near under over beside above below before between across")
TIMES = _words("today now always often again later then soon")
