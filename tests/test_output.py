"""Stop strings cut where they begin, however the text is divided into tokens."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pilotfish.output import OutputText


class _Pieces:
    """A detokenizer whose ids are indices of a list of strings."""

    def __init__(self, pieces: list[str], rest: str = "") -> None:
        self.pieces, self.rest = pieces, rest

    def push(self, token_id: int) -> str:
        return self.pieces[token_id]

    def finish(self) -> str:
        return self.rest


def _first_stop(text: str, stops: list[str]) -> int | None:
    return min((at for at in (text.find(stop) for stop in stops) if at >= 0), default=None)


letters = st.text("ab.", max_size=5)


@given(st.lists(letters, max_size=12), letters, st.lists(st.text("ab.", min_size=1, max_size=4), max_size=3))
def test_cuts_like_the_whole_text(pieces: list[str], rest: str, stops: list[str]) -> None:
    output = OutputText(_Pieces(pieces, rest), stops)
    shown = ""
    read = ""
    for index, piece in enumerate(pieces):
        read += piece
        shown += output.push(index)
        cut = _first_stop(read, stops)
        assert output.stopped == (cut is not None)
        if cut is not None:
            assert shown == read[:cut]
            assert output.push(index) == "" and output.finish() == ""
            return
        # Nothing is shown that a stop string could still take back.
        assert read.startswith(shown)
    whole = read + rest
    cut = _first_stop(whole, stops)
    assert shown + output.finish() == (whole if cut is None else whole[:cut])


def test_text_that_may_become_a_stop_string_is_held_back() -> None:
    output = OutputText(_Pieces(["one EN", "D", "O", " two END three"]), ["END!", "END "])
    assert output.push(0) == "one "
    assert output.push(1) == ""
    assert output.push(2) == "ENDO"
    assert output.push(3) == " two "
    assert output.stopped
