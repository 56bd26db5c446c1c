from __future__ import annotations

import signal
import threading

import pytest

from fedclade import RunInterrupted
from fedclade.cli.interrupt import SIGNALS, interruptible


def then() -> str:
    return "continue with: this"


@pytest.mark.parametrize("number", SIGNALS)
def test_one_signal_asks_and_a_second_stops_at_once(number, capfd):
    def pressed_twice() -> None:
        with interruptible(then) as stop:
            assert not stop()
            signal.raise_signal(number)
            assert stop()
            assert capfd.readouterr().err == "\nstopping after this round; Ctrl-C again stops at once\n"
            signal.raise_signal(number)
            pytest.fail("the second signal did not stop it")

    before = [signal.getsignal(each) for each in SIGNALS]
    with pytest.raises(RunInterrupted, match=r"^stopped at once; continue with: this$"):
        pressed_twice()
    assert [signal.getsignal(each) for each in SIGNALS] == before


def test_an_interrupted_run_says_what_the_command_says():
    with pytest.raises(RunInterrupted, match=r"^interrupted after round 3; continue with: this$"), interruptible(then):
        raise RunInterrupted("interrupted after round 3", "nothing was kept")


def test_without_a_signal_nothing_changes():
    before = [signal.getsignal(each) for each in SIGNALS]
    with interruptible(then) as stop:
        assert not stop()
    assert [signal.getsignal(each) for each in SIGNALS] == before


def test_other_threads_cannot_be_interrupted_but_can_run():
    seen = []

    def run():
        with interruptible(then) as stop:
            seen.append(stop())

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert seen == [False]
