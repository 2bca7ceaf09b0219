"""Words for generated examples: real names and goods in three languages, and words that no text holds.

A model that has seen a name can guess it; one it has never seen it must copy. So about half of what an answer repeats
is made up of syllables and random digits.
"""

from random import Random

__all__ = [
    "CITIES",
    "GOODS",
    "LANGUAGES",
    "MONTHS",
    "WORDS",
    "company",
    "identifier",
    "made_up",
    "number_name",
    "person",
    "pick",
]

LANGUAGES = ("en", "hu", "tr")


def _listed(text: str) -> list[str]:
    """What stands between bars, or without any, between spaces."""
    return text.split("|" if "|" in text else None)


_ONSETS = _listed("b c d f g h j k l m n p r s t v z br cr dr fr gr kr pl pr st tr sz ny gy cs ş ç ğ sh ch th")
_VOWELS = _listed("a e i o u a e i o á é ö ü ı")
_CODAS = ["", "", "", "n", "r", "l", "s", "k", "t", "m", "x", "nd", "rt"]
_FIRST = {
    "en": _listed(
        "Alice Brian Carol David Emma Frank Grace Henry Irene Jack Karen Liam Mary Noah Olivia Peter Quinn Rose Sam "
        "Tina Victor Wendy Adam Beth Chris Diana Edward Fiona George Hannah Ian Julia Kevin Laura Martin Nora Oscar "
        "Paula"
    ),
    "hu": _listed(
        "Anna Béla Csaba Dóra Endre Ferenc Gábor Hajnalka Ilona János Katalin László Mária Nóra Orsolya Péter Réka "
        "Sándor Tamás Vera Zoltán Zsuzsa Attila Bence Eszter Gergő Judit Kinga Levente Márton Ödön Örs Tünde Ágnes "
        "Éva István"
    ),
    "tr": _listed(
        "Ahmet Ayşe Burak Cem Deniz Elif Fatma Gül Hasan İbrahim Kemal Leyla Mehmet Nur Osman Pınar Selin Tarık Umut "
        "Veli Yusuf Zeynep Ali Banu Çağla Emre Filiz Gökhan Hülya Işıl Kaan Murat Özge Serkan Şule Ümit Yasemin"
    ),
}
_LAST = {
    "en": _listed(
        "Adams Baker Clark Davies Evans Foster Green Harris Ingram Jones King Lewis Moore Nelson Owens Parker Reed "
        "Smith Taylor Underwood Vance Walker Young Bennett Cooper Dawson Ellis Fisher Grant Hughes"
    ),
    "hu": _listed(
        "Nagy Kovács Tóth Szabó Horváth Varga Kiss Molnár Németh Farkas Balogh Papp Takács Juhász Lakatos Mészáros "
        "Oláh Simon Rácz Fekete Szilágyi Török Fehér Balázs Gál Kis Szűcs Kocsis Orsós Fodor"
    ),
    "tr": _listed(
        "Yılmaz Kaya Demir Çelik Şahin Yıldız Yıldırım Öztürk Aydın Özdemir Arslan Doğan Kılıç Aslan Çetin Kara Koç "
        "Kurt Özkan Şimşek Polat Korkmaz Erdoğan Güneş Aktaş Bulut Tekin Avcı Sarı Turan"
    ),
}
CITIES = {
    "en": _listed(
        "London Leeds Bristol Dublin Boston Denver Austin Portland Glasgow Oxford York Seattle Chicago Toronto"
    ),
    "hu": _listed(
        "Budapest Debrecen Szeged Miskolc Pécs Győr Nyíregyháza Kecskemét Székesfehérvár Szombathely Eger Sopron"
    ),
    "tr": _listed("İstanbul Ankara İzmir Bursa Antalya Adana Konya Gaziantep Kayseri Eskişehir Trabzon Samsun"),
}
_FORMS = {
    "en": ["Ltd", "Inc.", "LLC", "GmbH", "& Sons", "Group", "Supplies", "Trading Co."],
    "hu": ["Kft.", "Zrt.", "Bt.", "Nyrt.", "és Társa Kft.", "Szolgáltató Kft."],
    "tr": ["A.Ş.", "Ltd. Şti.", "Ticaret A.Ş.", "San. ve Tic. Ltd. Şti.", "ve Oğulları"],
}
GOODS = {
    "en": _listed(
        "Desk lamp|Office chair|Paper A4|Laser toner|USB cable|Keyboard|Monitor 27 inch|Coffee beans|"
        "Consulting hours|Web hosting|Printer ink|Whiteboard|Notebook|Headphones|Router|Cleaning service|Ball pen|"
        "Backpack|Water filter|Garden hose|Steel bolts|Wood screws|Paint white|Light bulb|Battery AA|Extension cord|"
        "Phone case|Translation|Car rental|Shipping"
    ),
    "hu": _listed(
        "Íróasztal|Irodai szék|Másolópapír|Nyomtató festék|USB kábel|Billentyűzet|Monitor|Kávé|Tanácsadás|Tárhely|"
        "Toll|Füzet|Fejhallgató|Takarítás|Hátizsák|Vízszűrő|Csavar|Falfesték|Izzó|Elem|Hosszabbító|Telefontok|"
        "Fordítás|Autóbérlés|Szállítás|Kenyér|Tej|Alma|Szoftver licenc|Szerviz óradíj"
    ),
    "tr": _listed(
        "Masa lambası|Ofis koltuğu|A4 kağıt|Toner|USB kablo|Klavye|Monitör|Kahve|Danışmanlık|Web barındırma|Kalem|"
        "Defter|Kulaklık|Temizlik hizmeti|Sırt çantası|Su filtresi|Vida|Boya|Ampul|Pil|Uzatma kablosu|Telefon kılıfı|"
        "Çeviri|Araç kiralama|Nakliye|Ekmek|Süt|Elma|Yazılım lisansı|Bakım"
    ),
}
MONTHS = {
    "en": _listed("January February March April May June July August September October November December"),
    "hu": _listed("január február március április május június július augusztus szeptember október november december"),
    "tr": _listed("Ocak Şubat Mart Nisan Mayıs Haziran Temmuz Ağustos Eylül Ekim Kasım Aralık"),
}
WORDS = {
    "en": _listed(
        "apple river stone window garden paper yellow silver winter morning table bridge forest letter orange pencil "
        "market summer candle mirror basket island butter planet rocket silent gentle narrow bright hidden copper "
        "velvet marble"
    ),
    "hu": _listed(
        "alma folyó kő ablak kert papír sárga ezüst tél reggel asztal híd erdő levél narancs ceruza piac nyár "
        "gyertya tükör kosár sziget vaj bolygó rakéta csendes szelíd keskeny fényes rejtett réz bársony márvány "
        "kutya macska"
    ),
    "tr": _listed(
        "elma nehir taş pencere bahçe kağıt sarı gümüş kış sabah masa köprü orman mektup portakal kalem pazar yaz "
        "mum ayna sepet ada tereyağı gezegen roket sessiz nazik dar parlak gizli bakır kadife mermer köpek kedi"
    ),
}


