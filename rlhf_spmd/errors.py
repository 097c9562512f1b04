"""The exception for errors that a user can fix (all other errors are asserts), and the user's wish to end the program
by SIGINT.

They have their own file so that every layer can raise them without importing another layer.
"""

from signal import SIGINT, default_int_handler, getsignal, signal
from types import FrameType


class UserError(Exception):
    """A request of the user cannot be carried out.

    The message names the cause (a file, a tensor, an option, a strategy, a rank) and the fix, in terms that are clear
    without the source code. `World.together` prints it once, without a traceback, and ends every rank.
    """


_interrupts: list[int] = []  # SIGINTs that this process has received


def remember_interrupts() -> None:
    """Lets `pass_on_interrupt` know from now on whether a SIGINT arrived; call it in the main thread. SIGINT still
    raises KeyboardInterrupt, unless this process was started to ignore it."""
    if getsignal(SIGINT) is default_int_handler:
        signal(SIGINT, _interrupt)


def _interrupt(number: int, frame: FrameType | None) -> None:
    _interrupts.append(number)
    default_int_handler(number, frame)


def pass_on_interrupt(error: BaseException) -> None:
    """Raises an error of user code again if it is the user's wish to end the program: a KeyboardInterrupt of a SIGINT;
    without `remember_interrupts`, any."""
    if isinstance(error, KeyboardInterrupt) and (_interrupts or getsignal(SIGINT) is default_int_handler):
        raise error
