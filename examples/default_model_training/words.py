"""The word lists of the corpus: parts of invented names, well-known names, and closed vocabularies."""

from __future__ import annotations


def split(text: str) -> list[str]:
    return text.split()


ONSETS = split(
    """
    b c d f g h j k l m n p r s t v w z br ch cl cr dr fl gr kl kr pl pr qu sh sk sl sn st str th tr tw
    vr x y
    """
)
VOWELS = split("a e i o u a e i o u ai au ea ee ei ia ie io oo ou y")
CODAS = [""] * 5 + split("n r s l m t k d nd rt ss ck x sh th ng lm rk st z ff")
ENDINGS = [""] * 4 + split("son er ez ova sen ini ski ton ville burg ford land mann ley field stad")
FIRST = split(
    """
    Alice Bob Carol David Emma Frank Grace Henry Iris Jack Karen Leo Maria Nina Oscar Paula Quentin Rosa
    Sam Tina Uma Victor Wendy Xavier Yara Zoe Anna John Mary James Linda Robert Susan Michael Sarah
    Thomas Laura Peter Julia Ahmed Fatima Chen Wei Yuki Hiroshi Priya Arjun Olga Ivan Lucia Pedro Ingrid
    Lars Amara Kofi Elena Marco Sofia Hugo Chloe Lucas Mia Noah Olivia Ethan Ava Liam Ella Ben Kate Tom
    Jane Mark Lucy Paul Ruth Max Eva
    """
)
LAST = split(
    """
    Smith Jones Brown Taylor Wilson Evans Walker White Green Hall Wood Clark Lewis Young King Scott
    Adams Baker Hill Garcia Martinez Lopez Silva Costa Rossi Bianchi Muller Schmidt Weber Fischer Meyer
    Dubois Martin Bernard Novak Kowalski Ivanov Petrov Tanaka Sato Suzuki Wang Li Zhang Kim Park Singh
    Patel Kumar Khan Ali Hansen Nielsen Berg
    """
)
CITIES = split(
    """
    Paris London Berlin Madrid Rome Vienna Prague Lisbon Dublin Oslo Helsinki Warsaw Athens Zurich
    Munich Hamburg Boston Chicago Denver Seattle Austin Dallas Toronto Montreal Tokyo Osaka Seoul
    Beijing Shanghai Delhi Mumbai Sydney Melbourne Auckland Cairo Lagos Nairobi Lima Bogota Santiago
    Amsterdam Brussels Geneva Lyon Porto Krakow
    """
)
COUNTRIES = split(
    """
    France Germany Spain Italy Austria Portugal Ireland Norway Finland Poland Greece Canada Japan China
    India Brazil Mexico Egypt Kenya Peru Chile Sweden Denmark Belgium Switzerland Australia Iceland
    Turkey Vietnam Morocco
    """
)
JOBS = split(
    """
    engineer doctor teacher nurse lawyer baker pilot chef painter writer designer plumber farmer driver
    actor scientist carpenter dentist accountant architect journalist librarian mechanic musician
    photographer student developer manager electrician gardener
    """
)
HOBBIES = split(
    """
    chess tennis hiking cooking reading painting swimming running cycling football gardening photography
    sailing knitting skiing dancing climbing fishing yoga guitar piano singing travel baking surfing
    """
)
LANGUAGES = split(
    """
    English French German Spanish Italian Dutch Polish Russian Chinese Japanese Arabic Hindi Greek
    """
)
THINGS = split(
    """
    lamp chair table desk keyboard mouse monitor phone laptop tablet camera bottle backpack jacket shirt
    shoes watch bicycle helmet tent kettle toaster blender knife pan cup mug plate sofa pillow blanket
    notebook pen pencil bag drill hammer speaker printer charger cable umbrella guitar book clock mirror
    carpet
    """
)
ADJECTIVES = split(
    """
    small large wooden steel leather cotton smart portable electric classic modern folding digital
    """
)
COLORS = split("red blue green black white yellow orange purple grey brown silver gold pink")
CATEGORIES = split("furniture electronics clothing kitchen sports office garden toys books tools")
TAGS = split(
    """
    new sale eco premium light outdoor indoor handmade gift limited popular compact waterproof wireless
    """
)
EVENTS = split(
    """
    conference concert workshop meetup festival seminar wedding lecture exhibition tournament fair party
    """
)
TOPICS = split(
    """
    jazz music science robotics poetry film history food design climate energy health art space data
    """
)
VENUES = split("Hall Center Park Arena Theatre Library Museum Hotel Stadium School")
SUFFIXES = split("Ltd Inc Labs Group Systems Foods Motors Books Studio Partners")
MONTHS = split(
    """
    January February March April May June July August September October November December
    """
)
NOUNS = split(
    """
    river window engine garden bridge letter market planet forest island mirror button ticket signal
    pocket branch ladder basket candle harbor meadow copper velvet marble thunder sugar pepper tunnel
    rocket violin
    """
)
KEYS = split(
    """
    name title id type kind value count items days steps list film stars host up lat lon priority level user role
    description text message note notes author year month score result answer reason size length width height tags
    ingredients street zip code state url file path status error data options features summary language
    """
)
SMALL = split("a the of in and for to with on at is my not no all very")
GOOD = split(
    """
    great good wonderful excellent amazing nice lovely perfect fantastic happy love like best
    """
)
BAD = split(
    """
    bad terrible awful horrible poor ugly broken sad hate worst boring slow disappointing
    """
)
ACCENTED = "éèüöäñçåøšžłąâîőğ"
SCRIPTS = ("абвгдежзиклмнопрстуфхя", "αβγδεζηθικλμνοπρστω", "東京山田中村木林小川大野高", "가나다라마바사김이박최정")
