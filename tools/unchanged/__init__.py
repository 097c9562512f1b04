"""Compares what two commits compute, to the bit: for refactorings."""
