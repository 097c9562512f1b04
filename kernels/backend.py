"""Triton where it is installed (Linux), else a stand-in: the plain-torch half of every kernel file works anywhere."""

try:
    import triton
    import triton.language as tl
except ImportError:  # triton has wheels for Linux only

    class _Absent:
        """Lets a kernel file be imported: its decorators and annotations do nothing."""

        constexpr = None

        @staticmethod
        def jit(function):
            return function

    triton = tl = _Absent()

__all__ = ["tl", "triton"]
