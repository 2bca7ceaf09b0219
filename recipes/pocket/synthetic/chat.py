"""Small talk, questions about the model, capitals, and definitions and translations from the collected text."""

from random import Random

from recipes.pocket.synthetic.example import Example, text_is
from recipes.pocket.synthetic.filler import documents
from recipes.pocket.synthetic.words import LANGUAGES, person

__all__ = ["chat"]

# (messages, answers)
_TALK: dict[str, tuple[tuple[tuple[str, ...], tuple[str, ...]], ...]] = {
    "en": (
        (
            ("Hello", "Hi", "Hey", "Hello there", "Good day", "Hi there", "Good morning"),
            ("Hello! How can I help you?",),
        ),
        (("How are you", "How are you doing", "How is it going"), ("I am fine, thank you. How can I help you?",)),
        (("Thanks", "Thank you", "Thanks a lot", "Thank you very much", "Great, thanks"), ("You are welcome!",)),
        (("Bye", "Goodbye", "See you", "Good night"), ("Goodbye!",)),
        (
            ("Who are you", "What are you", "What is your name", "Introduce yourself", "Tell me about yourself"),
            ("I am the pocket model of onebox, a small language model that was trained from scratch.",),
        ),
        (
            ("What can you do", "How can you help me", "What are you good at"),
            ("I can read invoices into JSON, call tools, do small sums, sort words and find a key in a long text.",),
        ),
        (
            ("Who made you", "Who trained you"),
            ("The onebox project trained me, on documentation and generated examples.",),
        ),
        (("Are you a human", "Are you a person", "Are you a robot"), ("I am a small language model.",)),
    ),
    "hu": (
        (("Szia", "Helló", "Jó napot", "Üdv", "Jó reggelt", "Sziasztok"), ("Szia! Miben segíthetek?",)),
        (("Hogy vagy", "Mi újság"), ("Jól vagyok, köszönöm. Miben segíthetek?",)),
        (("Köszönöm", "Köszi", "Köszönöm szépen", "Nagyon köszönöm"), ("Szívesen!",)),
        (("Viszlát", "Viszontlátásra", "Jó éjszakát"), ("Viszontlátásra!",)),
        (
            ("Ki vagy", "Mi a neved", "Mutatkozz be"),
            ("A onebox zsebmodellje vagyok, egy kis nyelvi modell, amelyet a semmiből tanítottak.",),
        ),
        (
            ("Mit tudsz", "Miben tudsz segíteni", "Mire vagy jó"),
            ("Számlákból JSON-t készítek, eszközöket hívok, számolok, és kulcsot keresek hosszú szövegben.",),
        ),
        (("Ember vagy", "Te egy robot vagy"), ("Kis nyelvi modell vagyok.",)),
    ),
    "tr": (
        (("Merhaba", "Selam", "İyi günler", "Günaydın", "Selamlar"), ("Merhaba! Nasıl yardımcı olabilirim?",)),
        (("Nasılsın", "Nasıl gidiyor"), ("İyiyim, teşekkür ederim. Nasıl yardımcı olabilirim?",)),
        (("Teşekkürler", "Teşekkür ederim", "Sağ ol", "Çok teşekkürler"), ("Rica ederim!",)),
        (("Hoşça kal", "Görüşürüz", "İyi geceler"), ("Hoşça kal!",)),
        (
            ("Sen kimsin", "Adın ne", "Kendini tanıt"),
            ("Ben onebox'ın cep modeliyim, sıfırdan eğitilmiş küçük bir dil modeliyim.",),
        ),
        (
            ("Ne yapabilirsin", "Bana nasıl yardım edebilirsin"),
            ("Faturaları JSON'a çevirir, araç çağırır, küçük sayılarla hesap yapar ve uzun metinde anahtar bulurum.",),
        ),
        (("İnsan mısın", "Robot musun"), ("Ben küçük bir dil modeliyim.",)),
    ),
}
_QUESTIONS = frozenset(
    ("how", "what", "who", "are", "hogy", "mi", "ki", "mit", "miben", "mire", "ember", "nasılsın", "sen", "adın")
)
# Country and capital by language, in the same order.
_CAPITALS = {
    "en": "France Paris|Germany Berlin|Italy Rome|Spain Madrid|Hungary Budapest|Turkey Ankara|Austria Vienna|"
    "Poland Warsaw|Greece Athens|Portugal Lisbon|Sweden Stockholm|Norway Oslo|Finland Helsinki|"
    "Denmark Copenhagen|Ireland Dublin|Japan Tokyo|China Beijing|Russia Moscow|Egypt Cairo|Canada Ottawa|"
    "Romania Bucharest|Bulgaria Sofia|Croatia Zagreb|Serbia Belgrade",
    "hu": "Franciaország Párizs|Németország Berlin|Olaszország Róma|Spanyolország Madrid|Magyarország Budapest|"
    "Törökország Ankara|Ausztria Bécs|Lengyelország Varsó|Görögország Athén|Portugália Lisszabon|"
    "Svédország Stockholm|Norvégia Oslo|Finnország Helsinki|Dánia Koppenhága|Írország Dublin|Japán Tokió|"
    "Kína Peking|Oroszország Moszkva|Egyiptom Kairó|Kanada Ottawa|Románia Bukarest|Bulgária Szófia|"
    "Horvátország Zágráb|Szerbia Belgrád",
    "tr": "Fransa Paris|Almanya Berlin|İtalya Roma|İspanya Madrid|Macaristan Budapeşte|Türkiye Ankara|"
    "Avusturya Viyana|Polonya Varşova|Yunanistan Atina|Portekiz Lizbon|İsveç Stokholm|Norveç Oslo|"
    "Finlandiya Helsinki|Danimarka Kopenhag|İrlanda Dublin|Japonya Tokyo|Çin Pekin|Rusya Moskova|"
    "Mısır Kahire|Kanada Ottawa|Romanya Bükreş|Bulgaristan Sofya|Hırvatistan Zagreb|Sırbistan Belgrad",
}
_CAPITAL_OF = {
    "en": ("What is the capital of {}?", "Name the capital of {}.", "{}: what is its capital?"),
    "hu": ("Mi {} fővárosa?", "{} fővárosa?", "Nevezd meg: {} fővárosa."),
    "tr": ("{} ülkesinin başkenti neresidir?", "{} başkenti?", "Başkentini söyle: {}."),
}
_NAMED = {
    "en": ("My name is {}.", "What is my name?", "Nice to meet you, {}!", "Your name is {}."),
    "hu": ("A nevem {}.", "Mi a nevem?", "Örvendek, {}!", "A neved {}."),
    "tr": ("Benim adım {}.", "Adım ne?", "Memnun oldum, {}!", "Adın {}."),
}


