"""Texts for measuring perplexity: prose in three languages, code, records. Written for this project.

Many short passages give more information about a model than one long text, and whole passages are the units that
intervals are resampled from. Other texts can be given with `onebox eval --text FILE`.
"""

from dataclasses import dataclass
from pathlib import Path
from random import Random

from onebox.eval.filler import LANGUAGES, paragraphs
from onebox.eval.invoices import make_invoice
from onebox.spec.errors import UnreadableError

__all__ = ["Passage", "file_passages", "shipped_passages"]

_CHUNK_CHARACTERS = 1600
_LEAST_CHARACTERS = 80


@dataclass(frozen=True)
class Passage:
    """A text and its kind: a language, code, records, or the file it came from."""

    id: str
    kind: str
    text: str


_ENGLISH = (
    "A bridge does not fail all at once. Long before the first crack can be seen, small movements wear the "
    "bearings on which the deck rests, water finds its way into joints that were meant to be dry, and salt from "
    "the winter roads begins to work on the steel inside the concrete. An inspector who comes every two years "
    "looks for stains rather than for holes, because a brown line under a beam says more about the coming decade "
    "than the beam itself.",
    "To make the bread, mix the flour and the water the evening before and leave them covered. In the morning add "
    "the salt and the starter, fold the dough four times within two hours, and let it rise until it has grown by "
    "half. Heat the oven with the pot inside it; when the dough goes in, lower the heat a little and bake with "
    "the lid on for twenty-five minutes, then without it until the crust is dark brown.",
    "The first clocks in the town had no minute hand. Nobody needed one: the market opened when the bell rang, "
    "the school began when the children had come, and the coach left when it was full. It was the railway that "
    "brought the minutes, and with them arguments about whose time was the right one, for the station's clock "
    "followed the capital and the church followed the sun.",
    "Before you replace the disk, make sure that the copy of your data can be read. Start the machine from the "
    "second disk, list the files of the copy, and compare a few of them with the originals. If the sizes differ, "
    "do not go on: write the copy again and check the cable. Only when the comparison shows no difference may the "
    "old disk be removed.",
    "She had expected the office to be larger. There were two desks, a shelf of folders, and a window that looked "
    'at the wall of the next building. "You will get used to it," the man said without looking up. "In the '
    'afternoon there is some light." She put her bag on the empty desk, found that one of its legs was shorter '
    "than the others, and folded a piece of paper to put under it.",
    "When two plates of the Earth's crust move past each other, they do not slide smoothly. Friction holds them "
    "while the rock on both sides bends, and the energy of the bending is stored like that of a spring. When the "
    "friction is overcome, the plates jump, sometimes by several metres within seconds, and waves run outwards "
    "from the place where the movement began.",
)
_HUNGARIAN = (
    "A falu végén álló malom már régen nem őröl, de a kereke még forog, ha tavasszal megnő a patak. A gyerekek "
    "azt mondják, hogy éjszakánként valaki jár benne, az öregek pedig csak legyintenek: a szél az, amely a laza "
    "deszkákat mozgatja. A molnár unokája minden évben megígéri, hogy rendbe hozza a tetőt, és minden évben "
    "közbejön valami.",
    "A vonat tizenhét perc késéssel indult, ezért az utasok többsége lekéste a csatlakozást. A kalauz türelmesen "
    "elmagyarázta, hogy a következő járat egy óra múlva közlekedik, és a jegyeket azon is elfogadják. Egy idős "
    "asszony megkérdezte, hol lehet addig teát inni, mire hárman is felajánlották, hogy elkísérik az állomás "
    "büféjébe.",
    "A program indítása előtt ellenőrizze, hogy a beállítások helyesek-e. Ha a mentés helye nem érhető el, a "
    "program figyelmeztetést küld, és nem írja felül a meglévő fájlokat. A módosítások csak az „Alkalmaz” gomb "
    "megnyomása után lépnek életbe; a „Mégse” gombbal minden korábbi érték visszaállítható.",
    "Az őszi szüret idején az egész család összegyűlt a szőlőhegyen. Délelőtt a fiatalok szedték a fürtöket, az "
    "idősebbek a hordókat készítették elő, délben pedig bográcsban főtt a gulyás. Estére mindenki elfáradt, de "
    "amikor felcsendült a hegedű, mégis táncra perdültek a hűvös pincék előtt.",
)
_TURKISH = (
    "Köyün sonundaki değirmen artık un öğütmüyor, ama ilkbaharda dere yükselince çarkı hâlâ dönüyor. Çocuklar "
    "geceleri içinde birinin dolaştığını söyler, yaşlılar ise gülüp geçer: gevşek tahtaları oynatan rüzgârdır. "
    "Değirmencinin torunu her yıl çatıyı onaracağına söz verir ve her yıl araya başka bir iş girer.",
    "Tren on yedi dakika gecikmeyle kalktığı için yolcuların çoğu aktarmayı kaçırdı. Kondüktör bir sonraki "
    "seferin bir saat sonra olduğunu ve biletlerin orada da geçerli sayılacağını sabırla anlattı. Yaşlı bir kadın "
    "o zamana kadar nerede çay içebileceğini sordu; üç kişi birden onu istasyonun büfesine götürmeyi önerdi.",
    "Programı başlatmadan önce ayarların doğru olup olmadığını denetleyin. Kayıt yerine ulaşılamıyorsa program "
    "bir uyarı gösterir ve var olan dosyaların üzerine yazmaz. Değişiklikler ancak “Uygula” düğmesine basıldıktan "
    "sonra geçerli olur; “İptal” düğmesi ile önceki bütün değerler geri yüklenir.",
    "Güz gelince bütün aile bağda toplanırdı. Öğleden önce gençler üzüm keser, yaşlılar fıçıları hazırlar, öğle "
    "vakti ise kazanda yemek pişerdi. Akşam olduğunda herkes yorulmuştu, fakat kemanın sesi duyulunca serin "
    "mahzenlerin önünde yine de oyuna kalkılırdı.",
)
_CODE = (
    '''def merge_intervals(intervals):
    """Joins intervals that touch or overlap; they come back sorted by their start."""
    merged = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged
''',
    """class Counter:
    def __init__(self):
        self.counts = {}

    def add(self, name, amount=1):
        if amount < 0:
            raise ValueError(f"amount is {amount}; it must not be negative")
        self.counts[name] = self.counts.get(name, 0) + amount

    def most_common(self, limit):
        ordered = sorted(self.counts.items(), key=lambda item: (-item[1], item[0]))
        return ordered[:limit]
""",
    """import argparse
import json
from pathlib import Path


def main():
    parser = argparse.ArgumentParser(description="Print the largest files of a directory.")
    parser.add_argument("directory", type=Path)
    parser.add_argument("--limit", type=int, default=10)
    arguments = parser.parse_args()
    files = [path for path in arguments.directory.rglob("*") if path.is_file()]
    files.sort(key=lambda path: path.stat().st_size, reverse=True)
    print(json.dumps([str(path) for path in files[: arguments.limit]], indent=2))


if __name__ == "__main__":
    main()
""",
    """SELECT customers.name, COUNT(orders.id) AS num_orders, SUM(orders.total) AS total
FROM customers
LEFT JOIN orders ON orders.customer_id = customers.id
WHERE orders.created_at >= '2024-01-01'
GROUP BY customers.name
HAVING SUM(orders.total) > 1000
ORDER BY total DESC
LIMIT 20;
""",
)