def pick(rng: Random, language: str) -> str:
    """A common word, or one that does not exist."""
    return rng.choice(WORDS[language]) if rng.random() < 0.6 else made_up(rng)


def made_up(rng: Random, syllables: int | None = None) -> str:
    """A word of two or three syllables that means nothing, in small letters."""
    count = syllables or rng.choice((2, 2, 3))
    return "".join(rng.choice(_ONSETS) + rng.choice(_VOWELS) + rng.choice(_CODAS) for _ in range(count))


def identifier(rng: Random) -> str:
    """A word for names in programs and addresses: letters of ASCII alone, at least two."""
    word = "".join(char for char in made_up(rng) if char.isascii())
    return word if len(word) > 1 else identifier(rng)


def number_name(rng: Random) -> str:
    """A reference such as INV-2024-0381 or K/48213."""
    digits = "".join(rng.choice("0123456789") for _ in range(rng.randint(3, 6)))
    prefix = rng.choice(("INV", "SZ", "FTR", "R", "K", "A", "ORD", "N", rng.choice("BCDEFGH") + rng.choice("XYZKLM")))
    return rng.choice(
        (f"{prefix}-{digits}", f"{prefix}/{digits}", f"{prefix}{digits}", f"{prefix}-20{rng.randint(10, 29)}-{digits}")
    )


def person(rng: Random, language: str) -> str:
    """A full name in the language's own order."""
    first, last = rng.choice(_FIRST[language]), rng.choice(_LAST[language])
    if rng.random() < 0.3:
        last = made_up(rng).capitalize()
    return f"{last} {first}" if language == "hu" else f"{first} {last}"


def company(rng: Random, language: str) -> str:
    base = made_up(rng).capitalize() if rng.random() < 0.6 else rng.choice(_LAST[language])
    if rng.random() < 0.3:
        base += " " + (made_up(rng).capitalize() if rng.random() < 0.5 else rng.choice(WORDS[language]).capitalize())
    return f"{base} {rng.choice(_FORMS[language])}"
