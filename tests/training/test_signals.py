"""One signal asks, the second insists."""

import os
import signal
import threading

import pytest

from atlas_jax.training.signals import StopRequest


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_one_signal_is_a_request(number):
  before = signal.getsignal(number)
  with StopRequest() as stop:
    assert not stop.after(1)
    os.kill(os.getpid(), number)
    assert stop.after(2)
    assert stop.name == number.name
  assert signal.getsignal(number) is before


@pytest.mark.parametrize("first", [signal.SIGTERM, signal.SIGINT])
def test_a_second_interrupt_aborts(first):
  with StopRequest():
    os.kill(os.getpid(), first)
    with pytest.raises(KeyboardInterrupt):
      os.kill(os.getpid(), signal.SIGINT)


def test_a_second_termination_is_still_a_request():
  with StopRequest() as stop:
    os.kill(os.getpid(), signal.SIGTERM)
    os.kill(os.getpid(), signal.SIGTERM)
    assert stop.after(1)


def test_outside_the_main_thread_nothing_is_installed():
  before = signal.getsignal(signal.SIGTERM)
  seen = []

  def work():
    with StopRequest() as stop:
      seen.append((signal.getsignal(signal.SIGTERM), stop.after(1)))

  thread = threading.Thread(target=work)
  thread.start()
  thread.join()
  assert seen == [(before, False)]
