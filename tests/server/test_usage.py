"""Token counts of answers: of one, of several engine requests, and of several answers together."""

from onebox.engine.api import AcceptanceCounts, Counts, Drafter, TextPart
from onebox.server.usage import Usage, UsageCount

MTP = AcceptanceCounts(4, 8, 6, (4, 2))
TEXT = AcceptanceCounts(1, 10, 10, (1,) * 10)


def usage_of(*by_class: dict[tuple[Drafter, TextPart], AcceptanceCounts]) -> Usage:
    """Of one answer that took so many engine requests."""
    count = UsageCount(num_prompt=5)
    for drafts in by_class:
        count.add_request(Counts(5, 20, drafts=sum(drafts.values(), AcceptanceCounts()), drafts_by_class=drafts))
    return count.usage


def test_drafts_are_told_by_drafter_and_part_of_the_answer():
    thinking = {(Drafter.MTP, TextPart.THINKING): MTP}
    answer = {(Drafter.MTP, TextPart.ANSWER): MTP, (Drafter.NGRAM, TextPart.ANSWER): TEXT}
    details = usage_of(thinking, answer).draft_details
    mtp = {"steps": 4, "accepted_tokens": 6, "rejected_tokens": 2}
    assert details == {
        "accepted_prediction_tokens": 22,
        "rejected_prediction_tokens": 4,
        "drafts": {
            "mtp": {"thinking": mtp, "answer": mtp},
            "ngram": {"answer": {"steps": 1, "accepted_tokens": 10, "rejected_tokens": 0}},
        },
    }


def test_the_drafts_of_several_answers_add_up():
    one, two = usage_of({(Drafter.MTP, TextPart.ANSWER): MTP}), usage_of({(Drafter.DFLASH, TextPart.ANSWER): TEXT})
    total = one + two + one
    assert total.draft_details["drafts"]["mtp"]["answer"] == {"steps": 8, "accepted_tokens": 12, "rejected_tokens": 4}
    assert total.draft_details["drafts"]["dflash"]["answer"]["accepted_tokens"] == 10
    assert total.accepted_draft_tokens == 22


def test_without_drafts_there_are_no_drafters():
    assert usage_of({}).draft_details == {"accepted_prediction_tokens": 0, "rejected_prediction_tokens": 0}
