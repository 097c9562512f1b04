"""The one exception for mistakes that a user can make; everything else that goes wrong is an assert.

It lives in a file of its own because every layer may raise it and no layer may import another for it.
"""


class UserError(Exception):
    """Something the user asked for cannot be done.

    The message names the culprit (a file, a tensor, an option, a strategy, a rank) and the mend, in words that make
    sense without the source code. `World.together` prints it once, without a traceback, and ends every rank.
    """
