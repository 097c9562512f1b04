"""Kills, hangs and endings: is everything resumed, named and cleaned up?"""
