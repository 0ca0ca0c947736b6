"""What scripts write into documents stands between two marks, and nothing else of a document is another."""

import pytest

from scripts import marks

BEGIN, END = "<!-- by (a) script -->", "<!-- end -->"
PAGE = f"before {END}\n{BEGIN}old{END}\n<!--one-->1{END} and <!--two-->2{END}\nafter"


def test_what_stands_between_two_marks_is_replaced_and_nothing_else() -> None:
    assert marks.between(PAGE, BEGIN, END) == "old"
    assert marks.put(PAGE, BEGIN, END, r"\n\1") == PAGE.replace("old", r"\n\1")
    assert marks.put(PAGE, BEGIN, END, "old") == PAGE


def test_each_mark_of_a_kind_gets_what_it_names() -> None:
    each = marks.put_each(PAGE, r"<!--(\w+)-->", END, lambda found: f"{found[1]} was {found['inside']}")
    assert each == PAGE.replace(">1<", ">one was 1<").replace(">2<", ">two was 2<")


@pytest.mark.parametrize("page", ["no marks", f"{BEGIN} without its end", f"{END}{BEGIN}"])
def test_a_document_without_the_marks_is_not_written(page: str) -> None:
    with pytest.raises(ValueError, match="the document has no"):
        marks.put(page, BEGIN, END, "new")
