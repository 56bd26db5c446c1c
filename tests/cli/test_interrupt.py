from __future__ import annotations

import os
import pty
import signal
import threading
import time

import pytest

from fedclade import RunInterrupted
from fedclade.cli.options import SIGNALS, interruptible

pytestmark = pytest.mark.usefixtures("default_signals")


def then() -> str:
    return "continue with: this"


@pytest.mark.parametrize("number", SIGNALS)
def test_one_signal_asks_and_a_second_stops_at_once(number, capfd):
    def pressed_twice() -> None:
        with interruptible(then) as stop:
            assert not stop()
            signal.raise_signal(number)
            assert stop()
            assert (
                capfd.readouterr().err
                == "\nstopping after this round; Ctrl-C again stops at once\n"
            )
            signal.raise_signal(number)
            pytest.fail("the second signal did not stop it")

    before = [signal.getsignal(each) for each in SIGNALS]
    with pytest.raises(
        RunInterrupted, match=r"^the command was stopped at once; continue with: this$"
    ):
        pressed_twice()
    assert [signal.getsignal(each) for each in SIGNALS] == before


@pytest.mark.parametrize("ignored", SIGNALS)
def test_a_signal_that_is_ignored_stays_so(ignored):
    """As nohup leaves SIGHUP, and a script SIGINT for its background jobs."""
    signal.signal(ignored, signal.SIG_IGN)
    with interruptible(then) as stop:
        signal.raise_signal(ignored)
        assert not stop()
        for number in SIGNALS:
            if number != ignored:
                assert signal.getsignal(number) not in (signal.SIG_IGN, signal.SIG_DFL)
        signal.raise_signal(next(number for number in SIGNALS if number != ignored))
        assert stop()
    assert signal.getsignal(ignored) == signal.SIG_IGN


def test_a_terminal_that_is_closed_asks_and_what_is_printed_to_it_then_does_no_harm():
    """In a process of its own with a terminal of its own, whose other end is closed once the run has begun."""
    process, terminal = pty.fork()
    if process == 0:
        code = 1
        try:
            with interruptible(then) as stop:
                os.write(1, b"begun")
                while not stop():
                    time.sleep(0.01)
                print("a progress bar", flush=True)
                code = 0
        finally:
            os._exit(code)
    assert os.read(terminal, 5) == b"begun"
    os.close(terminal)
    assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 0


def test_an_interrupted_run_says_what_the_command_says():
    with (
        pytest.raises(RunInterrupted, match=r"^interrupted after round 3; continue with: this$"),
        interruptible(then),
    ):
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
