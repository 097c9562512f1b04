"""The environment of `--preset tools`: a table of the row that only a tool can read, and a calculator."""

import operator
import re

OPERATIONS = {"+": operator.add, "-": operator.sub, "*": operator.mul}
EXPRESSION = re.compile(r"(-?\d{1,9})([-+*])(-?\d{1,9})")


class Table:
    """One episode: a question such as `amo*tiv`, whose numbers are in the table of its row."""

    def reset(self, table: dict[str, int]) -> None:
        self.table = table

    def lookup(self, word: str) -> str:
        """Looks a word up in the table.

        Args:
            word: The word.

        Returns:
            Its number, or that the table has no such word.
        """
        return str(self.table.get(word, "unknown"))

    def calculate(self, expression: str) -> str:
        """Computes a sum, a difference or a product of two whole numbers.

        Args:
            expression: Two numbers with +, - or * between them.

        Returns:
            The result.
        """
        found = EXPRESSION.fullmatch(expression)
        if found is None:
            raise ValueError("write two numbers with +, - or * between them")
        return str(OPERATIONS[found[2]](int(found[1]), int(found[3])))
