# SPDX-License-Identifier: Apache-2.0
"""SIGINT and SIGTERM are noted while asked for, and do what they did before afterwards."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from shardax.train.progress import OverdueError
from shardax.train.trainer import StopRequest

pytestmark = pytest.mark.usefixtures("interrupts")

BOTH = [signal.SIGINT, signal.SIGTERM]


@pytest.mark.parametrize("number", BOTH)
def test_signal_is_noted_instead_of_ending_the_process(number: signal.Signals) -> None:
    with StopRequest() as stop:
        assert not stop and stop.signal is None
        os.kill(os.getpid(), number)
        assert stop and stop.signal is number
    assert stop and stop.signal is number


def test_signal_from_another_thread_is_noted_too() -> None:
    with StopRequest() as stop:
        thread = threading.Thread(target=os.kill, args=(os.getpid(), signal.SIGTERM))
        thread.start()
        thread.join()
        assert stop.signal is signal.SIGTERM


def test_handlers_come_back_also_after_an_error() -> None:
    before = [signal.getsignal(number) for number in BOTH]

    def fail() -> None:
        with StopRequest():
            assert [signal.getsignal(number) for number in BOTH] != before
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert [signal.getsignal(number) for number in BOTH] == before


def test_second_interrupt_interrupts_at_once() -> None:
    with StopRequest() as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


def test_second_sigterm_is_noted_once_more() -> None:
    with StopRequest() as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
    assert stop.signal is signal.SIGTERM


def test_signal_that_the_process_ignores_stays_ignored() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with StopRequest() as stop:
            os.kill(os.getpid(), signal.SIGINT)
            assert not stop
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_requests_nest() -> None:
    with StopRequest() as outer:
        with StopRequest() as inner:
            os.kill(os.getpid(), signal.SIGTERM)
        assert inner and not outer
        os.kill(os.getpid(), signal.SIGTERM)
    assert outer


def test_outside_the_main_thread_it_changes_nothing() -> None:
    handlers = []

    def work() -> None:
        with StopRequest() as stop:
            handlers.append(signal.getsignal(signal.SIGTERM))
            assert not stop

    before = signal.getsignal(signal.SIGTERM)
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert handlers == [before]


def test_after_the_block_sigterm_ends_a_process_again() -> None:
    program = (
        "import os, signal\n"
        "from shardax.train.trainer import StopRequest\n"
        "with StopRequest():\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
        "print('alive', flush=True)\n"
        "os.kill(os.getpid(), signal.SIGTERM)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.stdout, done.returncode) == ("alive\n", -signal.SIGTERM)


def test_second_interrupt_says_how_to_resume() -> None:
    def interrupt_twice() -> None:
        with StopRequest():
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt, match="last checkpoint with resume=True") as caught:
        interrupt_twice()
    assert caught.value.__suppress_context__ and len(caught.traceback) == 3
    with pytest.raises(KeyboardInterrupt) as caught, StopRequest():
        raise KeyboardInterrupt  # of somebody else
    assert not caught.value.args


# --- code of others -------------------------------------------------------------------------------


def ask(number: signal.Signals = signal.SIGTERM) -> None:
    os.kill(os.getpid(), number)


def ask_and_wait(number: signal.Signals) -> None:
    ask(number)
    threading.Event().wait()


@pytest.mark.parametrize("number", BOTH)
def test_code_of_others_is_interrupted_when_no_time_is_left(number: signal.Signals) -> None:
    with StopRequest(within=0.05) as stop:
        with pytest.raises(OverdueError, match="a callback"), stop.bounded("a callback"):
            ask_and_wait(number)
        with pytest.raises(OverdueError, match="the display"), stop.bounded("the display"):
            raise AssertionError("it is not called any more")
        stop.grant()
        with stop.bounded("the display"):
            pass
    assert stop.signal is number


def test_handlers_of_exceptions_do_not_keep_code_of_others_running() -> None:
    waits: list[str] = []

    def wait_again_and_again() -> None:
        ask()
        while True:
            try:
                threading.Event().wait()
            except Exception as error:  # noqa: BLE001
                waits.append(repr(error))

    with StopRequest(within=0.05) as stop, pytest.raises(OverdueError), stop.bounded("a callback"):
        wait_again_and_again()
    assert waits == []


def test_own_code_is_neither_interrupted_nor_counted() -> None:
    with StopRequest(within=0.2) as stop:
        ask()
        time.sleep(0.3)  # such as saving a model
        with stop.bounded("a callback"), stop.bounded("of a callback"):
            pass
    assert stop


def test_without_a_signal_code_of_others_takes_its_time() -> None:
    with StopRequest(within=0.0) as stop, stop.bounded("a callback"):
        time.sleep(0.01)
    before = signal.getsignal(signal.SIGURG)
    with StopRequest(within=0.0):
        assert signal.getsignal(signal.SIGURG) != before
    assert signal.getsignal(signal.SIGURG) == before


def test_first_signal_wakes_a_wait() -> None:
    woken: list[signal.Signals | None] = []
    with StopRequest() as stop:
        stop.wake = lambda: woken.append(stop.signal)
        ask()
        ask()
    assert woken == [signal.SIGTERM]