def shipped_passages() -> list[Passage]:
    """About two dozen texts: six in English, four each in Hungarian, Turkish and code, and some generated."""
    written = {"en": _ENGLISH, "hu": _HUNGARIAN, "tr": _TURKISH, "code": _CODE}
    found = [
        Passage(f"{kind}/{number}", kind, text) for kind, texts in written.items() for number, text in enumerate(texts)
    ]
    for language in LANGUAGES:
        invoice = make_invoice(3_000_000, language)
        found.append(Passage(f"invoice/{language}", "invoice", invoice.text))
        source = paragraphs(Random(f"passage {language}"), language)  # noqa: S311  # a seeded example, no secret
        found.append(Passage(f"filler/{language}", "filler", "\n\n".join(next(source) for _ in range(2))))
    return found


def file_passages(path: Path, limit: int = 64) -> list[Passage]:
    """A user's file, split at line ends into at most `limit` passages of about 1,600 characters."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UnreadableError(f"--text {path} cannot be read as UTF-8 text ({error}).") from None
    pieces, held = [], ""
    for line in text.splitlines(keepends=True):
        for start in range(0, len(line), _CHUNK_CHARACTERS):
            held += line[start : start + _CHUNK_CHARACTERS]
            if len(held) >= _CHUNK_CHARACTERS:
                pieces.append(held)
                held = ""
    pieces.append(held)
    kept = [piece for piece in pieces if len(piece.strip()) >= _LEAST_CHARACTERS][:limit]
    if not kept:
        raise UnreadableError(f"--text {path} holds less than {_LEAST_CHARACTERS} characters of text; give more.")
    return [Passage(f"{path.name}/{number}", path.name, piece) for number, piece in enumerate(kept)]
