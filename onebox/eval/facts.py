"""Questions with one short answer: facts in English; accents and capitals in Hungarian and Turkish.

Written for this project. The answers are undisputed and short; if two spellings are right, both are listed.
"""

from onebox.eval.question import Check, Question, Truth, TruthKind, one_turn

__all__ = ["fact_questions", "language_questions"]

# question | right answers, separated by slashes
_FACTS = """\
What is the capital of Hungary?|Budapest
What is the capital of Turkey?|Ankara
What is the capital of Finland?|Helsinki
What is the capital of Canada?|Ottawa
What is the capital of Egypt?|Cairo
What is the capital of Japan?|Tokyo
What is the capital of Portugal?|Lisbon
What is the capital of Romania?|Bucharest
What is the capital of Australia?|Canberra
What is the capital of Brazil?|Brasilia/Brasília
Which planet is the largest of the solar system?|Jupiter
Which planet is the closest to the sun?|Mercury
Which chemical element has the symbol Fe?|iron
Which chemical element has the symbol Au?|gold
Which chemical element has the atomic number 1?|hydrogen
How many sides does a hexagon have?|6/six
How many minutes are there in two hours?|120
How many bits are in a byte?|8/eight
What is 17 + 25?|42
What is 9 * 8?|72
What is 144 / 16?|9/nine
What is 1000 - 357?|643
What is the square root of 81?|9/nine
Who wrote the play Romeo and Juliet?|Shakespeare
Who painted the Mona Lisa?|Leonardo/da Vinci
Who proposed the theory of general relativity?|Einstein
In which year did the Second World War end?|1945
In which year did people first walk on the Moon?|1969
Which ocean lies between Europe and North America?|Atlantic
Which river flows through Budapest, Vienna and Belgrade?|Danube
What is the freezing point of water in degrees Celsius?|0/zero
What is the longest bone of the human body?|femur/thigh bone/thighbone
Which gas do plants take in for photosynthesis?|carbon dioxide/CO2
Which language has the most native speakers in Brazil?|Portuguese
What is the largest mammal on Earth?|blue whale
How many strings does a violin have?|4/four
"""
_HUNGARIAN = """\
Mi Ausztria fővárosa?|Bécs
Mi Olaszország fővárosa?|Róma
Mi Franciaország fővárosa?|Párizs
Mi Lengyelország fővárosa?|Varsó
Mi Görögország fővárosa?|Athén
Mi Japán fővárosa?|Tokió
Mi Dánia fővárosa?|Koppenhága
Mi Horvátország fővárosa?|Zágráb
Milyen színű a tiszta égbolt nappal?|kék
Melyik évszak jön a tél után?|tavasz
Melyik a hét utolsó napja Magyarországon?|vasárnap
Hány óra van egy napban?|24/huszonnégy
Melyik folyó szeli ketté Budapestet?|Duna
Melyik Magyarország legnagyobb tava?|Balaton
Ki írta a Himnuszt?|Kölcsey
Mi a „fehér” szó ellentéte?|fekete
"""
_TURKISH = """\
Macaristan ülkesinin başkenti neresidir?|Budapeşte
Polonya ülkesinin başkenti neresidir?|Varşova
Romanya ülkesinin başkenti neresidir?|Bükreş
Türkiye ülkesinin başkenti neresidir?|Ankara
Mısır ülkesinin başkenti neresidir?|Kahire
Avusturya ülkesinin başkenti neresidir?|Viyana
Portekiz ülkesinin başkenti neresidir?|Lizbon
Çin ülkesinin başkenti neresidir?|Pekin
Türkiye'nin en kalabalık şehri hangisidir?|İstanbul
Bir haftada kaç gün vardır?|7/yedi
Bir yılda kaç ay vardır?|12/on iki
Kıştan sonra hangi mevsim gelir?|ilkbahar/bahar
Gündüz açık gökyüzü ne renktir?|mavi
Türkiye Cumhuriyeti'nin ilk cumhurbaşkanı kimdir?|Atatürk
"Büyük" kelimesinin zıt anlamlısı nedir?|küçük
Türkiye'nin en büyük gölü hangisidir?|Van
"""
# Texts to repeat exactly: together they contain every accent of the language.
_REPEAT = {
    "hu": ("Ismételd meg: {}", ("árvíztűrő tükörfúrógép", "őszi űrhajó éjjel", "gyönyörű körtefa", "hűvös lejtőn")),
    "tr": ("Tekrarla: {}", ("şu köşe yaz köşesi", "ılık süt içiyor", "çağdaş üzüm bağı", "ağaçların gölgesi")),
}
_CAPITALS = {
    "hu": (
        "Írd nagybetűvel: {}",
        (("őszi tűz", "ŐSZI TŰZ"), ("kék szőlő", "KÉK SZŐLŐ"), ("török búza", "TÖRÖK BÚZA"), ("főút", "FŐÚT")),
    ),
    "tr": (
        "Büyük harfle yaz: {}",
        (("ılık", "ILIK"), ("ince iplik", "İNCE İPLİK"), ("ışık ve iğne", "IŞIK VE İĞNE"), ("şişe", "ŞİŞE")),
    ),
}
_MAX_TOKENS = 96


def fact_questions() -> list[Question]:
    """36 facts and sums, in English."""
    return [_question(Check.FACTS, "en", number, line) for number, line in enumerate(_FACTS.splitlines())]


def language_questions() -> list[Question]:
    """Facts in Hungarian and Turkish, texts with every accent to repeat, and capitals."""
    found = []
    for language, facts in (("hu", _HUNGARIAN), ("tr", _TURKISH)):
        known = [_question(Check.LANGUAGES, language, number, line) for number, line in enumerate(facts.splitlines())]
        found += known + [
            Question(
                f"languages/{language}/write/{number:02d}",
                Check.LANGUAGES,
                f"{language}, letters",
                one_turn(text),
                Truth(TruthKind.TEXT, [right], language),
                _MAX_TOKENS,
            )
            for number, (text, right) in enumerate(_written(language))
        ]
    return found


def _question(check: Check, language: str, number: int, line: str) -> Question:
    text, right = line.split("|")
    group = "en" if check is Check.FACTS else f"{language}, facts"
    place = f"{check.value}/{number:02d}" if check is Check.FACTS else f"{check.value}/{language}/{number:02d}"
    truth = Truth(TruthKind.HOLDS, right.split("/"), language)
    return Question(place, check, group, one_turn(text), truth, _MAX_TOKENS)


def _written(language: str) -> list[tuple[str, str]]:
    """(text asked for, exact expected answer)."""
    form, texts = _REPEAT[language]
    capitals_form, pairs = _CAPITALS[language]
    repeated = [(form.format(text), text) for text in texts]
    return repeated + [(capitals_form.format(small), capital) for small, capital in pairs]
