"""The exception for errors that a user can fix; all other errors are asserts.

It has its own file so that every layer can raise it without importing another layer.
"""


class UserError(Exception):
    """A request of the user cannot be carried out.

    The message names the cause (a file, a tensor, an option, a strategy, a rank) and the fix, in terms that are clear
    without the source code. `World.together` prints it once, without a traceback, and ends every rank.
    """
