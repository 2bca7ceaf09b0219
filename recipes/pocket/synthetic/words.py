"""Words for generated examples: real names and goods in three languages, and invented words.

A model can guess a name that it has seen, but must copy one that it has not. So about half of the words that an answer
repeats are random syllables and digits.
"""

from random import Random

__all__ = [
    "CITIES",
    "GOODS",
    "LANGUAGES",
    "MONTHS",
    "ORDINARY_SHARE",
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
    """Splits at bars, or if there are none, at spaces."""
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
_QUALITIES = {
    "en": _listed(
        "Blue Red Green Golden Silver White Black Bright Clear Fresh Grand Happy Little Modern New Old Open Prime "
        "Quiet Royal Simple Smart Solid Sunny United Urban Western Northern Eastern Southern Central Global Local "
        "Best Fine True Wild Warm"
    ),
    "hu": _listed(
        "Kék Piros Zöld Arany Ezüst Fehér Fekete Fényes Tiszta Friss Nagy Vidám Kicsi Modern Új Régi Nyitott Első "
        "Csendes Királyi Egyszerű Okos Erős Napos Egyesült Városi Nyugati Északi Keleti Déli Központi Helyi Jó Meleg"
    ),
    "tr": _listed(
        "Mavi Kırmızı Yeşil Altın Gümüş Beyaz Siyah Parlak Temiz Taze Büyük Mutlu Küçük Modern Yeni Eski Açık Hızlı "
        "Sessiz Kraliyet Basit Akıllı Sağlam Güneşli Birleşik Kentsel Batı Kuzey Doğu Güney Merkez Yerel Güzel Sıcak"
    ),
}
_THINGS = {
    "en": _listed(
        "Lamp Wind Valley River Mountain Bridge Harbour Garden Lake Forest Field Stone Star Moon Sun Sky Cloud Rain "
        "Snow Fire Wave Island Coast Ocean Tree Leaf Flower Rose Oak Pine Apple Lemon Orange Honey Bread Coffee Tea "
        "Salt Bear Eagle Fox Horse Lion Owl Wolf Tiger Arrow Anchor Bell Book Box Castle Chair Clock Compass Crown "
        "Drum Engine Gate Glass Hammer House Key Ladder Letter Mirror Paper Pencil Road Roof Ship Spring Summer Table "
        "Tower Town Train Village Wall Wheel Window Winter Wood Workshop Corner Market Mill Station Square Point Line"
    ),
    "hu": _listed(
        "Lámpa Szél Völgy Folyó Hegy Híd Kikötő Kert Tó Erdő Mező Kő Csillag Hold Nap Ég Felhő Eső Hó Tűz Sziget "
        "Part Tenger Fa Levél Virág Rózsa Tölgy Fenyő Alma Citrom Narancs Méz Kenyér Kávé Tea Só Medve Sas Róka Ló "
        "Oroszlán Bagoly Farkas Tigris Nyíl Horgony Harang Könyv Doboz Vár Szék Óra Iránytű Korona Ajtó Dob Motor Kapu "
        "Üveg Kalapács Ház Kulcs Létra Tükör Papír Ceruza Út Tető Hajó Tavasz Nyár Asztal Torony Város Vonat Falu Fal"
    ),
    "tr": _listed(
        "Lamba Rüzgar Vadi Nehir Dağ Köprü Liman Bahçe Göl Orman Tarla Taş Yıldız Ay Güneş Gök Bulut Yağmur Kar Ateş "
        "Dalga Ada Kıyı Deniz Ağaç Yaprak Çiçek Gül Meşe Çam Elma Limon Portakal Bal Ekmek Kahve Çay Tuz Ayı Kartal "
        "Tilki At Aslan Baykuş Kurt Kaplan Ok Çapa Çan Kitap Kutu Kale Sandalye Saat Pusula Taç Kapı Davul Motor Cam "
        "Çekiç Ev Anahtar Merdiven Ayna Kağıt Kalem Yol Çatı Gemi Bahar Yaz Masa Kule Şehir Tren Köy Duvar Tekerlek"
    ),
}
_TRADES = {
    "en": _listed(
        "Traders Foods Books Tools Systems Motors Design Logistics Software Media Energy Bakery Printing Furniture "
        "Electronics Partners Consulting Solutions Services Brothers Studio Transport Textiles Supplies"
    ),
    "hu": _listed(
        "Kereskedés Élelmiszer Könyvek Szerszám Rendszerek Autó Tervező Logisztika Szoftver Média Energia Pékség "
        "Bútor Elektronika Partner Tanácsadó Szolgáltató Műhely Szállító"
    ),
    "tr": _listed(
        "Ticaret Gıda Kitap Alet Sistemleri Otomotiv Tasarım Lojistik Yazılım Medya Enerji Fırın Matbaa Mobilya "
        "Elektronik Ortakları Danışmanlık Hizmetleri Atölye Nakliyat"
    ),
}
ORDINARY_SHARE = 0.5
"""Share of companies named by ordinary words. It was 0 when the shipped model was trained."""
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
    """A common word or an invented one."""
    return rng.choice(WORDS[language]) if rng.random() < 0.6 else made_up(rng)


def made_up(rng: Random, syllables: int | None = None) -> str:
    """An invented word of two or three syllables, in lower case."""
    count = syllables or rng.choice((2, 2, 3))
    return "".join(rng.choice(_ONSETS) + rng.choice(_VOWELS) + rng.choice(_CODAS) for _ in range(count))


def identifier(rng: Random) -> str:
    """An invented word of at least two letters, ASCII only, for names in programs and addresses."""
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


def company(rng: Random, language: str, ordinary: float = ORDINARY_SHARE) -> str:
    """A company's name: with probability `ordinary` of ordinary words, otherwise of a family name or syllables."""
    if ordinary and rng.random() < ordinary:
        return _ordinary_company(rng, language)
    base = made_up(rng).capitalize() if rng.random() < 0.6 else rng.choice(_LAST[language])
    if rng.random() < 0.3:
        base += " " + (made_up(rng).capitalize() if rng.random() < 0.5 else rng.choice(WORDS[language]).capitalize())
    return f"{base} {rng.choice(_FORMS[language])}"


def _ordinary_company(rng: Random, language: str) -> str:
    """Such as Blue Lamp Ltd, Greenvalley Traders or Stone & Bridge Books."""
    quality, thing, other = (
        rng.choice(_QUALITIES[language]),
        rng.choice(_THINGS[language]),
        rng.choice(_THINGS[language]),
    )
    trade, form = rng.choice(_TRADES[language]), rng.choice(_FORMS[language])
    both = {"en": "&", "hu": "és", "tr": "ve"}[language]
    name = rng.choice(
        (
            f"{quality} {thing}",
            f"{quality} {thing}",
            f"{thing} {other}",
            f"{quality}{thing.lower()}",
            f"{thing}{other.lower()}",
            f"{thing} {both} {other}",
            f"{rng.choice(CITIES[language])} {thing}",
            f"{quality} {thing} {other}",
        )
    )
    return rng.choice((f"{name} {form}", f"{name} {trade}", f"{name} {trade} {form}", name))