def chat(rng: Random) -> Example:
    way = rng.random()
    if way < 0.45:
        return _talk(rng)
    if way < 0.6:
        return _capital(rng)
    if way < 0.75 or documents() is None:
        return _remember_name(rng)
    return _definition(rng) if rng.random() < 0.5 else _translation(rng)


def _talk(rng: Random) -> Example:
    language = rng.choice(LANGUAGES)
    said, answers = rng.choice(_TALK[language])
    text = rng.choice(said)
    ends = ("?", "?", "") if text.split()[0].lower() in _QUESTIONS else ("!", ".", "")
    text = rng.choice((text, text, text.lower())) + rng.choice(ends)
    answer = rng.choice(answers)
    thought = rng.choice(("The user greets or asks about me. I answer briefly.", "A short answer will do."))
    return Example.ask(text, answer, text_is(*answers), reasoning=thought if rng.random() < 0.5 else "")


def _capital(rng: Random) -> Example:
    language = rng.choice(LANGUAGES)
    country, capital = rng.choice(_CAPITALS[language].split("|")).split()
    thought = f"{country}: {capital}." if rng.random() < 0.5 else ""
    return Example.ask(
        rng.choice(_CAPITAL_OF[language]).format(country), f"{capital}.", text_is(f"{capital}."), reasoning=thought
    )


def _remember_name(rng: Random) -> Example:
    """Two turns: the second asks for the name given in the first."""
    language = rng.choice(LANGUAGES)
    name = person(rng, language)
    tell, ask, reply, answer = (text.format(name) for text in _NAMED[language])
    messages = [
        {"role": "user", "content": tell},
        {"role": "assistant", "content": reply},
        {"role": "user", "content": ask},
    ]
    return Example.answered(messages, answer, text_is(answer), tell if rng.random() < 0.4 else "")


def _definition(rng: Random) -> Example:
    source = documents()
    lines = source.text(rng, "wordnet-en").splitlines() if source and source.has("wordnet-en") else []
    lines = [line for line in lines if ": " in line and len(line) < 200]
    if not lines:
        return _capital(rng)
    words, _, meaning = rng.choice(lines).partition(": ")
    word, meaning = words.split(",")[0], meaning.split(";")[0]
    ask = rng.choice(("What does {} mean?", "Define {}.", "What is the meaning of {}?", "Explain the word {}."))
    return Example.ask(ask.format(word), meaning, text_is(meaning))


_TRANSLATE = {
    "hu": ("Translate into Hungarian: {}", "How do you say in Hungarian: {}", "Fordítsd magyarra: {}"),
    "tr": ("Translate into Turkish: {}", "How do you say in Turkish: {}", "Türkçeye çevir: {}"),
}


def _translation(rng: Random) -> Example:
    source = documents()
    language = rng.choice(("hu", "tr"))
    name = f"messages-{language}"
    pairs = source.text(rng, name).split("\n\n") if source and source.has(name) else []
    pairs = [pair for pair in pairs if pair.count("\n") == 1 and len(pair) < 160]
    if not pairs:
        return _capital(rng)
    english, other = (line.partition(": ")[2] for line in rng.choice(pairs).split("\n"))
    if rng.random() < 0.3:
        return Example.ask(f"Translate into English: {other}", english, text_is(english))
    return Example.ask(rng.choice(_TRANSLATE[language]).format(english), other, text_is(other))
